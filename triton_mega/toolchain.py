"""What Triton and torch.compile need beside Python packages, and version pairs that do not work.

Looks only: compiles nothing and imports none of the packages. Answers are the reason why something
is in the way, None where nothing is.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sysconfig
from pathlib import Path


def release(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: "2.13.0+cpu" gives (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def interpreter_fault(triton_version: str, numpy_version: str) -> str | None:
    """Returns why Triton's interpreter does not work with this numpy."""
    if release(triton_version)[:2] == (3, 6) and release(numpy_version) >= (2, 4):
        return f"the interpreter of triton {triton_version} crashes on numpy {numpy_version}"
    return None


def installed_interpreter_fault() -> str | None:
    """Returns why the installed Triton's interpreter does not work with the installed numpy."""
    return interpreter_fault(*(importlib.metadata.version(name) for name in ("triton", "numpy")))


def wanted_compiler() -> str:
    """Returns the C compilers that would do, as a person would say it: $CC, or the usual names."""
    return os.environ.get("CC") or "gcc or clang"


def find_compiler() -> str | None:
    """Returns the path of a C compiler: $CC where that is set, else gcc or clang."""
    names = wanted_compiler().split(" or ")
    return next((path for name in names if (path := shutil.which(name))), None)


def python_header() -> Path:
    """Returns where Triton looks for Python.h (Debian's own install scheme holds no headers)."""
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    return Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"


def launcher_fault() -> tuple[str, str] | None:
    """Returns why no launcher of a kernel can be compiled, and a hint."""
    if find_compiler() is None:
        return f"no C compiler ({wanted_compiler()})", "install gcc, or set CC"
    if not (header := python_header()).exists():
        return f"no {header}", "install your distribution's python3-dev"
    return None
