"""The model on a GPU as a `Runner`: fused kernels, and decode steps as CUDA graphs.

A layer is four matrix products and five kernels, where plain torch launches more than forty. For a
single token the products are kernels, too, fused with what is before and after them. A step of
decodes only is padded to a captured batch size, with rows that write to block 0, and then costs one
launch. Sampling settings that the sampling kernel does not support are handled on the CPU. Source:
CUDA C++ Programming Guide, "CUDA Graphs"; torch.cuda.CUDAGraph.
"""

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from minigen.checkpoint.safetensors import StoredTensor
from minigen.engine.model_runner import Packed, Packer
from minigen.kernels.triton.attention import DevicePool, PagedAttention, to_device
from minigen.kernels.triton.elementwise import (
    rms_norm_triton,
    rotary_store_triton,
    silu_multiply_triton,
)
from minigen.kernels.triton.matvec import matvec_triton
from minigen.kernels.triton.sampling import choose_triton
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.paged import Batch
from minigen.model.layers import DenseLinear, rotary_tables
from minigen.model.transformer import Layer, MakeLinear, Transformer
from minigen.protocols import Linear
from minigen.sampling.params import SamplingParams
from minigen.sampling.sampler import choose_tokens, uniform_draws
from minigen.sequence import ScheduledChunk, Sequence

ReadLayer = Callable[[int, Tensor], Tensor]  # attention of a layer, by its id and the queries
Logits = Float[Tensor, "rows vocab"]


@dataclass(frozen=True)
class DenseLayer:
    """The linear layers of one layer, with weights that kernels can read."""

    qkv: DenseLinear
    out: DenseLinear
    gate_up: DenseLinear
    down: DenseLinear


