"""Bug hunt minus_one of chapter 35 (core, 10 points, about 15 minutes).

**The report.** *A GPTQ checkpoint of version 2 works. The same model in version 1 writes fluent
nonsense. I compared the dequantised matrices: of every eight outputs, one is right to the last
bit. The other seven are all shifted by one step of their scale.* The values of a 4-bit matrix
are (code - zero) * scale, so a zero point that is wrong by one shifts a whole group, and the
errors of a row all have the same sign: they do not cancel in a sum.

Find the mistake in the part below. Catch it with a test that fails on this part and passes on
every correct one. Then mend the part in the same file.

Check both:  minigen check exercises/35_quantization/hunt_minus_one.py
"""

# hunt: minigen_course.ch35_quantization.hunt
from minigen_course.ch35_quantization.hunt import ReadZeros


def read_zeros(words: list[int], version: int) -> list[int]:
    """Return the zero points, 0 to 15, of a row of GPTQ's `qzeros`.

    Each word is an int32, so it may be negative, and has eight zero points of 4 bits, the first one
    in the lowest bits. Version 2 stores the zero points as they are. Version 1 stores each of them
    minus one, in 4 bits: 0 is stored as 15.
    """
    zeros: list[int] = []
    for word in words:
        if version == 1:
            word += 1
        zeros += [(word >> (4 * place)) & 15 for place in range(8)]
    return zeros


def test_zeros(read_zeros: ReadZeros) -> None:
    """Assert what every correct `read_zeros` does, and the one above does not."""
    raise NotImplementedError  # your turn
