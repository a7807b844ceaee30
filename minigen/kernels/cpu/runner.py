"""The compiled step as a `Runner`, and the sampling kernel as a sampler."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import chain
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from minigen.engine.model_runner import Packed, Packer
from minigen.kernels.cpu import sampling, step
from minigen.kernels.cpu.elementwise import quantized, rounded
from minigen.kernels.cpu.kv.layout import PackedKVPool, Shape, make_scratch
from minigen.kernels.cpu.linear import product_scratch
from minigen.kernels.cpu.packed_weights import GROUP, Pairs
from minigen.kernels.cpu.sampling import SamplingBatch, make_sampling_scratch
from minigen.kernels.cpu.simd import zeros
from minigen.kernels.cpu.step import Weights, Workspace, num_phases
from minigen.kernels.cpu.thread_pool import available_threads, team_of
from minigen.kernels.jit.code_cache import cached_njit
from minigen.kv_cache.block_manager import BlockManager
from minigen.sampling.params import SamplingParams
from minigen.sampling.sampler import uniform_draws
from minigen.sequence import ScheduledChunk, Sequence

run_step = cached_njit(step.run_step, counts_references=False)
choose_rows = cached_njit(sampling.choose_rows)
likeliest_rows = cached_njit(sampling.likeliest_rows)


EVERYTHING = 2**40  # the window of a layer that has none


class CompiledRunner:
    """Runs the model over chunks in one compiled function, with a `PackedKVPool` as KV cache.

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
    ):
        self.shape, self.weights, self.pool, self.manager = shape, weights, pool, manager
        self.num_threads = available_threads(num_threads)
        self.packer = Packer(manager, shape.block_size, max_num_batched_tokens)
        self._windows = np.array([window or EVERYTHING for window in windows], np.int64)
        in_bfloat16 = isinstance(weights.qkv, Pairs)
        self._work = make_workspace(shape, max_num_batched_tokens, self.num_threads, in_bfloat16)
        self._scratch = make_scratch(shape, max_num_batched_tokens, self.num_threads, pool.kv_dtype)
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
            self.shape,
            self.weights,
            self._windows,
            packed,
            self.pool.cache,
            self._scratch,
            self._work,
            logits,
        )


def make_workspace(shape: Shape, max_tokens: int, num_workers: int, in_bfloat16: bool) -> Workspace:
    """Allocate the intermediate arrays of a step of at most `max_tokens` tokens."""
    heads_width = shape.q_heads * shape.head_dim
    widest = max(shape.hidden, heads_width)
    make_inputs = rounded if in_bfloat16 else quantized
    return Workspace(
        x=zeros(max_tokens * shape.hidden, np.float32),
        qkv=zeros(max_tokens * (heads_width + 2 * shape.kv_heads * shape.head_dim), np.float32),
        attention_out=zeros(max_tokens * heads_width, np.float32),
        inputs=make_inputs(max_tokens, widest),
        ffn_inputs=make_inputs(max_tokens, shape.ffn),
        products=product_scratch(in_bfloat16, max(widest, shape.ffn) // GROUP, num_workers),
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


def sampling_batch(sequences: SequenceOf[Sequence], vocab: int) -> SamplingBatch:
    """Return the sampling settings of the sequences as arrays, one row per sequence."""
    params = [sequence.params for sequence in sequences]
    seen = [each.token_ids if each.params.has_penalties else [] for each in sequences]
    banned = [sequence.banned_ids for sequence in sequences]
    biased = [each.logit_bias.keys() for each in params]
    return SamplingBatch(
        temperature=np.array([_temperature(each) for each in params], np.float32),
        top_k=np.array([min(each.top_k or vocab, vocab) for each in params]),
        top_p=np.array([each.top_p for each in params], np.float64),
        min_p=np.array([each.min_p for each in params], np.float32),
        uniform=uniform_draws(
            [sequence.seed for sequence in sequences],
            [sequence.choice for sequence in sequences],
            [len(sequence.output_ids) for sequence in sequences],
        ).numpy(),
        penalties=np.array(
            [
                (each.repetition_penalty, each.presence_penalty, each.frequency_penalty)
                for each in params
            ],
            np.float32,
        ),
        seen_starts=_starts(seen),
        seen=_flat(seen),
        num_prompt=np.array([len(each.prompt_ids) for each in sequences]),
        biased_starts=_starts(biased),
        biased=_flat(biased),
        biases=np.fromiter(
            chain.from_iterable(each.logit_bias.values() for each in params), np.float32
        ),
        banned_starts=_starts(banned),
        banned=_flat(banned),
    )


def _temperature(params: SamplingParams) -> float:
    """Return 0 for greedy only; a temperature above 0 stays above 0 in float32."""
    return 0.0 if params.greedy else max(params.temperature, float(np.finfo(np.float32).tiny))


def _starts(lists: Iterable[Any]) -> np.ndarray:
    """Return the offset of each list in their concatenation, and the total length."""
    return np.cumsum([0, *(len(each) for each in lists)])


def _flat(lists: Iterable[Iterable[int]]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(lists), np.int64)
