"""Bug hunt nibble_order of chapter 35 (core, 10 points, about 20 minutes).

**The report.** *An AWQ checkpoint whose zero points are all 8 works. The same model with zero
points of its own, which should be better, writes nonsense. I compared the dequantised matrices:
of every eight adjacent outputs, the first and the last are right. Each of the other six is
shifted by a constant within a group: whole steps of its scale.* AWQ's files and GPTQ's both
have eight numbers of 4 bits in a word. GPTQ's are in plain order, and AWQ's are not, for the
sake of the kernel that unpacks them.

Find the mistake in the part below. Catch it with a test that fails on this part and passes on
every correct one. Then mend the part in the same file.

Check both:  minigen check exercises/35_quantization/hunt_nibble_order.py
"""

# hunt: minigen_course.ch35_quantization.hunts.nibble_order
from minigen_course.ch35_quantization.hunts.nibble_order import Matrix, ReadAWQ, Words


def read_awq(qweight: Words, qzeros: Words, scales: Matrix, size: int) -> Matrix:
    """Return the weight that AWQ stores with 4 bits: rows are inputs, columns outputs.

    A word is an int32, maybe negative, and has eight numbers of 4 bits of adjacent columns. From
    the lowest bits upwards they belong to columns 0, 2, 4, 6, 1, 3, 5 and 7, in `qweight` and
    in `qzeros`. `qzeros` and `scales` have one row for every `size` rows of `qweight`. `scales` has
    one value per column, in plain order. A value is (code - zero) * scale.
    """
    weight = []
    for row, words in enumerate(qweight):
        group, values = row // size, []
        for column, scale in enumerate(scales[group]):
            place = (0, 4, 1, 5, 2, 6, 3, 7)[column % 8]
            code = (words[column // 8] >> (4 * place)) & 15
            zero = (qzeros[group][column // 8] >> (4 * (column % 8))) & 15
            values.append((code - zero) * scale)
        weight.append(values)
    return weight


def test_awq(read_awq: ReadAWQ) -> None:
    """Assert what every correct `read_awq` does, and the one above does not."""
    raise NotImplementedError  # your turn
