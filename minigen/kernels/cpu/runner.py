"""The compiled step as a `Runner`, and the sampling kernel as a sampler."""

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from minigen.engine.model_runner import Packed, Packer
from minigen.kernels.cpu.arrays.aligned import zeros
from minigen.kernels.cpu.arrays.sampling import make_sampling_scratch, sampling_batch
from minigen.kernels.cpu.arrays.step_arrays import Weights, make_workspace, num_phases
from minigen.kernels.cpu.kv.layout import PackedKVPool, Shape, make_scratch
from minigen.kernels.cpu.packed_weights import Pairs
from minigen.kernels.cpu.team import available_threads, team_of
from minigen.kernels.jit.machine_code import CompiledFunction, Flat
from minigen.kv_cache.block_manager import BlockManager
from minigen.sequence import ScheduledChunk, Sequence

run_step = CompiledFunction("minigen.kernels.cpu.step", "run_step")
choose_rows = CompiledFunction("minigen.kernels.cpu.sampling", "choose_rows")
likeliest_rows = CompiledFunction("minigen.kernels.cpu.sampling", "likeliest_rows")

EVERYTHING = 2**40  # the window of a layer that has none


class CompiledRunner:
    """Runs the model over chunks in one compiled function, with a `PackedKVPool` as KV cache.

    `shared` lives as long as the runner: whose `weights` these are, if other runners have them too.
    The logits are valid until the next step. A token's logits are bit-equal whatever else is in
    its batch and however its prompt was cut into chunks.
    """

    def __init__(
        self,
        shape: Shape,
        weights: Weights,
        pool: PackedKVPool,
        manager: BlockManager,
        windows: SequenceOf[int | None],
        max_num_batched_tokens: int,
        num_threads: int,
        shared: object = None,
    ):
        self.shared = shared
        self.shape, self.weights, self.pool, self.manager = shape, weights, pool, manager
        self.num_threads = available_threads(num_threads)
        self.packer = Packer(manager, shape.block_size, max_num_batched_tokens)
        self._windows = np.array([window or EVERYTHING for window in windows], np.int64)
        in_bfloat16 = isinstance(weights.qkv, Pairs)
        self._work = make_workspace(shape, max_num_batched_tokens, self.num_threads, in_bfloat16)
        self._scratch = make_scratch(shape, max_num_batched_tokens, self.num_threads, pool.kv_dtype)
        self._model = Flat(shape, weights, self._windows)
        self._memory = Flat(pool.cache, self._scratch, self._work)
        self._logits = zeros(len(manager.tables) * shape.vocab, np.float32)

    def logits(self, chunks: SequenceOf[ScheduledChunk]) -> Float[Tensor, "rows vocab"]:
        """Return the raw logits of each chunk's `prompt_logprob_rows`, then of its samples."""
        packed = self.packer.pack(chunks)
        self.pool.copy_blocks(self.manager.pop_pending_copies())
        rows = packed.logits_rows
        if len(rows) < 2 or (rows[1:] > rows[:-1]).all():
            return self._logits_of(packed)
        distinct, wanted = np.unique(rows, return_inverse=True)  # one prompt's samples share a row
        return self._logits_of(packed._replace(logits_rows=distinct))[torch.from_numpy(wanted)]

    def _logits_of(self, packed: Packed) -> Float[Tensor, "rows vocab"]:
        shape = (len(packed.logits_rows), self.shape.vocab)
        logits = self._logits[: shape[0] * shape[1]]
        if len(logits) < shape[0] * shape[1]:  # prompt logprobs
            logits = np.empty(shape[0] * shape[1], np.float32)
        self.run(packed, logits)
        return torch.from_numpy(logits.reshape(shape))

    def run(self, packed: Packed, logits: np.ndarray) -> None:
        """Run one step and write the logits of `packed.logits_rows` (ascending), row after row."""
        team_of(self.num_threads).run(
            num_phases(self.shape),
            run_step,
            self._model,
            packed,
            self._memory,
            logits,
        )


class KernelChooser:
    """Chooses tokens as `minigen.sampling.sampler.choose_tokens` does, rows in parallel."""

    def __init__(self, vocab: int, num_threads: int):
        self.vocab = vocab
        self.num_threads = available_threads(num_threads)
        self._scratch = make_sampling_scratch(self.num_threads, vocab)

    def __call__(
        self, logits: Float[Tensor, "rows vocab"], sequences: SequenceOf[Sequence]
    ) -> list[int]:
        """Return a token per row; -1 where its logits are not finite."""
        flat, out = logits.numpy().reshape(-1), np.empty(len(sequences), np.int64)
        plain = all(sequence.params.plainly_greedy for sequence in sequences)
        team = team_of(self.num_threads if len(out) > 1 else 1)
        if plain:
            team.run(1, likeliest_rows, flat, self.vocab, out)
        else:
            batch = sampling_batch(sequences, self.vocab)
            team.run(1, choose_rows, flat, self.vocab, batch, self._scratch, out)
        found: list[int] = out.tolist()
        return found
