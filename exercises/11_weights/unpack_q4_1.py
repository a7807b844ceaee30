"""Exercise unpack_q4_1 of chapter 11 (core, 10 points, about 15 minutes).

Decode blocks of the format Q4_1. A block is 20 bytes: a scale and a minimum (float16), then 16
bytes with 32 levels of 4 bits, first all low halves, then all high halves. A number is level ×
scale + minimum. `blocks` has the shape (rows, blocks, 20); return float32 of the shape (rows,
blocks, 32).

Check it:     minigen check exercises/11_weights/unpack_q4_1.py
With a hint:  minigen check exercises/11_weights/unpack_q4_1.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams
    from minigen_course import load_model
    from minigen_course.ch11_weights.lesson import refreshed_formats

    params = SamplingParams(temperature=0, max_tokens=8)
    with using(11, unpack_q4_1=mine), refreshed_formats():
        llm = load_model(weights="float32")
    print(llm.generate("The capital of France is", params).text)

Harder: Write the other direction: the stretch exercise `pack_q4_1` checks it.
"""

# exercise: minigen.checkpoint.quant_formats.unpack_q4_1
from minigen.checkpoint.quant_formats import Blocks, Numbers


def unpack_q4_1(blocks: Blocks) -> Numbers:
    """Dequantize Q4_1: 32 numbers of 4 bits, each times the block's scale, plus its minimum.

    A block is 20 bytes: scale and minimum as float16, then 16 bytes of two numbers each.
    """
    raise NotImplementedError  # your turn
