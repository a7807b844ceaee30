"""The course's tools for notebooks: `from minigen_course import check, measured, show`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minigen_course.figures.show import Claim as Claim
    from minigen_course.figures.show import mark as mark
    from minigen_course.figures.show import measured as measured
    from minigen_course.figures.show import show as show
    from minigen_course.figures.show import verdicts as verdicts
    from minigen_course.grading.check import check as check
    from minigen_course.grading.hunt import hunt as hunt
    from minigen_course.grading.plug_in import using as using
    from minigen_course.grading.predict import predict as predict
    from minigen_course.grading.task import reveal as reveal
    from minigen_course.grading.task import task as task
    from minigen_course.lab.inspect_model import load_model as load_model

_HOMES = {
    "Claim": "minigen_course.figures.show",
    "check": "minigen_course.grading.check",
    "hunt": "minigen_course.grading.hunt",
    "load_model": "minigen_course.lab.inspect_model",
    "mark": "minigen_course.figures.show",
    "measured": "minigen_course.figures.show",
    "predict": "minigen_course.grading.predict",
    "reveal": "minigen_course.grading.task",
    "show": "minigen_course.figures.show",
    "task": "minigen_course.grading.task",
    "using": "minigen_course.grading.plug_in",
    "verdicts": "minigen_course.figures.show",
}
__all__ = [
    *("Claim", "check", "hunt", "load_model", "mark", "measured"),
    *("predict", "reveal", "show", "task", "using", "verdicts"),
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line starts fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'minigen_course' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__


def load_ipython_extension(shell: Any) -> None:
    """Check the shapes in annotations from the next cell on (`%load_ext minigen_course`)."""
    import_module("minigen_course.shapes").watch(shell)
