"""Exercise choose_bits of chapter 35 (core, 10 points, about 25 minutes).

Choose the bits of each matrix within `max_bytes`. `options` has for each matrix its choices
(bits, bytes, loss), from few bits to many. All matrices begin with their first choice. Then
look at the step of each matrix from its choice to its next one, and of the steps that still fit
make the one with the largest loss saved per byte; go on until no step fits that saves loss.
Return the bits by matrix. If the first choices do not fit, raise `ValueError` with a sentence.

Check it:     minigen check exercises/35_quantization/choose_bits.py
With a hint:  minigen check exercises/35_quantization/choose_bits.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen.quantization.mixed import Choice, choose_exhaustively, choose_greedily

    options = {
        "attention": [(2, 100, 6.0), (3, 150, 2.0), (4, 200, 1.0)],
        "mlp": [(2, 400, 9.0), (3, 600, 3.0), (4, 800, 1.0)],
    }
    choices = {name: [Choice(str(own[0]), *own[1:]) for own in each] for name, each in options.items()}
    for max_bytes in (500, 600, 700, 800, 1000):
        found = [choose(choices, max_bytes) for choose in (choose_greedily, choose_exhaustively)]
        its, best = ({name: int(each.form) for name, each in one.choices.items()} for one in found)
        print(f"{max_bytes} bytes: yours {mine(options, max_bytes)}, minigen's {its}, the best {best}")

Harder: Build options in which the greedy choice loses against the best one. (A large step that
does not fit any more is a good start.) Then add one thing: at the end, try to exchange one step
made for another.
"""

# exercise: minigen_course.ch35_quantization.reference.choose_bits
from collections.abc import Mapping, Sequence


def choose_bits(
    options: Mapping[str, Sequence[tuple[int, int, float]]], max_bytes: int
) -> dict[str, int]:
    """Return the bits of each matrix: the greedy choice within `max_bytes`.

    A matrix's options are (bits, bytes, loss), from few bits to many. All matrices begin with their
    first one. Then, of all steps from a matrix's option to its next one that still fit, the step
    with the largest loss saved per byte is made, until none that saves loss fits.

    Raises `ValueError` if the first options do not fit.
    """
    raise NotImplementedError  # your turn
