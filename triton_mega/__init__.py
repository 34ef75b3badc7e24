"""Qwen3-TTS decode as one persistent Triton kernel. Importing this package touches no GPU."""

__version__ = "0.1.0"
