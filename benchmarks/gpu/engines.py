"""Engines with random weights, in the shapes of known models, created on the device.

They also run on a CPU, in Triton's interpreter: the tests run there what is measured on a GPU.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from minigen.engine.engine import Engine
from minigen.engine.scheduler import ContinuousScheduler
from minigen.kernels.triton.attention import DevicePool
from minigen.kernels.triton.kernel_model import KernelModel, kernel_model
from minigen.kernels.triton.runner import GpuRunner, captured_sizes, choose_on_device
from minigen.kv_cache.block_allocator import BlockAllocator, blocks_needed
from minigen.kv_cache.block_manager import BlockManager
from minigen.model.layers import DenseLinear, rotary_frequencies
from minigen.model.transformer import Layer, Transformer
from minigen.sampling.params import SamplingParams
from minigen.sampling.sampler import BatchSampler
from minigen.sequence import Sequence
from minigen.trace.events import Trace

CUDA, DTYPE, BLOCK_SIZE = torch.device("cuda"), torch.bfloat16, 16


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that determine its speed."""

    vocab: int
    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    tied: bool
    head_norms: bool

    def products(self) -> list[tuple[str, int, int, int]]:
        """Return each product's name, its count per token, and its weight's rows and columns."""
        q_width, kv_width = self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            ("qkv", self.layers, q_width + 2 * kv_width, self.hidden),
            ("out", self.layers, self.hidden, q_width),
            ("gate_up", self.layers, 2 * self.ffn, self.hidden),
            ("down", self.layers, self.hidden, self.ffn),
            ("head", 1, self.vocab, self.hidden),
        ]


LLAMA_3_8B = Shape(128_256, 4096, 32, 32, 8, 128, 14_336, tied=False, head_norms=False)
QWEN3_0_6B = Shape(151_936, 1024, 28, 16, 8, 128, 3072, tied=True, head_norms=True)


def random_model(
    shape: Shape,
    max_positions: int,
    device: torch.device = CUDA,
    dtype: torch.dtype = DTYPE,
) -> KernelModel:
    """Return a model with random weights, scaled so that activations keep their size."""
    torch.manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        made = torch.empty(rows, columns, dtype=dtype, device=device)
        return made.normal_(0, columns**-0.5)

    def linear(columns: int, *parts: int) -> DenseLinear:
        return DenseLinear(matrix(sum(parts), columns), None, parts)

    def ones(width: int) -> Tensor:
        return torch.ones(width, dtype=dtype, device=device)

    q_width, kv_width = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layers = tuple(
        Layer(
            attention_norm=ones(shape.hidden),
            qkv=linear(shape.hidden, q_width, kv_width, kv_width),
            q_norm=ones(shape.head_dim) if shape.head_norms else None,
            k_norm=ones(shape.head_dim) if shape.head_norms else None,
            out=linear(q_width, shape.hidden),
            ffn_norm=ones(shape.hidden),
            gate_up=linear(shape.hidden, shape.ffn, shape.ffn),
            down=linear(shape.ffn, shape.hidden),
        )
        for _ in range(shape.layers)
    )
    embedding = matrix(shape.vocab, shape.hidden)
    own = embedding if shape.tied else matrix(shape.vocab, shape.hidden)
    model = Transformer(
        embedding=embedding,
        layers=layers,
        norm=ones(shape.hidden),
        head=DenseLinear(own, None, (shape.vocab,)),
        frequencies=rotary_frequencies(shape.head_dim, 1e6),
        head_dim=shape.head_dim,
        norm_eps=1e-6,
    )
    return kernel_model(model, max_positions, device)


def bytes_a_token(model: KernelModel) -> int:
    """Return the bytes of the weight matrices that one decoded token reads."""
    linears = [each for layer in model.model.layers for each in _linears(layer)]
    linears.append(model.model.head)
    return sum(each.weight.numel() * each.weight.itemsize for each in linears)


def _linears(layer: Layer) -> list[DenseLinear]:
    made = [layer.qkv, layer.out, layer.gate_up, layer.down]
    return [each for each in made if isinstance(each, DenseLinear)]


def make_engine(
    model: KernelModel,
    shape: Shape,
    longest: int,
    max_num_seqs: int,
    num_blocks: int,
    max_num_batched_tokens: int = 16_384,
    windows: SequenceOf[int | None] | None = None,
) -> Engine:
    """Return an engine with minigen's own parts and the GPU runner; a GPU captures its decodes.

    `windows` are the layers' sliding windows, if some have one. `model` may be a rank's share, and
    `shape` then has its heads.
    """
    trace, embedding = Trace(), model.model.embedding
    device, dtype = embedding.device, embedding.dtype
    manager = BlockManager(
        BlockAllocator(num_blocks),
        None,
        BLOCK_SIZE,
        max_num_seqs,
        blocks_needed(longest, BLOCK_SIZE),
        trace,
    )
    sizes = (shape.kv_heads, BLOCK_SIZE, shape.head_dim)
    pool = DevicePool(shape.layers, num_blocks, *sizes, dtype, device)
    windows = windows or [None] * shape.layers
    captured = captured_sizes(max_num_seqs) if device.type == "cuda" else ()
    runner = GpuRunner(model, pool, manager, windows, max_num_batched_tokens, captured)
    scheduler = ContinuousScheduler(manager, max_num_seqs, max_num_batched_tokens)
    return Engine(scheduler, runner, BatchSampler(choose_on_device), trace)


def greedy(sequence_id: int, prompt: list[int], num_tokens: int) -> Sequence:
    """Return greedy params for exactly `num_tokens` tokens."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return Sequence(sequence_id, tuple(prompt), params, 0, num_tokens, frozenset())


def run(engine: Engine, sequences: list[Sequence]) -> None:
    """Step until all sequences are finished."""
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work():
        engine.step()  # it waits for its tokens
