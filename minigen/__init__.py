"""minigen: an LLM inference engine that you can hold in your head.

>>> import minigen
>>> minigen.SamplingParams(temperature=0).greedy
True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minigen.errors import MinigenError as MinigenError
    from minigen.llm import LLM as LLM
    from minigen.sampling.params import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "MinigenError", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "minigen.llm",
    "MinigenError": "minigen.errors",
    "SamplingParams": "minigen.sampling.params",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that `import minigen` is fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'minigen' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
