"""A learner's kernel in the engine, a kernel's PTX (NVIDIA's assembly), and a GPU in numbers.

Sources: NVIDIA, Parallel Thread Execution ISA; A100 Tensor Core GPU Architecture (white paper) and
data sheet; CUDA C++ Programming Guide, table of compute capabilities; CUDA's `cuda_occupancy.h`;
Dao et al. 2022, "FlashAttention", section 2.1.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minigen.kv_cache.paged import KVPool
from minigen.model.attention import causal_mask
from minigen.model.layers import DenseLinear, rotary_tables
from minigen.model.transformer import Layer, Transformer, run_layer
from minigen.protocols import Linear
from minigen_course.ch31_triton import kernels
from minigen_course.lab.memory_watch import Operator, record_operators
from minigen_course.lab.triton_interpreter import Access, launch

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
    "the course's rms_norm_rows"
    """
    name = getattr(kernel, "__name__", "kernel")
    owner = "the course's" if kernel is getattr(kernels, name, None) else "your"
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


def warp_loads(ptx: str, lanes_per_thread: int, itemsize: int) -> list[Access]:
    """Return what a program's first warp asks for in each load of a block, one access per load.

    Each thread has `lanes_per_thread` neighbouring lanes, and the kernel loads a single block of
    neighbours with numbers of `itemsize` bytes. The width of a load is in its name, and its place
    among the thread's lanes is what the compiler adds to the address of the first load. Masks are
    left out.

    >>> one = "ld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];"
    >>> two = "add.s64 %rd2, %rd1, 4;\\nld.global.b32 { %r1 }, [ %rd1 + 0 ];"
    >>> two += "\\nld.global.b32 { %r2 }, [ %rd2 + 0 ];"
    >>> [each.offsets[:3] for each in warp_loads(one, 2, 4)]
    [(0, 1, 2)]
    >>> [each.offsets[:3] for each in warp_loads(two, 2, 4)]
    [(0, 2, 4), (1, 3, 5)]
    """
    added = re.findall(r"add\.s64 (%rd\d+), (%rd\d+), (\d+);", "\n".join(instructions(ptx)))
    begins = {(to, base): int(num_bytes) for to, base, num_bytes in added}
    loads = [each for each in memory_instructions(ptx) if operation(each).startswith("ld.")]
    addresses = [re.findall(r"\[ ?(%rd\d+) ?\+ ?(\d+) ?\]", each)[0] for each in loads]
    found = []
    for load, (register, constant) in zip(loads, addresses, strict=True):
        begin = int(constant) + begins.get((register, addresses[0][0]), 0)
        count, bits = re.findall(r"(?:v(\d)\.)?b(\d+)$", operation(load))[0]
        first, width = begin // itemsize, int(count or 1) * int(bits) // 8 // itemsize
        lanes = [lanes_per_thread * thread + first for thread in range(WARP)]
        offsets = tuple(lane + place for lane in lanes for place in range(width))
        found.append(Access((0, 0, 0), False, "x", offsets, itemsize))
    return found


_PRODUCTS = ("mm", "addmm")
_PARTS = ("first norm", "rotation and store", "sum and norm", "SiLU x up", "last sum")


