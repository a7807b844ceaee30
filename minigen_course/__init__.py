"""The course's tools for notebooks: `from minigen_course import check, measured, show`."""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minigen_course.figures.claims import NOT_TESTED as NOT_TESTED
    from minigen_course.figures.claims import Claim as Claim
    from minigen_course.figures.claims import holds as holds
    from minigen_course.figures.claims import verdicts as verdicts
    from minigen_course.figures.claims import within as within
    from minigen_course.figures.engine_map import chapter_map as chapter_map
    from minigen_course.figures.show import mark as mark
    from minigen_course.figures.show import measured as measured
    from minigen_course.figures.show import show as show
    from minigen_course.grading.check import check as check
    from minigen_course.grading.hunt import hunt as hunt
    from minigen_course.grading.plug_in import using as using
    from minigen_course.grading.predict import predict as predict
    from minigen_course.grading.task import reveal as reveal
    from minigen_course.grading.task import task as task
    from minigen_course.lab.inspect_model import load_model as load_model

_NAMES = {  # module -> its public names
    "figures.claims": ("Claim", "NOT_TESTED", "holds", "verdicts", "within"),
    "figures.engine_map": ("chapter_map",),
    "figures.show": ("mark", "measured", "show"),
    "grading.check": ("check",),
    "grading.hunt": ("hunt",),
    "grading.plug_in": ("using",),
    "grading.predict": ("predict",),
    "grading.task": ("reveal", "task"),
    "lab.inspect_model": ("load_model",),
}
_HOMES = {name: f"minigen_course.{module}" for module, names in _NAMES.items() for name in names}
__all__ = [
    *("Claim", "NOT_TESTED", "chapter_map", "check", "holds", "hunt", "load_model", "mark"),
    *("measured", "predict", "reveal", "show", "task", "using", "verdicts", "within"),
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line starts fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'minigen_course' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__


def load_ipython_extension(shell: Any) -> None:
    """Check the shapes in annotations from the next cell on (`%load_ext minigen_course`).

    The rest of the cell imports. Its objects, nearly all of them modules' and functions', live as
    long as the process, so they are set apart (`gc.freeze`). Otherwise each full run of the garbage
    collector looks through half a million of them again, for a few tenths of a second.
    """
    gc.disable()
    import_module("minigen_course.shapes").watch(shell)

    def freeze(*result: object) -> None:
        gc.freeze()
        gc.enable()
        shell.events.unregister("post_run_cell", freeze)

    shell.events.register("post_run_cell", freeze)
