"""An independent persistent decode kernel in CUDA C++: the yardstick for the Triton kernels.

It shares no code with ``triton_mega.kernels``; README.md beside this file says where its design
comes from. Importing this package imports no CUDA package.
"""

from cuda_ref.options import KernelOptions, default_options

__all__ = ["KernelOptions", "default_options"]
