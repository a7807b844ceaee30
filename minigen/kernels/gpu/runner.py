"""The model on a GPU as a `Runner`: kernels, and whole decode steps replayed as CUDA graphs.

A step of decodes alone is padded to a captured size, by rows that write to block 0, and then costs
one launch. Source: CUDA C++ Programming Guide, "CUDA Graphs"; torch.cuda.CUDAGraph.
"""

from bisect import bisect_left
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minigen.cache.manager import BlockManager
from minigen.cache.paged import Batch
from minigen.engine.runner import Packed, Packer
from minigen.kernels.gpu.attend import DevicePool, PagedAttention, sent
from minigen.kernels.gpu.model import KernelModel
from minigen.sequence import Chunk

CAPTURED = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def captured_sizes(max_sequences: int) -> tuple[int, ...]:
    """Batch sizes to capture: those below, and `max_sequences` itself where it is no larger.

    >>> captured_sizes(20)
    (1, 2, 4, 8, 16, 20)
    """
    below = tuple(size for size in CAPTURED if size < max_sequences)
    return (*below, max_sequences) if max_sequences <= CAPTURED[-1] else CAPTURED


@dataclass(frozen=True)
class CapturedStep:
    """A step of decodes, recorded: fill `batch`, replay `graph`."""

    graph: torch.cuda.CUDAGraph
    batch: Batch


class GpuRunner:
    """Runs the model over chunks; logits stay on the device, and are good until the next step.

    `sizes` are the batch sizes of decodes that are captured now, ascending; none without CUDA.
    """

    def __init__(
        self,
        model: KernelModel,
        pool: DevicePool,
        manager: BlockManager,
        windows: SequenceOf[int | None],
        max_batch_tokens: int,
        sizes: tuple[int, ...],
    ):
        self.model, self.pool, self.manager, self.windows = model, pool, manager, windows
        self.device = pool.kv.device
        self.packer = Packer(manager, pool.block_size, max_batch_tokens)
        self._captured: dict[int, CapturedStep] = {}
        # All captured steps leave their logits here: each in its own would be three times as much.
        shape = (max(sizes, default=0), len(model.model.embedding))
        self._told = torch.empty(shape, dtype=torch.float32, device=self.device)
        self._capture_all(sizes)
        self._sizes = sizes

    @torch.inference_mode()
    def logits(self, chunks: SequenceOf[Chunk]) -> Tensor:
        """The raw logits of each chunk's `told_rows`, then of its samples."""
        self.pool.copy_blocks(self.manager.take_copies())
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

    def run(self, batch: Batch, told: Tensor | None = None) -> Tensor:
        """The logits of `batch.logits_rows`, in `told` if given; the batch is on the device."""
        attention = PagedAttention(self.pool, batch, self.windows)
        hidden = self.model.hidden(
            batch.token_ids, batch.positions, batch.slots, self.pool.kv, attention.read
        )
        return self.model.logits(hidden[batch.logits_rows], told)

    def _replay(self, packed: Packed, count: int) -> Tensor:
        step = self._captured[self._sizes[bisect_left(self._sizes, count)]]
        fill(step.batch, packed)
        step.graph.replay()
        return self._told[:count]

    @torch.inference_mode()
    def _capture_all(self, sizes: tuple[int, ...]) -> None:
        if not sizes:
            return
        # A stream of this runner's own: cuBLAS has a workspace for each, which graphs remember and
        # torch may take away with any graph that was captured on the same one.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        for size in reversed(sizes):  # the largest first: the others find its memory
            self._captured[size] = self._capture(size, stream)
        torch.cuda.current_stream().wait_stream(stream)

    def _capture(self, size: int, stream: torch.cuda.Stream) -> CapturedStep:
        with torch.cuda.stream(stream):  # kernels are compiled, and libraries made ready
            batch = padding_batch(size, self.manager.tables.shape[1], self.device)
            self.run(batch)
        graph = torch.cuda.CUDAGraph()
        shared = next(iter(self._captured.values())).graph.pool() if self._captured else None
        with torch.cuda.graph(graph, pool=shared, stream=stream):
            self.run(batch, self._told[:size])
        return CapturedStep(graph, batch)


def padding_batch(size: int, max_blocks: int, device: torch.device) -> Batch:
    """A batch of decodes that all read and write block 0 alone."""

    def zeros(*shape: int) -> Tensor:
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
    """Write packed decodes into a batch of fixed size, by one copy to the device.

    What is left over computes one token in block 0, as `padding_batch` has it.
    """
    count, width = packed.block_tables.shape
    numbers = np.zeros((4 + width, len(batch.slots)), np.int64)
    numbers[3] = 1
    told = (packed.token_ids, packed.positions, packed.slots, packed.context_lens)
    for row, each in enumerate(told):
        numbers[row, :count] = each
    numbers[4:, :count] = packed.block_tables.T
    there = sent(torch.from_numpy(numbers), batch.slots.device)
    fixed = (batch.token_ids, batch.positions, batch.slots, batch.context_lens)
    for row, part in enumerate(fixed):
        part.copy_(there[row])
    batch.block_tables[:, :width].copy_(there[4:].T)


def uploaded(packed: Packed, num_decodes: int, device: torch.device) -> Batch:
    """The packed numbers on the device, by one copy."""
    arrays = {name: each for name, each in packed._asdict().items() if name != "query_starts"}
    even = [each.size + each.size % 2 for each in arrays.values()]  # each begins at 16 bytes
    flat = torch.zeros(sum(even), dtype=torch.int64)
    for part, each in zip(flat.split(even), arrays.values(), strict=True):
        part[: each.size] = torch.from_numpy(each.reshape(-1))
    parts = sent(flat, device).split(even)
    tensors = {
        name: part[: each.size].view(each.shape)
        for (name, each), part in zip(arrays.items(), parts, strict=True)
    }
    starts: list[int] = packed.query_starts.tolist()
    return Batch(query_starts=starts, num_decodes=num_decodes, **tensors)


def _num_leading_ones(chunks: SequenceOf[Chunk]) -> int:
    return next((i for i, chunk in enumerate(chunks) if chunk.num_tokens != 1), len(chunks))
