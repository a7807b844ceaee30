"""Exercise pack_nibbles of chapter 35 (warm-up, 5 points, about 10 minutes).

Pack codes of 4 bits (0 to 15, one in each byte) two to a byte. The first code of a pair has the
low four bits, the second one the high four. If the number of codes is odd, the last byte has 0
in its high half. Return a tensor of uint8; the codes that are given must not change.

Check it:     minigen check exercises/35_quantization/pack_nibbles.py
With a hint:  minigen check exercises/35_quantization/pack_nibbles.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    import torch
    from minigen.kv_cache.quantized import unpack

    packed = mine(torch.arange(16, dtype=torch.uint8))
    print([f"{each:02x}" for each in packed.tolist()])
    print("as minigen's KV cache reads them:", unpack(packed, 4).tolist())

Harder: Write the way back: `unpack_nibbles(packed, count)`. Then pack codes of 3 bits without
gaps: which of them lie in two bytes, and after how many bytes does the pattern repeat?
"""

# exercise: minigen_course.ch35_quantization.reference.pack_nibbles
from jaxtyping import UInt8
from torch import Tensor


def pack_nibbles(codes: UInt8[Tensor, " count"]) -> UInt8[Tensor, " half"]:
    """Return codes of 4 bits as bytes, two in each: the first code has the low half.

    The last byte of an odd number of codes has 0 in its high half.
    """
    raise NotImplementedError  # your turn
