"""Predictions: a reader writes down a number or a word before the notebook computes it."""

import math
import sys
from dataclasses import dataclass

from minigen_course.figures.show import mark, significant

OPEN = "No prediction yet: write yours instead of None, and run this cell again."


@dataclass(frozen=True)
class Prediction:
    """What a reader expects; `compare` says how near it came.

    `value` is a number, a word, or None as long as nothing has been predicted. A number counts as
    near if it is at most `within` times too high or too low.
    """

    question: str
    value: float | str | None
    within: float

    def compare(self, found: float | str, unit: str = "", *, measured: bool = False) -> None:
        """Print what was found beside the prediction; `measured` marks it as a measured value.

        Raises `TypeError` if one is a number and the other is a word.
        """
        shown = _text(found, unit, measured)
        if self.value is None:
            print(f"{self.question} {shown}. (You made no prediction.)")
            return
        if isinstance(self.value, str) is not isinstance(found, str):
            kind = "a word" if isinstance(found, str) else "a number"
            raise TypeError(f"The answer is {kind}, but the prediction is {self.value!r}.")
        print(f"{self.question} You predicted {_text(self.value, unit)}; it is {shown}: ", end="")
        print(_verdict(self.value, found, self.within))


def predict(question: str, value: float | str | None, *, within: float = 1.25) -> Prediction:
    """Keep a prediction: `guess = predict("How many blocks?", None)`, later `guess.compare(7)`.

    Raises `TypeError` for a value that is neither a number nor a word, and `ValueError` for a
    number that is not finite and for `within` below 1.

    >>> guess = predict("How many eggs?", 10, within=2)
    Your prediction: 10.
    >>> guess.compare(12)
    How many eggs? You predicted 10; it is 12: near enough.
    """
    if not isinstance(value, int | float | str | None) or isinstance(value, bool):
        raise TypeError(f"A prediction is a number, a word, or None, not {value!r}.")
    if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
        raise ValueError("A prediction is a number of at most 1e308, a word, or None.")
    if within < 1:
        raise ValueError(f"within is a factor, so it must be at least 1, not {within}.")
    print(OPEN if value is None else f"Your prediction: {_text(value)}.")
    return Prediction(question, value, within)


def _text(value: float | str, unit: str = "", measured: bool = False) -> str:
    if isinstance(value, str):
        return repr(value)
    if measured and not isinstance(value, int):
        return mark(value, unit)
    number = f"{value:,}" if isinstance(value, int) else significant(value)
    shown = f"{number} {unit}".rstrip()
    return f"⟨{shown}⟩" if measured else shown


def _verdict(value: float | str, found: float | str, within: float) -> str:
    if isinstance(value, str) or isinstance(found, str):
        same = str(value).strip().casefold() == str(found).strip().casefold()
        return "right." if same else "not this time."
    if value == found:
        return "right."
    if math.isnan(found):
        return "not comparable."
    if not (value > 0 < found or value < 0 > found):
        return "too high." if value > found else "too low."
    smaller, larger = sorted((abs(value), abs(found)))
    factor = larger / smaller
    if factor <= within:
        return "near enough."
    way = "high" if value > found else "low"
    if factor == math.inf:
        return f"far too {way}."
    return f"{significant(factor, 2)} times too {way}."
