"""What some chapters need beside the package, and one sentence where it is missing."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from minigen.errors import OptionError


def need_triton() -> None:
    """Raises `OptionError`, which says what to do, where Triton is not installed."""
    if find_spec("triton") is None:
        raise OptionError(
            "This needs Triton, which is there for Linux alone: pip install 'minigen[gpu]' (on "
            "Windows inside WSL), or open the notebook on Colab. No GPU is needed. Until then, "
            "read on: the pages hold every output."
        )


def triton_part(module: str) -> Any:
    """A module that imports Triton at once; raises `OptionError` where that cannot be."""
    need_triton()
    return import_module(module)
