"""Exercise pack_q4_1 of chapter 11 (stretch, 15 points, about 25 minutes).

Quantise rows of numbers to Q4_1, the direction that `unpack_q4_1` reverses. `numbers` is
float32 of the shape (rows, columns), and columns is a multiple of 32; return uint8 of the shape
(rows, blocks, 20). The stored minimum is the least number of a block, the stored scale is a
fifteenth of the distance from the least to the greatest, both rounded to float16. Each number
gets the level from 0 to 15 that is *read back* as the nearest value: with the scale and the
minimum as they are stored, after rounding. A constant block has a scale of zero, and must be
read back as well.

Check it:     minigen check exercises/11_weights/pack_q4_1.py
With a hint:  minigen check exercises/11_weights/pack_q4_1.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen import hub
    from minigen.checkpoint.gguf import read_gguf
    from minigen.checkpoint.quant_formats import unpack_q4_1

    file = read_gguf(hub.resolve(hub.DEFAULT_MODEL))
    weights = file.tensors["blk.0.attn_q.weight"].dequantize()
    again = unpack_q4_1(mine(weights)).flatten(-2)
    print("largest change:", float((again - weights).abs().max()))

Harder: Other pairs of scale and minimum may lose less. Try scales a few per cent smaller, which
cut off the extreme numbers, and keep the pair with the least squared error for each block. How
much does the error of normally distributed numbers fall?
"""

# exercise: minigen_course.ch11_weights.reference.pack_q4_1
from jaxtyping import Float, UInt8
from torch import Tensor


def pack_q4_1(numbers: Float[Tensor, "rows columns"]) -> UInt8[Tensor, "rows blocks 20"]:
    """Quantize each row's blocks of 32 numbers to Q4_1.

    The stored minimum is the block's least number, and the stored scale a fifteenth of the distance
    to its greatest one, both as float16. Each number gets the level from 0 to 15 that is read back
    as the nearest value.
    """
    raise NotImplementedError  # your turn
