"""Run a learner's kernel in the engine, and read a kernel's PTX, the assembly of NVIDIA GPUs.

Source: NVIDIA, Parallel Thread Execution ISA.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minigen.model.attention import causal_mask
from minigen.model.layers import rotary_tables
from minigen_course.ch31_triton import kernels
from minigen_course.lab.triton_interpreter import launch

BLOCK = 1024


def swiglu_by(kernel: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `minigen.model.layers.swiglu`, computed by a kernel with `silu_multiply`'s signature.

    Gate and up may be the halves of one product: the kernel gets the row stride of gate.
    """

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        num_tokens, ffn = gate.shape
        mixed = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        grid = (num_tokens, -(-ffn // BLOCK))
        launch(kernel, grid, gate, up, mixed, ffn, gate.stride(0), BLOCK=BLOCK)
        return mixed

    swiglu.__name__ = whose(kernel)
    return swiglu


def rms_norm_by(kernel: Any) -> Callable[[Tensor, Tensor, float], Tensor]:
    """Return `minigen.model.layers.rms_norm`, computed by a kernel with `rms_norm_rows`' signature.

    Rows must be contiguous, and a row must fit into one program.
    """

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        hidden = x.shape[-1]
        normalised, grid = torch.empty_like(x), (x.numel() // hidden,)
        block = 1 << (hidden - 1).bit_length()
        launch(kernel, grid, x, weight, normalised, hidden, eps, BLOCK=block)
        return normalised

    rms_norm.__name__ = whose(kernel)
    return rms_norm


def apply_rotary_by(kernel: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return `minigen.model.layers.apply_rotary`, computed by a kernel like `rotate_pairs`."""

    def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        num_tokens, num_heads, head_dim = x.shape
        x, rotated = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        rows = torch.arange(num_tokens, device=x.device)  # cos and sin have a row for each token
        sizes = (num_heads, head_dim // 2)
        block = 1 << (head_dim // 2 - 1).bit_length()
        grid = (num_tokens, num_heads)
        tables = (cos.contiguous(), sin.contiguous())
        launch(kernel, grid, x, *tables, rows, rotated, *sizes, BLOCK=block)
        return rotated

    apply_rotary.__name__ = whose(kernel)
    return apply_rotary


def attention_by(kernel: Any) -> Callable[..., Tensor]:
    """Return `minigen.model.attention.attention` with its softmax by a kernel like `softmax_rows`.

    The scores are a matrix in memory, as in `attention_naive`.
    """

    def attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        group, context = q.shape[1] // k.shape[1], len(k)
        k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~causal_mask(len(q), context, window), -torch.inf)
        weights, grid = torch.empty_like(scores), (scores.numel() // context,)
        launch(kernel, grid, scores, weights, context, BLOCK=1 << (context - 1).bit_length())
        return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)

    attention.__name__ = whose(kernel)
    return attention


def whose(kernel: Any) -> str:
    """Return a kernel's name with its owner, so that `using` says whose kernel ran.

    >>> whose(kernels.rms_norm_rows)
    "the package's rms_norm_rows"
    """
    name = getattr(kernel, "__name__", "kernel")
    owner = "the package's" if kernel is getattr(kernels, name, None) else "your"
    return f"{owner} {name}"


_NOT_INSTRUCTIONS = ("//", ".", "{", "}", "$", "(", ")", "@!$")


def instructions(ptx: str) -> list[str]:
    """Return the instructions in order, without directives, labels and comments.

    >>> instructions("{\\n .reg .b32 %r<9>;\\n@%p1 ld.global.b32 %r1, [%rd1];\\n ret; // 1\\n}")
    ['@%p1 ld.global.b32 %r1, [%rd1];', 'ret;']
    """
    lines = (" ".join(line.split("//")[0].split()) for line in ptx.splitlines())
    return [line for line in lines if line.endswith(";") and not line.startswith(_NOT_INSTRUCTIONS)]


def operation(instruction: str) -> str:
    """Return the operation of an instruction, without its predicate and its operands.

    >>> operation("@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];")
    'ld.global.v4.b32'
    """
    return re.sub(r"^@!?%p\d+ ", "", instruction).split()[0].rstrip(";")


def memory_instructions(ptx: str) -> list[str]:
    """Return the instructions that load from the GPU's memory or store to it."""
    return [each for each in instructions(ptx) if re.match(r"(ld|st)\.global", operation(each))]


def num_operations(ptx: str) -> Counter[str]:
    """Count the operations by the first part of their names: "ld", "fma", "setp"."""
    return Counter(operation(each).split(".")[0] for each in instructions(ptx))


BLOCK_SIZE = 4


class RotaryInputs(NamedTuple):
    """Arguments of `rotary_store_triton` and its torch version, in order.

    qkv, keys and values are float16, the tables float32.
    """

    qkv: Tensor
    norms: None
    eps: float
    tables: tuple[Tensor, Tensor]
    positions: Tensor
    slots: Tensor
    keys: Tensor
    values: Tensor

    def named(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        names = ("qkv", "positions", "slots", "keys", "values")
        cos, sin = self.tables
        return {name: getattr(self, name) for name in names} | {"cos": cos, "sin": sin}


def rotary_inputs(slots: Sequence[int], q_heads: int, kv_heads: int, head_dim: int) -> RotaryInputs:
    """Make one token per slot, at positions 0, 1, 2, ..., and a zero KV cache in blocks of 4."""
    num_tokens, num_blocks = len(slots), max(slots) // BLOCK_SIZE + 1
    positions = torch.arange(num_tokens)
    keys, values = (
        torch.zeros(num_blocks, BLOCK_SIZE, kv_heads, head_dim, dtype=torch.float16)
        for _ in range(2)
    )
    return RotaryInputs(
        qkv=torch.randn(num_tokens, (q_heads + 2 * kv_heads) * head_dim).half(),
        norms=None,
        eps=1e-5,
        tables=rotary_tables(torch.rand(head_dim // 2), positions),
        positions=positions,
        slots=torch.tensor(slots),
        keys=keys,
        values=values,
    )
