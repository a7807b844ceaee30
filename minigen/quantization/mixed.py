"""Mixed precision: give each matrix the bits that it needs, within a size for the whole model.

The sensitivity of a matrix is how much the model gets worse if only this matrix is quantized. It is
measured for each form that the matrix could have. If these losses add up, the best mixture within a
number of bytes is a knapsack problem in which each matrix chooses one form. The greedy solution
buys the step with the largest gain per byte, again and again; `choose_exhaustively` is the oracle
for a few matrices. llama.cpp's `--target-bpw` and ExLlamaV2's measurement solve the same problem.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TypeVar

from minigen.errors import OptionError

MAX_COMBINATIONS = 10**6
Form = TypeVar("Form")


@dataclass(frozen=True)
class Choice:
    """One form that a matrix could have: its name, its bytes, and the loss that it adds."""

    form: str
    num_bytes: int
    loss: float


@dataclass(frozen=True)
class Mixture:
    """One choice for each matrix."""

    choices: Mapping[str, Choice]

    @property
    def num_bytes(self) -> int:
        """The bytes of all matrices."""
        return sum(each.num_bytes for each in self.choices.values())

    @property
    def loss(self) -> float:
        """The sum of the losses, each measured alone."""
        return sum(each.loss for each in self.choices.values())


def measure_sensitivity(
    names: Sequence[str],
    forms: Mapping[str, Form],
    num_bytes: Callable[[str, Form], int],
    loss: Callable[[str, Form], float],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, tuple[Choice, ...]]:
    """Return each matrix's choices, with the loss of the model if only this matrix has the form.

    `loss(name, form)` evaluates the model, for example by its KL divergence from the original;
    it is called once for each pair. `progress` gets the calls done, and their number.
    """
    found: dict[str, tuple[Choice, ...]] = {}
    total = len(names) * len(forms)
    for name in names:
        choices = []
        for label, form in forms.items():
            choices.append(Choice(label, num_bytes(name, form), loss(name, form)))
            progress(len(found) * len(forms) + len(choices), total)
        found[name] = tuple(choices)
    return found


def choose_greedily(options: Mapping[str, Sequence[Choice]], max_bytes: int) -> Mixture:
    """Return a mixture of at most `max_bytes`, by the largest gain per byte.

    Each matrix starts with its smallest form. The steps of a matrix are the corners of its lower
    convex hull of loss over bytes, so that its gain per byte falls from step to step. A step that
    does not fit is left out, with the later steps of its matrix. The loss exceeds the optimum by
    less than the gain of the first step that did not fit.

    Raises `OptionError` if the smallest forms together exceed `max_bytes`.
    """
    hulls = {name: lower_hull(choices) for name, choices in options.items()}
    chosen = {name: hull[0] for name, hull in hulls.items()}
    size = _check_size(chosen, max_bytes)
    steps = sorted(
        (
            (_gain_per_byte(before, after), name, after)
            for name, hull in hulls.items()
            for before, after in pairwise(hull)
        ),
        key=lambda step: -step[0],
    )
    stopped: set[str] = set()
    for _, name, after in steps:
        grown = size - chosen[name].num_bytes + after.num_bytes
        if name in stopped or grown > max_bytes:
            stopped.add(name)
        else:
            chosen[name], size = after, grown
    return Mixture(chosen)


def choose_exhaustively(options: Mapping[str, Sequence[Choice]], max_bytes: int) -> Mixture:
    """Return the mixture of at most `max_bytes` with the smallest loss, by trying all of them.

    Raises `OptionError` if there are more than a million, or if none is small enough.
    """
    count = 1
    for choices in options.values():
        count *= len(choices)
    if count > MAX_COMBINATIONS:
        raise OptionError(
            f"{len(options)} matrices have {count} mixtures, too many to try; "
            f"at most {MAX_COMBINATIONS} are tried, so use the greedy choice."
        )
    smallest = {
        name: min(choices, key=lambda each: each.num_bytes) for name, choices in options.items()
    }
    _check_size(smallest, max_bytes)
    best = Mixture(smallest)
    for combination in product(*options.values()):
        mixture = Mixture(dict(zip(options, combination, strict=True)))
        if mixture.num_bytes <= max_bytes and mixture.loss < best.loss:
            best = mixture
    return best


def least_loss_bound(options: Mapping[str, Sequence[Choice]], max_bytes: int) -> float:
    """Return a loss that no mixture of at most `max_bytes` can undercut.

    It is the loss of the knapsack in which the last step may be bought in part (its linear
    relaxation), so it tells how far the greedy choice can be from the optimum.
    """
    hulls = {name: lower_hull(choices) for name, choices in options.items()}
    first = {name: hull[0] for name, hull in hulls.items()}
    left = max_bytes - _check_size(first, max_bytes)
    loss = sum(each.loss for each in first.values())
    steps = [(before, after) for hull in hulls.values() for before, after in pairwise(hull)]
    for before, after in sorted(steps, key=lambda step: -_gain_per_byte(*step)):
        cost = after.num_bytes - before.num_bytes
        part = min(cost, left)
        loss -= _gain_per_byte(before, after) * part
        left -= part
    return loss


def lower_hull(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Return the choices that can be optimal at some price of a byte, from the smallest up.

    Each next one is larger and better, with less gain per byte than the one before it.
    """
    hull: list[Choice] = []
    for each in sorted(choices, key=lambda choice: (choice.num_bytes, choice.loss)):
        if hull and each.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _gain_per_byte(hull[-1], each) >= _gain_per_byte(*hull[-2:]):
            hull.pop()
        hull.append(each)
    return tuple(hull)


def _gain_per_byte(before: Choice, after: Choice) -> float:
    return (before.loss - after.loss) / (after.num_bytes - before.num_bytes)


def _check_size(chosen: Mapping[str, Choice], max_bytes: int) -> int:
    size = sum(each.num_bytes for each in chosen.values())
    if size > max_bytes:
        raise OptionError(
            f"The smallest forms of {len(chosen)} matrices need {size} bytes, more than the "
            f"{max_bytes} allowed; allow more bytes, or offer forms with fewer bits."
        )
    return size
