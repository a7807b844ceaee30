"""Exercise multiply_bytes of chapter 34 (core, 10 points, about 15 minutes).

Multiply a matrix by a vector when both are bytes with a scale for each group. Within a group,
multiply and add only integers. After that, multiply the group's sum by two scales, the row's
and the input's. A product of row r is the sum over its groups. `codes` is int8, [rows, groups,
size], `scales` float32, [rows, groups], `inputs` int8, [groups, size], `input_scales` float32,
[groups]. Return float32, [rows]. Do not change the arguments.

Check it:     minigen check exercises/34_cpu_kernels/multiply_bytes.py
With a hint:  minigen check exercises/34_cpu_kernels/multiply_bytes.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import load_model
    from minigen_course.ch34_cpu_kernels.lesson import continue_in_bytes

    llm = load_model(weights="float32")
    print(continue_in_bytes(llm, "The capital of France is", 3, mine))

Harder: How many multiplications does a row of 576 numbers need with a scale for each 32, and
how many of them are between floats? And with a scale for each 8?
"""

# exercise: minigen_course.ch34_cpu_kernels.reference.multiply_bytes
import numpy as np


def multiply_bytes(
    codes: np.ndarray, scales: np.ndarray, inputs: np.ndarray, input_scales: np.ndarray
) -> np.ndarray:
    """Compute a matrix times a vector, float32, [rows], from bytes and their scales.

    `codes` are int8, [rows, groups, size], with `scales` float32, [rows, groups]; `inputs` are
    int8, [groups, size], with `input_scales` float32, [groups]. A number is byte x scale.
    """
    raise NotImplementedError  # your turn