def operators_of_layer(
    model: Transformer, kv_heads: int, num_tokens: int
) -> dict[str, list[Operator]]:
    """Return torch's operators in the model's first layer, in 16 bits, without products.

    They are parted where the layer has its four products. Of attention, only the store of keys and
    values into a pool runs: reading them is left out. The cosines and sines of the positions are
    computed before, once for all layers, as the model does it.
    """
    layer, hidden = _in_16_bits(model.layers[0]), model.embedding.shape[1]
    pool = KVPool(1, num_tokens // 16 + 1, kv_heads, 16, model.head_dim, torch.float16)
    slots, x = torch.arange(num_tokens), torch.ones(num_tokens, hidden).half()
    rotation = model.rotation(slots)

    def store(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pool.store(0, k, v, slots)
        return q

    parts: list[list[Operator]] = [[]]
    for each in record_operators(
        lambda: run_layer(layer, x, rotation, store, model.head_dim, model.norm_eps)
    ):
        if each.name in _PRODUCTS:
            parts.append([])
        else:
            parts[-1].append(each)
    return dict(zip(_PARTS, parts, strict=True))


def _in_16_bits(layer: Layer) -> Layer:
    def linear(each: Linear) -> DenseLinear:
        assert isinstance(each, DenseLinear), "the model has dense weights"
        bias = None if each.bias is None else each.bias.half()
        return DenseLinear(each.weight.half(), bias, each.parts)

    return replace(
        layer,
        attention_norm=layer.attention_norm.half(),
        qkv=linear(layer.qkv),
        q_norm=None if layer.q_norm is None else layer.q_norm.half(),
        k_norm=None if layer.k_norm is None else layer.k_norm.half(),
        out=linear(layer.out),
        ffn_norm=layer.ffn_norm.half(),
        gate_up=linear(layer.gate_up),
        down=linear(layer.down),
    )


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


@dataclass(frozen=True)
class Level:
    """One kind of memory of a GPU: its bytes in total, and the bytes per second of all together."""

    name: str
    num_bytes: float
    bandwidth: float
    shared_by: str

    @property
    def gigabytes_a_second(self) -> int:
        """The bandwidth in GB/s, rounded."""
        return round(self.bandwidth / 1e9)


WARP = 32  # threads
NUM_SMS = 108
CLOCK = 1.41e9  # Hz
FLOPS = 19.5e12  # of float32, outside the tensor cores
# The memory of an A100 SXM 80 GB, from the data sheet; the others from the bytes for each clock: L2
# 5,120, shared memory 32 banks of 4 bytes in each SM. Registers: a multiplication with addition, 2
# FLOPs, reads three of 4 bytes, so this is what arithmetic at full speed reads.
A100 = (
    Level("HBM", 80e9, 2039e9, "the whole GPU"),
    Level("L2 cache", 40e6, 5120 * CLOCK, "the whole GPU"),
    Level("shared memory", NUM_SMS * 164 * 1024, NUM_SMS * 32 * 4 * CLOCK, "a program"),
    Level("registers", NUM_SMS * 65_536 * 4, FLOPS / 2 * 3 * 4, "one thread"),
)
REGISTERS, SHARED, WARPS, PROGRAMS = 65_536, 164 * 1024, 64, 32  # of one SM of an A100
PARTS = 4  # of an SM; each has a quarter of the registers
RESERVED, SHARED_UNIT = 1024, 128  # bytes of shared memory: the system's per program, a unit


@dataclass(frozen=True)
class Fit:
    """How many programs fit on one SM at the same time, and what limits their number."""

    num_programs: int
    num_warps: int  # of all these programs
    limit: str

    @property
    def occupancy(self) -> float:
        """The share of the SM's places for warps that are taken."""
        return self.num_warps / WARPS


def programs_that_fit(num_warps: int, registers: int, shared: int) -> Fit:
    """Return how many programs of `num_warps` warps fit on one SM of an A100.

    A program takes `registers` per thread, which are dealt out in units of 8, and `shared` bytes of
    shared memory plus 1 KiB that the system reserves, dealt out in units of 128 bytes. A warp takes
    its registers from one part of the SM, so what is left in two parts cannot be joined. Source:
    cuda_occupancy.h of the CUDA Toolkit.

    >>> programs_that_fit(num_warps=4, registers=32, shared=0)
    Fit(num_programs=16, num_warps=64, limit='places for warps')
    >>> programs_that_fit(num_warps=1, registers=216, shared=0)
    Fit(num_programs=8, num_warps=8, limit='registers')
    """
    dealt = -(-registers // 8) * 8
    warps_per_part = REGISTERS // PARTS // (dealt * WARP)
    room = {
        "registers": PARTS * warps_per_part // num_warps,
        "shared memory": SHARED // (-(-(shared + RESERVED) // SHARED_UNIT) * SHARED_UNIT),
        "places for warps": WARPS // num_warps,
        "places for programs": PROGRAMS,
    }
    fewest = min(room.values())
    limit = [name for name, each in room.items() if each == fewest][-1]
    return Fit(fewest, fewest * num_warps, limit)


SECTOR = 32  # bytes that a GPU fetches at least


def num_sectors(accesses: Sequence[Access]) -> int:
    """Return how many sectors of 32 bytes the loads and stores ask for, each on its own.

    Tensors start at a sector. An access that wants several numbers of a sector asks for it once.

    >>> row = Access((0, 0, 0), False, "x", tuple(range(32)), 4)
    >>> column = Access((0, 0, 0), False, "x", tuple(range(0, 1024, 32)), 4)
    >>> num_sectors([row]), num_sectors([column])
    (4, 32)
    """
    return sum(len(sectors_of(access)) for access in accesses)


def sectors_of(access: Access) -> set[int]:
    """Return the numbers of the sectors in which a load or store has an element."""
    return {offset * access.itemsize // SECTOR for offset in access.offsets}