@dataclass(frozen=True)
class KernelModel:
    """A `Transformer` on one device, with the cosines and sines of all positions.

    `dense` and `head` are its linear layers.
    """

    model: Transformer
    dense: tuple[DenseLayer, ...]
    head: DenseLinear
    tables: tuple[Tensor, Tensor]

    def hidden(
        self,
        token_ids: Int64[Tensor, " tokens"],
        positions: Int64[Tensor, " tokens"],
        slots: Int64[Tensor, " tokens"],
        kv: Float[Tensor, "layers 2 blocks block_size kv_heads head_dim"],
        read: ReadLayer,
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the last layer's hidden states, normalised, and store new keys and values in `kv`.

        `kv` is the pool, with the axes `minigen.kv_cache.paged.POOL_AXES`.
        """

        def attend(layer_id: int, qkv: Tensor) -> Tensor:
            norms, eps = _head_norms(self.model.layers[layer_id]), self.model.norm_eps
            placed = (self.tables, positions, slots)
            q = rotary_store_triton(qkv, norms, eps, *placed, *kv[layer_id])
            return read(layer_id, q).flatten(-2)

        forward = self._one_token if len(token_ids) == 1 else self._many_tokens
        return forward(self.model.embed(token_ids), attend)

    def _many_tokens(self, residual: Tensor, attend: ReadLayer) -> Tensor:
        layers, norm, eps = self.model.layers, self.model.norm, self.model.norm_eps
        x = rms_norm_triton(residual, layers[0].attention_norm, eps)
        next_norms = [layer.attention_norm for layer in layers[1:]] + [norm]
        for layer_id, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            out = layer.out(attend(layer_id, layer.qkv(x)))
            x = rms_norm_triton(out, layer.ffn_norm, eps, residual)
            out = layer.down(silu_multiply_triton(layer.gate_up(x)))
            x = rms_norm_triton(out, next_norm, eps, residual)
        return x

    def _one_token(self, residual: Tensor, attend: ReadLayer) -> Tensor:
        eps = self.model.norm_eps
        for layer_id, (layer, dense) in enumerate(zip(self.model.layers, self.dense, strict=True)):
            qkv = matvec_triton(residual, dense.qkv, norm=(layer.attention_norm, eps))
            residual = matvec_triton(attend(layer_id, qkv), dense.out, residual=residual)
            x = matvec_triton(residual, dense.gate_up, norm=(layer.ffn_norm, eps), gated=True)
            residual = matvec_triton(x, dense.down, residual=residual)
        return rms_norm_triton(residual, self.model.norm, eps)

    def logits(self, hidden: Float[Tensor, "rows hidden"], out: Logits | None = None) -> Logits:
        """Return the logits of normalised hidden states, float32, written to `out` if given."""
        scores = matvec_triton(hidden, self.head) if len(hidden) == 1 else self.head(hidden)
        return scores.float() if out is None else out.copy_(scores)


def kernel_model(model: Transformer, max_positions: int, device: torch.device) -> KernelModel:
    """Move the model to `device`, except its dense linear layers, which must be there already."""
    embedding = model.embedding.to(device)
    head = model.head
    if isinstance(head, DenseLinear) and head.weight is model.embedding:
        head = replace(head, weight=embedding)
    frequencies = model.frequencies.to(device)
    cos, sin = rotary_tables(frequencies, torch.arange(max_positions, device=device))
    moved = replace(
        model,
        embedding=embedding,
        layers=tuple(_layer_on(layer, device) for layer in model.layers),
        norm=model.norm.to(device),
        head=head,
        frequencies=frequencies,
    )
    dense = tuple(
        DenseLayer(*map(_dense, (layer.qkv, layer.out, layer.gate_up, layer.down)))
        for layer in moved.layers
    )
    return KernelModel(moved, dense, _dense(moved.head), (cos, sin))


def device_linear(dtype: torch.dtype, device: torch.device) -> MakeLinear:
    """Return a factory of linear layers that dequantizes weights piecewise into device memory."""

    def make(weights: SequenceOf[StoredTensor], biases: SequenceOf[StoredTensor]) -> DenseLinear:
        parts = tuple(weight.shape[0] for weight in weights)
        fused = torch.empty(sum(parts), weights[0].shape[1], dtype=dtype, device=device)
        for weight, rows in zip(weights, fused.split(parts), strict=True):
            weight.dequantize(out=rows)
            weight.release_pages()
        bias = torch.cat([each.dequantize(dtype) for each in biases]) if biases else None
        return DenseLinear(fused, None if bias is None else bias.to(device), parts)

    return make


def _dense(linear: Linear) -> DenseLinear:
    assert isinstance(linear, DenseLinear), f"{type(linear).__name__} has no plain weight"
    return linear


def _layer_on(layer: Layer, device: torch.device) -> Layer:
    return replace(
        layer,
        attention_norm=layer.attention_norm.to(device),
        q_norm=None if layer.q_norm is None else layer.q_norm.to(device),
        k_norm=None if layer.k_norm is None else layer.k_norm.to(device),
        ffn_norm=layer.ffn_norm.to(device),
    )


def _head_norms(
    layer: Layer,
) -> tuple[Float[Tensor, " head_dim"], Float[Tensor, " head_dim"]] | None:
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return layer.q_norm, layer.k_norm


CAPTURED = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def captured_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes to capture, up to `max_num_seqs` (which is included up to 256).

    >>> captured_sizes(20)
    (1, 2, 4, 8, 16, 20)
    """
    below = tuple(size for size in CAPTURED if size < max_num_seqs)
    return (*below, max_num_seqs) if max_num_seqs <= CAPTURED[-1] else CAPTURED


class DecodeInputs:
    """The inputs of steps of decodes, at fixed addresses; steps of all sizes share the memory.

    A step has `most` rows at most. The rows that remain are padding: each computes one token in
    block 0.
    """

    def __init__(self, most: int, max_blocks: int, device: torch.device):
        def zeros(*shape: int) -> Int64[Tensor, "..."]:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._numbers, self._tables = zeros(4 * most), zeros(most, max_blocks)
        self._logits_rows = torch.arange(most, device=device)
        self._written = np.zeros((0, 0), np.int64)  # what was last written to `_tables`

    def batch(self, size: int) -> Batch:
        """Return a batch of `size` rows, all padding until `fill`."""
        token_ids, positions, slots, context_lens = self._numbers[: 4 * size].view(4, size)
        context_lens.fill_(1)
        return Batch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_starts=list(range(size + 1)),
            context_lens=context_lens,
            block_tables=self._tables[:size],
            logits_rows=self._logits_rows[:size],
            num_decodes=size,
        )

    def fill(self, size: int, packed: Packed) -> None:
        """Write packed decodes into the batch of `size` rows."""
        count = len(packed.token_ids)
        numbers = np.zeros((4, size), np.int64)
        numbers[3] = 1
        fields = (packed.token_ids, packed.positions, packed.slots, packed.context_lens)
        for row, field in zip(numbers, fields, strict=True):
            row[:count] = field
        # From memory that is not pinned, a copy to the device returns when all of it is read.
        there = self._numbers[: 4 * size]
        there.copy_(torch.from_numpy(numbers).view(-1), non_blocking=True)
        self._write_tables(size, packed.block_tables)

    def _write_tables(self, size: int, block_tables: np.ndarray) -> None:
        """Write the tables, unless they are there: few sequences need a new block in most steps."""
        tables = np.zeros((size, block_tables.shape[1]), np.int64)
        tables[: len(block_tables)] = block_tables
        if not np.array_equal(tables, self._written):
            there = torch.from_numpy(tables).to(self._tables.device, non_blocking=True)
            self._tables[:size, : tables.shape[1]].copy_(there)
            self._written = tables


