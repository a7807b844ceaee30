"""Measured values: printed so that a reader sees them, and a comparison of outputs skips them."""

import time
from collections.abc import Callable


def measured(name: str, value: float, unit: str = "", digits: int = 3) -> None:
    """Print a measured value, marked as one, with so many significant digits.

    `notebooks/nbval_sanitize.cfg` knows the mark: what stands in it differs on every machine.

    >>> measured("decode", 28.1234, "tokens/s")
    decode: ⟨28.1 tokens/s⟩
    """
    print(f"{name}: {mark(value, unit, digits)}")


def mark(value: float, unit: str = "", digits: int = 3) -> str:
    """A measured value as text, in the marks.

    >>> mark(0.5, "s")
    '⟨0.500 s⟩'
    """
    return f"⟨{significant(value, digits)}{' ' + unit if unit else ''}⟩"


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, thousands parted by commas, no exponent.

    >>> [significant(each) for each in (0.0012345, 3.14159, 1234567.0)]
    ['0.00123', '3.14', '1,230,000']
    """
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits}g}")
    places = max(0, digits - len(f"{abs(int(rounded))}".lstrip("0")))
    if abs(rounded) < 1:
        places = digits - 1 - int(f"{rounded:e}".split("e")[1])
    return f"{rounded:,.{places}f}"


def best_seconds(run: Callable[[], object], repeats: int = 7) -> float:
    """What `run` takes when nothing disturbs it: the least of so many times, after one for free."""
    run()
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        found.append(time.perf_counter() - begun)
    return min(found)
