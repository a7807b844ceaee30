"""What chapter 31's exercises say: statements, hints, uses, and what is harder."""

from typing import Any

ADD_SCALED: dict[str, Any] = {
    "hints": (
        "tl.program_id(0) is this program's number; tl.arange(0, BLOCK) is 0 to BLOCK - 1.",
        "Block number i begins at i * BLOCK. A pointer plus a block of places is a block of "
        "pointers, which tl.load and tl.store take.",
        "places < num says which of them are there: mask= of both loads, and of the store.",
    ),
    "statement": "Write your first kernel: `num` numbers of `x + factor * y`, in blocks of "
    "`BLOCK`. Each program loads its block of x and of y, and stores its block of the sum. The "
    "last block may reach over the end: what is behind belongs to somebody else.",
    "use": """from minigen.teach import load_model
from minigen.teach.interpreted import launch
from minigen.teach.recording import recorded_states

import torch

states = recorded_states(load_model(weights="float32"), [1, 2, 3])[:, -1]  # one token's
before, added = states[-2], states[-1] - states[-2]  # the last layer, and what it adds
after = torch.empty_like(before)
launch(mine, (3,), before, added, after, len(before), 1.0, BLOCK=256)
print("as the model's own sum:", torch.allclose(after, states[-1]))""",
    "harder": "Let each program add two blocks, the second one as far behind the first as there "
    "are programs. What changes in the bytes, and in the number of programs?",
}

_ENGINE_USE = """from minigen import SamplingParams
from minigen.teach import load_model
from minigen.teach.interpreted import interpreted
from minigen.teach.launching import {by}

llm = load_model(weights="float32", prefix_cache=False)
with interpreted(), using(13, {layer}={by}(mine)):
    print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=4)).text)"""

SILU_MULTIPLY: dict[str, Any] = {
    "hints": (
        "The grid has two axes: tl.program_id(0) is the row, tl.program_id(1) the block in it.",
        "gate_ptr + row * row_stride + columns; mixed lies otherwise: its rows are num_columns "
        "long.",
        "tl.load(...).to(tl.float32) first: tl.sigmoid wants it. tl.store rounds back by itself.",
    ),
    "statement": "Write SwiGLU's middle as one kernel: SiLU(gate) x up, number by number, where "
    "SiLU(z) = z x sigmoid(z). Gate and up are the two halves of every row of one product, so "
    "their rows begin `row_stride` numbers apart. The result's rows lie close together. Compute "
    "in float32.",
    "use": _ENGINE_USE.format(by="swiglu_by", layer="swiglu"),
    "harder": "row * row_stride is a number of 32 bits. From how many tokens on, at an ffn of "
    "14,336, does it overflow, and what does the package's kernel do about it?",
}

RMS_NORM_ROWS: dict[str, Any] = {
    "hints": (
        "One program has one row: its columns are tl.arange(0, BLOCK), those below num_columns.",
        "tl.sum(x * x, axis=0) / num_columns is the mean square, if the lanes without a column "
        "hold 0: other=0.0 in the load of x.",
        "tl.rsqrt(z) is 1 / sqrt(z). x is still there for the product: it was loaded once.",
    ),
    "statement": "Write RMSNorm as one kernel: each row of x is divided by the root of its mean "
    "square, to which `eps` was added, and multiplied by `weight`, column by column. A program "
    "has a whole row, and loads it once. Compute in float32.",
    "use": _ENGINE_USE.format(by="rms_norm_by", layer="rms_norm"),
    "harder": "Add the residual sum before it: load a second row, store the sum over it, and "
    "normalise the sum. How many bytes does that save against a kernel of its own? Compare with "
    "minigen.kernels.gpu.norm.",
}