@dataclass(frozen=True)
class CapturedStep:
    """A captured step of `size` decodes: fill its inputs, then replay `graph`."""

    size: int
    graph: torch.cuda.CUDAGraph


class GpuRunner:
    """Runs the model over chunks; logits stay on the device and are valid until the next step.

    `sizes` are the batch sizes of decodes to capture as CUDA graphs, ascending; empty without CUDA.
    """

    def __init__(
        self,
        model: KernelModel,
        pool: DevicePool,
        manager: BlockManager,
        windows: SequenceOf[int | None],
        max_num_batched_tokens: int,
        sizes: tuple[int, ...],
    ):
        self.model, self.pool, self.manager, self.windows = model, pool, manager, windows
        self.device = pool.kv.device
        self.packer = Packer(manager, pool.block_size, max_num_batched_tokens)
        self._captured: list[CapturedStep] = []  # ascending
        # All captured steps share these buffers; their own would take three times the memory.
        most = max(sizes, default=0)
        self._inputs = DecodeInputs(most, manager.tables.shape[1], self.device)
        shape = (most, len(model.model.embedding))
        self._logits = torch.empty(shape, dtype=torch.float32, device=self.device)
        self._capture_all(sizes)

    @torch.inference_mode()
    def logits(self, chunks: SequenceOf[ScheduledChunk]) -> Logits:
        """Return the raw logits of each chunk's `prompt_logprob_rows`, then of its samples."""
        self.pool.copy_blocks(self.manager.pop_pending_copies())
        packed = self.packer.pack(chunks)
        num_decodes = _num_leading_ones(chunks)
        count = len(packed.token_ids)
        if num_decodes == count <= len(self._logits) and _is_each_once(packed.logits_rows, count):
            return self._replay(packed, count)
        batch = uploaded(packed, num_decodes, self.device)
        return self.run(batch)

    def run(self, batch: Batch, out: Logits | None = None) -> Logits:
        """Return the logits of `batch.logits_rows`, in `out` if given; `batch` is on the device."""
        attention = PagedAttention(self.pool, batch, self.windows)
        hidden = self.model.hidden(
            batch.token_ids, batch.positions, batch.slots, self.pool.kv, attention.read
        )
        return self.model.logits(hidden[batch.logits_rows], out)

    def _replay(self, packed: Packed, count: int) -> Logits:
        step = self._captured[bisect_left(self._captured, count, key=lambda each: each.size)]
        self._inputs.fill(step.size, packed)
        step.graph.replay()
        return self._logits[:count]

    @torch.inference_mode()
    def _capture_all(self, sizes: tuple[int, ...]) -> None:
        if not sizes:
            return
        # This runner needs its own stream: cuBLAS has one workspace per stream. Graphs refer to it,
        # and torch may free it with any graph that was captured on the same stream.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        for size in reversed(sizes):  # largest first: the others reuse its memory
            self._captured.insert(0, self._capture(size, stream))
        torch.cuda.current_stream().wait_stream(stream)

    def _capture(self, size: int, stream: torch.cuda.Stream) -> CapturedStep:
        with torch.cuda.stream(stream):  # warm-up: compile kernels, load libraries
            batch = self._inputs.batch(size)
            self.run(batch)
        graph = torch.cuda.CUDAGraph()
        shared = self._captured[0].graph.pool() if self._captured else None
        with torch.cuda.graph(graph, pool=shared, stream=stream):
            self.run(batch, self._logits[:size])
        return CapturedStep(size, graph)


