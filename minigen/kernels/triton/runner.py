"""The model on a GPU as a `Runner`: packed batches, and decode steps as CUDA graphs.

A step of decodes only is padded to a captured batch size, with rows that write to block 0, and then
costs one launch. Of a model that is split over GPUs, each rank runs the same steps (`DeviceSteps`)
on its share. Sampling settings that the sampling kernel does not support are handled on the CPU.
Source: CUDA C++ Programming Guide, "CUDA Graphs"; torch.cuda.CUDAGraph.
"""

from bisect import bisect_left
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, fields

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from minigen.engine.model_runner import Packer, batch_of
from minigen.kernels.triton.attention import DevicePool, PagedAttention, to_device
from minigen.kernels.triton.kernel_model import KernelModel, Logits
from minigen.kernels.triton.sampling import choose_triton
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.paged import Batch
from minigen.sampling.params import SamplingParams
from minigen.sampling.sampler import choose_tokens, uniform_draws
from minigen.sequence import ScheduledChunk, Sequence

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

    def fill(self, size: int, batch: Batch) -> None:
        """Write a batch of decodes, in the CPU's memory, into the batch of `size` rows."""
        count = len(batch.token_ids)
        numbers = np.zeros((4, size), np.int64)
        numbers[3] = 1
        rows = (batch.token_ids, batch.positions, batch.slots, batch.context_lens)
        for row, own in zip(numbers, rows, strict=True):
            row[:count] = own.numpy()
        # From memory that is not pinned, a copy to the device returns when all of it is read.
        there = self._numbers[: 4 * size]
        there.copy_(torch.from_numpy(numbers).view(-1), non_blocking=True)
        self._write_tables(size, batch.block_tables.numpy())

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


class DeviceSteps:
    """Runs batches on a model or a rank's share of it; logits are valid until the next step.

    `sizes` are the batch sizes of decodes to capture as CUDA graphs, ascending; empty without CUDA.
    A sequence has at most `max_blocks` blocks.
    """

    def __init__(
        self,
        model: KernelModel,
        pool: DevicePool,
        windows: SequenceOf[int | None],
        max_blocks: int,
        sizes: tuple[int, ...],
    ):
        self.model, self.pool, self.windows = model, pool, windows
        self.device = pool.kv.device
        self._captured: list[CapturedStep] = []  # ascending
        # All captured steps share these buffers; their own would take three times the memory.
        most = max(sizes, default=0)
        self._inputs = DecodeInputs(most, max_blocks, self.device)
        shape = (most, model.ranks.vocab)
        self._logits = torch.empty(shape, dtype=torch.float32, device=self.device)
        self._capture_all(sizes)

    @torch.inference_mode()
    def step(self, copies: SequenceOf[tuple[int, int]], batch: Batch) -> Logits:
        """Copy blocks, each (source, target), and return the logits of a batch in CPU memory."""
        self.pool.copy_blocks(copies)
        count = len(batch.token_ids)
        fits = batch.num_decodes == count <= len(self._logits)
        if fits and _is_each_once(batch.logits_rows, count):
            return self._replay(batch, count)
        return self.run(uploaded(batch, self.device))

    def run(self, batch: Batch, out: Logits | None = None) -> Logits:
        """Return the logits of `batch.logits_rows`, in `out` if given; `batch` is on the device."""
        attention = PagedAttention(self.pool, batch, self.windows)
        hidden = self.model.hidden(
            batch.token_ids, batch.positions, batch.slots, self.pool.kv, attention.read
        )
        return self.model.logits(hidden[batch.logits_rows], out)

    def release(self) -> None:
        """Free the captured steps, which NCCL's communicator must outlive."""
        self._captured.clear()

    def _replay(self, batch: Batch, count: int) -> Logits:
        step = self._captured[bisect_left(self._captured, count, key=lambda each: each.size)]
        self._inputs.fill(step.size, batch)
        step.graph.replay()
        return self._logits[:count]

    @torch.inference_mode()
    def _capture_all(self, sizes: tuple[int, ...]) -> None:
        if not sizes:
            return
        # This runner needs its own stream: cuBLAS has one workspace per stream. Graphs refer to it,
        # and torch may free it with any graph that was captured on the same stream.
        stream = torch.cuda.Stream(self.device)
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
        # "thread_local": NCCL's own thread may ask for events while this one captures.
        with torch.cuda.graph(graph, shared, stream, capture_error_mode="thread_local"):
            self.run(batch, self._logits[:size])
        return CapturedStep(size, graph)


