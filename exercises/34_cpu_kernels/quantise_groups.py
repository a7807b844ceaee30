"""Exercise quantise_groups of chapter 34 (core, 10 points, about 20 minutes).

Quantise numbers to bytes. Every `size` numbers of a row form a group with one scale, chosen so
that the number with the largest magnitude becomes 127 or -127. A group of zeros has the scale
0; do not divide by it, because NumPy's warnings are errors here. Return the bytes (int8, [rows,
groups, size]) and the scales (float32, [rows, groups]).

Check it:     minigen check exercises/34_cpu_kernels/quantise_groups.py
With a hint:  minigen check exercises/34_cpu_kernels/quantise_groups.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import load_model
    from minigen_course.ch34_cpu_kernels.lesson import continue_rounded

    llm = load_model(weights="float32")
    print(continue_rounded(llm, "The history of the sea begins", 12, mine))

Harder: A byte has 256 values, and this uses 255 of them, symmetric around 0. If all numbers of
a group are positive, half of these values are wasted. Add a minimum per group, as the 4-bit
weights have. What else does the product need to know then?
"""

# exercise: minigen_course.ch34_cpu_kernels.lesson.quantise_groups
import numpy as np


def quantise_groups(rows: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantise numbers to bytes, with a scale for every `size` of a row: number = byte x scale.

    `rows` is float32, [rows, width], and `size` divides the width. Returns the bytes (int8 from
    -127 to 127, [rows, groups, size]) and the scales (float32, [rows, groups]). The largest
    magnitude of a group is 127 steps, and each number goes to the nearest step. A group of zeros
    has the scale 0.
    """
    raise NotImplementedError  # your turn
