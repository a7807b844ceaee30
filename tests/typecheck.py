"""A pytest plugin that checks the shapes in annotations whenever a function is called.

It concerns the functions and dataclasses of the packages that write shapes, which mypy cannot
check. All others are mypy's alone: checking each of their calls would take more time than the tests
themselves. No module that defines kernels writes shapes, because the import hook would replace the
globals of a kernel.
"""

import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

ROOT = Path(__file__).resolve().parent.parent
WRITES_SHAPES = re.compile(r"^from jaxtyping import", re.MULTILINE)
checker = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int passes for a float


def modules_with_shapes() -> list[str]:
    """Return the names of the modules whose annotations can hold shapes."""
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in ("minigen", "minigen_course")
        for path in sorted((ROOT / package).rglob("*.py"))
        if WRITES_SHAPES.search(path.read_text(encoding="utf-8"))
    ]


HOOKED = frozenset(modules_with_shapes())


def holds_shapes(part: Callable[..., Any]) -> bool:
    """Whether the annotations of a function, or the fields of a class, hold a shape."""
    kinds = part.__mro__ if isinstance(part, type) else (part,)
    return any("jaxtyping." in repr(inspect.get_annotations(each)) for each in kinds)


def jaxtyped_if_shaped(
    part: Any = None, *, decorate: Any = jaxtyping.jaxtyped, **options: Any
) -> Any:
    """Apply jaxtyping's decorator, but not to what the import hook finds and holds no shapes."""
    if part is None:
        return partial(jaxtyped_if_shaped, **options)
    if part.__module__ in HOOKED and not holds_shapes(part):
        return part
    return decorate(part, **options)


# The import hook applies it to every function and class.
jaxtyping.jaxtyped = jaxtyped_if_shaped  # type: ignore[assignment]
jaxtyping.install_import_hook(sorted(HOOKED), "tests.typecheck.checker")