class GpuRunner:
    """Runs the model over chunks; logits stay on the device and are valid until the next step."""

    def __init__(
        self,
        model: KernelModel,
        pool: DevicePool,
        manager: BlockManager,
        windows: SequenceOf[int | None],
        max_num_batched_tokens: int,
        sizes: tuple[int, ...],
    ):
        self.manager, self.pool = manager, pool
        self.packer = Packer(manager, pool.block_size, max_num_batched_tokens)
        self.steps = DeviceSteps(model, pool, windows, manager.tables.shape[1], sizes)

    def logits(self, chunks: SequenceOf[ScheduledChunk]) -> Logits:
        """Return the raw logits of each chunk's `prompt_logprob_rows`, then of its samples."""
        batch = batch_of(self.packer.pack(chunks), _num_leading_ones(chunks))
        return self.steps.step(self.manager.pop_pending_copies(), batch)


def uploaded(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch from the CPU's memory to the device, with one copy."""
    values = {each.name: getattr(batch, each.name) for each in fields(Batch)}
    tensors = {name: each for name, each in values.items() if isinstance(each, Tensor)}
    even = [each.numel() + each.numel() % 2 for each in tensors.values()]  # 16-byte alignment
    flat = torch.zeros(sum(even), dtype=torch.int64)
    for part, each in zip(flat.split(even), tensors.values(), strict=True):
        part[: each.numel()] = each.flatten()
    parts = to_device(flat, device).split(even)
    there = {
        name: part[: each.numel()].view(each.shape)
        for (name, each), part in zip(tensors.items(), parts, strict=True)
    }
    return Batch(query_starts=batch.query_starts, num_decodes=batch.num_decodes, **there)


def _num_leading_ones(chunks: SequenceOf[ScheduledChunk]) -> int:
    return next((i for i, chunk in enumerate(chunks) if chunk.num_tokens != 1), len(chunks))


def _is_each_once(rows: Int64[Tensor, " rows"], count: int) -> bool:
    """Return whether each of `count` tokens has one row of logits."""
    return rows.tolist() == list(range(count))


def choose_on_device(
    logits: Float[Tensor, "sequences vocab"], sequences: SequenceOf[Sequence]
) -> list[int]:
    """Return a token per row; -1 where its logits are not finite.

    Greedy rows and plain random draws need one pass on the device. Rows that need more (top-k,
    penalties, bans, ...) are sampled on the CPU. So a row's token does not depend on other rows.
    """
    others = [row for row, each in enumerate(sequences) if not _is_plain(each.params)]
    if not others:
        return _choose_plain(logits, sequences)
    rows = logits[to_device(torch.tensor(others), logits.device)].cpu()
    chosen = choose_tokens(rows, [sequences[row] for row in others])
    if len(others) == len(sequences):
        return chosen
    found = _choose_plain(logits, sequences)
    for row, token in zip(others, chosen, strict=True):
        found[row] = token
    return found


# A quotient of a logit and a temperature below it could overflow float32.
_LOWEST_TEMPERATURE = 1e-30


def _choose_plain(
    logits: Float[Tensor, "sequences vocab"], sequences: SequenceOf[Sequence]
) -> list[int]:
    """Return a token per row, by a kernel that knows nothing but temperatures and seeds."""
    if all(each.params.greedy for each in sequences):
        temperatures = torch.zeros(len(sequences), device=logits.device)
        seeds = torch.zeros(len(sequences), dtype=torch.int64, device=logits.device)
    else:
        wanted = [  # some are the integer 1
            0.0 if each.params.greedy else max(float(each.params.temperature), _LOWEST_TEMPERATURE)
            for each in sequences
        ]
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
