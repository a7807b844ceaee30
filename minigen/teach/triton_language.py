"""Triton's language; where it is not installed, what lets kernels be read, and not run."""

from types import SimpleNamespace
from typing import Any

try:
    import triton.language as tl
except ImportError:
    language: Any = SimpleNamespace(constexpr=int)
    tl = language

__all__ = ["tl"]
