"""Replace a part of the package by the learner's own, so that the running engine calls it."""

import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

from minigen_course.grading.exercise import exercises

RUN_PARTS = {"figures", "flash", "kernels", "reference"}  # modules of the course that use parts


@contextmanager
def using(chapter: int | str, **parts: Any) -> Generator[None, None, None]:
    """Let the whole package use your parts in a block: `with using(16, keep_top_p=mine):`.

    Every module that holds the package's own object gets yours, and its own again at the end, when
    a line says what ran and how many calls it had (for a class: how many objects were created).
    Raises `ValueError` for a name that the chapter does not have.
    """
    known = exercises(f"{int(chapter):02}")
    for name in parts:
        if name not in known:
            raise ValueError(f"Chapter {chapter} has no {name}; it has {', '.join(known)}.")
    calls = dict.fromkeys(parts, 0)
    changed: list[tuple[Any, str, Any]] = []
    with ExitStack() as counting:
        for name, part in parts.items():
            own, count = known[name].solution, partial(_count, calls, name)
            if isinstance(part, type):
                counting.enter_context(_counted_objects(part, count))
                yours: Any = part
            else:
                yours = _counted(part, count)
            for module in [each for key, each in sys.modules.items() if _runs_parts(key)]:
                if vars(module).get(name) is own:
                    changed.append((module, name, own))
                    setattr(module, name, yours)
        try:
            yield
        finally:
            for module, name, own in changed:
                setattr(module, name, own)
    for name, part in parts.items():
        print(_what_ran(name, part, part is known[name].solution, calls[name]))


def _count(calls: dict[str, int], name: str) -> None:
    calls[name] += 1


def _counted(part: Callable[..., Any], count: Callable[[], None]) -> Callable[..., Any]:
    @wraps(part)
    def call(*args: Any, **kwargs: Any) -> Any:
        count()
        return part(*args, **kwargs)

    return call


@contextmanager
def _counted_objects(part: type, count: Callable[[], None]) -> Generator[None, None, None]:
    """Call `count` for each object of this class that is created while the block runs."""
    own = part.__init__  # type: ignore[misc]

    def create(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is part:
            count()
        own(self, *args, **kwargs)

    with patch.object(part, "__init__", wraps(own)(create)):
        yield


def _what_ran(name: str, part: Any, is_package: bool, count: int) -> str:
    """Return a sentence that calls a part yours only if it is."""
    did = "created" if isinstance(part, type) else "called"
    own_name = getattr(part, "__name__", name)
    if is_package:
        whose = f"the package's own {name}"
    elif own_name == name:
        whose = f"your {name}"
    else:
        whose = f"{own_name}, in place of {name},"
    return f"{whose} was {did} {count} {'time' if count == 1 else 'times'}"


def _runs_parts(module: str) -> bool:
    """Return whether a module of this name uses parts as the engine does."""
    package, _, rest = module.partition(".")
    in_course = package == "minigen_course" and not RUN_PARTS.isdisjoint(rest.split("."))
    return package == "minigen" or in_course