def uploaded(packed: Packed, num_decodes: int, device: torch.device) -> Batch:
    """Copy a packed batch to the device, with one copy."""
    arrays = {name: each for name, each in packed._asdict().items() if name != "query_starts"}
    even = [each.size + each.size % 2 for each in arrays.values()]  # 16-byte alignment
    flat = torch.zeros(sum(even), dtype=torch.int64)
    for part, each in zip(flat.split(even), arrays.values(), strict=True):
        part[: each.size] = torch.from_numpy(each.reshape(-1))
    parts = to_device(flat, device).split(even)
    tensors = {
        name: part[: each.size].view(each.shape)
        for (name, each), part in zip(arrays.items(), parts, strict=True)
    }
    starts: list[int] = packed.query_starts.tolist()
    return Batch(query_starts=starts, num_decodes=num_decodes, **tensors)


def _num_leading_ones(chunks: SequenceOf[ScheduledChunk]) -> int:
    return next((i for i, chunk in enumerate(chunks) if chunk.num_tokens != 1), len(chunks))


def _is_each_once(rows: np.ndarray, count: int) -> bool:
    """Return whether each of `count` tokens has one row of logits."""
    return rows.tolist() == list(range(count))


def choose_on_device(
    logits: Float[Tensor, "sequences vocab"], sequences: SequenceOf[Sequence]
) -> list[int]:
    """Return a token per row; -1 where its logits are not finite.

    Greedy rows and plain random draws need one pass on the device. If any row needs more (top-k,
    penalties, bans, ...), all rows are sampled on the CPU.
    """
    if not all(_is_plain(each.params) for each in sequences):
        return choose_tokens(logits.cpu(), sequences)
    if all(each.params.greedy for each in sequences):
        temperatures = torch.zeros(len(sequences), device=logits.device)
        seeds = torch.zeros(len(sequences), dtype=torch.int64, device=logits.device)
    else:
        wanted = [float(each.params.temperature) for each in sequences]  # some are the integer 1
        temperatures = to_device(torch.tensor(wanted), logits.device)
        seeds = to_device(_seeds(sequences), logits.device)
    found: list[int] = choose_triton(logits, temperatures, seeds).tolist()
    return found


def _seeds(sequences: SequenceOf[Sequence]) -> Int64[Tensor, " sequences"]:
    """Return a seed from 0 to 2^32 - 1 for each sequence's next draw."""
    uniform = uniform_draws(
        [sequence.seed for sequence in sequences],
        [sequence.choice for sequence in sequences],
        [len(sequence.output_ids) for sequence in sequences],
    )
    return (uniform * 2**32).long()


def _is_plain(params: SamplingParams) -> bool:
    if params.greedy:
        return params.plainly_greedy
    changed = params.min_tokens > 0 or params.has_penalties or len(params.logit_bias) > 0
    return not changed and not params.has_filters
