"""The model on a GPU as a `Runner`: fused kernels, and decode steps as CUDA graphs.

A layer is four matrix products and five kernels, where plain torch launches more than forty. A
step of decodes only is padded to a captured batch size, with rows that write to block 0, and then
costs one launch. Sampling settings that the sampling kernel does not support are handled on the
CPU. Source: CUDA C++ Programming Guide, "CUDA Graphs"; torch.cuda.CUDAGraph.
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
from minigen.kernels.triton.sampling import choose_triton
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.paged import Batch
from minigen.model.layers import DenseLinear, rotary_tables
from minigen.model.transformer import Layer, MakeLinear, Transformer
from minigen.sampling.params import SamplingParams
from minigen.sampling.sampler import choose_tokens, uniform_draws
from minigen.sequence import ScheduledChunk, Sequence

ReadLayer = Callable[[int, Tensor], Tensor]  # attention over the pool, by layer id and queries
Logits = Float[Tensor, "rows vocab"]


@dataclass(frozen=True)
class KernelModel:
    """A `Transformer` on one device, with the cosines and sines of all positions."""

    model: Transformer
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
        model = self.model
        residual = model.embed(token_ids)
        x = rms_norm_triton(residual, model.layers[0].attention_norm, model.norm_eps)
        next_norms = [layer.attention_norm for layer in model.layers[1:]] + [model.norm]
        for layer_id, (layer, next_norm) in enumerate(zip(model.layers, next_norms, strict=True)):
            keys, values = kv[layer_id]
            q = rotary_store_triton(
                layer.qkv(x),
                _head_norms(layer),
                model.norm_eps,
                self.tables,
                positions,
                slots,
                keys,
                values,
            )
            out = layer.out(read(layer_id, q).flatten(-2))
            x = rms_norm_triton(out, layer.ffn_norm, model.norm_eps, residual)
            out = layer.down(silu_multiply_triton(layer.gate_up(x)))
            x = rms_norm_triton(out, next_norm, model.norm_eps, residual)
        return x

    def logits(self, hidden: Float[Tensor, "rows hidden"], out: Logits | None = None) -> Logits:
        """Return the logits of normalised hidden states, float32, written to `out` if given."""
        scores = self.model.head(hidden)
        return scores.float() if out is None else out.copy_(scores)


def kernel_model(model: Transformer, max_positions: int, device: torch.device) -> KernelModel:
    """Move the model to `device`, except its linear layers, which must be there already."""
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
    return KernelModel(moved, (cos, sin))


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


@dataclass(frozen=True)
class CapturedStep:
    """A captured step of decodes: fill `batch`, then replay `graph`."""

    graph: torch.cuda.CUDAGraph
    batch: Batch


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
        self._captured: dict[int, CapturedStep] = {}
        # All captured steps share this buffer; one each would take three times the memory.
        shape = (max(sizes, default=0), len(model.model.embedding))
        self._logits = torch.empty(shape, dtype=torch.float32, device=self.device)
        self._capture_all(sizes)
        self._sizes = sizes

    @torch.inference_mode()
    def logits(self, chunks: SequenceOf[ScheduledChunk]) -> Logits:
        """Return the raw logits of each chunk's `prompt_logprob_rows`, then of its samples."""
        self.pool.copy_blocks(self.manager.pop_pending_copies())
        packed = self.packer.pack(chunks)
        num_decodes = _num_leading_ones(chunks)
        count = len(packed.token_ids)
        one_each = np.array_equal(packed.logits_rows, np.arange(count))
        if num_decodes == count and one_each and count <= self._largest:
            return self._replay(packed, count)
        batch = uploaded(packed, num_decodes, self.device)
        return self.run(batch)

    @property
    def _largest(self) -> int:
        return self._sizes[-1] if self._sizes else 0

    def run(self, batch: Batch, out: Logits | None = None) -> Logits:
        """Return the logits of `batch.logits_rows`, in `out` if given; `batch` is on the device."""
        attention = PagedAttention(self.pool, batch, self.windows)
        hidden = self.model.hidden(
            batch.token_ids, batch.positions, batch.slots, self.pool.kv, attention.read
        )
        return self.model.logits(hidden[batch.logits_rows], out)

    def _replay(self, packed: Packed, count: int) -> Logits:
        step = self._captured[self._sizes[bisect_left(self._sizes, count)]]
        fill(step.batch, packed)
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
            self._captured[size] = self._capture(size, stream)
        torch.cuda.current_stream().wait_stream(stream)

    def _capture(self, size: int, stream: torch.cuda.Stream) -> CapturedStep:
        with torch.cuda.stream(stream):  # warm-up: compile kernels, load libraries
            batch = padding_batch(size, self.manager.tables.shape[1], self.device)
            self.run(batch)
        graph = torch.cuda.CUDAGraph()
        shared = next(iter(self._captured.values())).graph.pool() if self._captured else None
        with torch.cuda.graph(graph, pool=shared, stream=stream):
            self.run(batch, self._logits[:size])
        return CapturedStep(graph, batch)


def padding_batch(size: int, max_blocks: int, device: torch.device) -> Batch:
    """Return a batch of decodes that read and write only block 0."""

    def zeros(*shape: int) -> Int64[Tensor, "..."]:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    return Batch(
        token_ids=zeros(size),
        positions=zeros(size),
        slots=zeros(size),
        query_starts=list(range(size + 1)),
        context_lens=zeros(size) + 1,
        block_tables=zeros(size, max_blocks),
        logits_rows=torch.arange(size, device=device),
        num_decodes=size,
    )


def fill(batch: Batch, packed: Packed) -> None:
    """Write packed decodes into a batch of fixed size, with one copy to the device.

    The remaining rows are padding: each computes one token in block 0, as in `padding_batch`.
    """
    count, width = packed.block_tables.shape
    numbers = np.zeros((4 + width, len(batch.slots)), np.int64)
    numbers[3] = 1
    sources = (packed.token_ids, packed.positions, packed.slots, packed.context_lens)
    for row, each in enumerate(sources):
        numbers[row, :count] = each
    numbers[4:, :count] = packed.block_tables.T
    there = to_device(torch.from_numpy(numbers), batch.slots.device)
    fixed = (batch.token_ids, batch.positions, batch.slots, batch.context_lens)
    for row, part in enumerate(fixed):
        part.copy_(there[row])
    batch.block_tables[:, :width].copy_(there[4:].T)


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
