"""Exercise multiply_codes of chapter 34 (stretch, 15 points, about 30 minutes).

Multiply bytes by 4-bit codes. (The package's kernels compute the same, with the minimum as an
offset.) An input is (byte + zero) x scale, and a weight is code x scale + minimum; scales,
zeros and minima belong to groups of 32 columns. Along the columns, multiply and add only
integers, because the processor does that fast. Account for zero and minimum with the sums of
the codes and of the bytes. Return float32, [tokens, rows].

Check it:     minigen check exercises/34_cpu_kernels/multiply_codes.py
With a hint:  minigen check exercises/34_cpu_kernels/multiply_codes.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import load_model
    from minigen_course.ch34_cpu_kernels.lesson import continue_in_codes

    llm = load_model(weights="float32")
    print(continue_in_codes(llm, "The capital of France is", 3, mine))

Harder: The sum of a group's codes is the same for all tokens, and the sum of a group's bytes is
the same for all rows. When can you compute each of them, and what does that save if there is
only one token?
"""

# exercise: minigen_course.ch34_cpu_kernels.reference.multiply_codes
import numpy as np

from minigen_course.ch34_cpu_kernels.reference import ByteRows, CodeRows


def multiply_codes(weights: CodeRows, inputs: ByteRows) -> np.ndarray:
    """Compute inputs x weights^T, float32, [tokens, rows], from integer dot products and sums.

    Over a group, (byte + zero) x scale times (code x scale + minimum) adds up to two terms: (bytes
    x codes + zero x the sum of codes) times both scales, and (the sum of bytes + 32 x zero) times
    the input's scale and the weight's minimum.
    """
    raise NotImplementedError  # your turn
