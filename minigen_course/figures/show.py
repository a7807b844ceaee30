"""Text in a notebook: source code of the package, and measured values.

A comparison of notebook outputs skips the values that are marked as measured.
"""

import inspect
import math
import time
from collections.abc import Callable
from typing import Any

from IPython.display import Code, display

MONOSPACE = '<pre style="font-family: monospace">'  # exported pages lose the font


def show(*objects: Any) -> None:
    """Show the source of functions, classes or modules of the package, one after another.

    Raises `TypeError` for an object without Python source.
    """
    for each in objects:
        where = inspect.getmodule(each)
        name = getattr(each, "__qualname__", "")
        head = f"# {where.__name__}.{name}\n" if where is not None and name else ""
        source = head + inspect.getsource(each).rstrip()
        html = Code(source, language="python")._repr_html_().replace("<pre>", MONOSPACE)
        display({"text/plain": source, "text/html": html}, raw=True)


def measured(name: str, value: float, unit: str = "", digits: int = 3) -> None:
    """Print a measured value, marked as one, with `digits` significant digits.

    `notebooks/nbval_sanitize.cfg` knows the mark, because the value differs on every machine.

    >>> measured("decode", 28.1234, "tokens/s")
    decode: ⟨28.1 tokens/s⟩
    """
    print(f"{name}: {mark(value, unit, digits)}")


def mark(value: float, unit: str = "", digits: int = 3) -> str:
    """Return a measured value as text, inside the marks.

    >>> mark(0.5, "s")
    '⟨0.500 s⟩'
    """
    return f"⟨{significant(value, digits)}{' ' + unit if unit else ''}⟩"


def significant(value: float, digits: int = 3) -> str:
    """Return a number with `digits` significant digits, commas at thousands, no exponent.

    >>> [significant(each) for each in (0.0012345, 3.14159, 1234567.0, math.nan, -math.inf)]
    ['0.00123', '3.14', '1,230,000', 'nan', '-inf']
    """
    if value == 0 or not math.isfinite(value):
        return f"{value or 0.0:.0f}"
    rounded = float(f"{value:.{digits}g}")
    places = max(0, digits - len(f"{abs(int(rounded))}".lstrip("0")))
    if abs(rounded) < 1:
        places = digits - 1 - int(f"{rounded:e}".split("e")[1])
    return f"{rounded:,.{places}f}"


def best_seconds(run: Callable[[], object], repeats: int = 7) -> float:
    """Return the least seconds that `run` takes in `repeats` calls, after one warm-up call."""
    run()
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return min(found)
