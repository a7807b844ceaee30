"""The compiled step as a `Runner`, the sampling kernel as a sampler, and their compiled code.

A process starts with what an earlier one compiled. Numba's own cache asks where the file of the
outermost function is and whether it changed; here the folder's name is a hash of all sources, the
versions, and the processor.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from minigen.engine.model_runner import Packed, Packer
from minigen.hub import cache_folder
from minigen.kernels.cpu import sampling, step
from minigen.kernels.cpu.elementwise import quantised, rounded
from minigen.kernels.cpu.kv_layout import PanelPool, Shape, make_scratch
from minigen.kernels.cpu.packed_weights import Pairs
from minigen.kernels.cpu.sampling import SamplingBatch, make_room
from minigen.kernels.cpu.simd import target_features, zeros
from minigen.kernels.cpu.step import Weights, Workspace, num_phases
from minigen.kernels.cpu.thread_pool import available_threads, team_of
from minigen.kv_cache.block_manager import BlockManager
from minigen.sampling.params import SamplingParams
from minigen.sampling.sampler import uniform_draws
from minigen.sequence import ScheduledChunk, Sequence


def _state() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
        digest.update(f"{source} {source.stat().st_mtime_ns}".encode())
    for fact in (version("numba"), version("llvmlite"), version("numpy"), target_features()):
        digest.update(fact.encode())
    return digest.hexdigest()[:16]


FOLDER = cache_folder() / "kernels" / _state()


def _compiled_once(function: Callable[..., Any]) -> Any:
    """`numba.njit` that keeps its machine code in `FOLDER` and lets go of Python's lock."""
    settings: Any = numba.config
    before = settings.CACHE_DIR
    settings.CACHE_DIR = str(FOLDER)
    try:
        return numba.njit(nogil=True, cache=True)(function)
    finally:
        settings.CACHE_DIR = before


run_step = _compiled_once(step.run_step)
choose_rows = _compiled_once(sampling.choose_rows)
likeliest_rows = _compiled_once(sampling.likeliest_rows)


def is_compiled(form: str, kv_dtype: str = "bfloat16") -> bool:
    """Whether the step for weights of this form, and for such a cache, starts without compiling."""
    return _mark(form, kv_dtype).exists()


def speeds(form: str) -> dict[str, float]:
    """Weights a second that one token was multiplied with, when the step was compiled here.

    By "compiled", this form, and by torch's "bfloat16" and "float32"; empty before that.
    """
    if not is_compiled(form):
        return {}
    found: dict[str, float] = json.loads(_mark(form, "bfloat16").read_text("utf-8"))
    return found


def tell_compiled(form: str, kv_dtype: str, measured: Mapping[str, float]) -> None:
    """Remember that the step for these forms lies in `FOLDER`, and how fast it is."""
    if FOLDER.exists():  # it does not where nothing can be written
        _mark(form, kv_dtype).write_text(json.dumps(measured), encoding="utf-8")


def _mark(form: str, kv_dtype: str) -> Path:
    cache = "" if kv_dtype == "bfloat16" else f".{kv_dtype}-cache"
    return FOLDER / f"{form}{cache}.compiled.json"


EVERYTHING = 2**40  # the window of a layer that has none


class CompiledRunner:
    """Runs the model over chunks in one compiled function, keys and values in a `PanelPool`.

    The logits are good until the next step. A token's logits are the same, bit for bit, whatever
    else is in its batch and however its prompt was cut into chunks.
    """

    def __init__(
        self,
        shape: Shape,
        weights: Weights,
        pool: PanelPool,
        manager: BlockManager,
        windows: SequenceOf[int | None],
        max_num_batched_tokens: int,
        num_threads: int,
    ):
        self.shape, self.weights, self.pool, self.manager = shape, weights, pool, manager
        self.num_threads = available_threads(num_threads)
        self.packer = Packer(manager, shape.block_size, max_num_batched_tokens)
        self._windows = np.array([window or EVERYTHING for window in windows], np.int64)
        self._work = make_workspace(shape, max_num_batched_tokens, isinstance(weights.qkv, Pairs))
        self._scratch = make_scratch(shape, max_num_batched_tokens, self.num_threads, pool.kv_dtype)
        self._logits = zeros(len(manager.tables) * shape.vocab, np.float32)

    def logits(self, chunks: SequenceOf[ScheduledChunk]) -> Float[Tensor, "rows vocab"]:
        """The raw logits of each chunk's `prompt_logprob_rows`, then of its samples."""
        packed = self.packer.pack(chunks)
        self.pool.copy_blocks(self.manager.pop_pending_copies())
        rows = packed.logits_rows
        if len(rows) < 2 or (rows[1:] > rows[:-1]).all():
            return self._logits_of(packed)
        distinct, wanted = np.unique(rows, return_inverse=True)  # siblings begin with one row
        return self._logits_of(packed._replace(logits_rows=distinct))[torch.from_numpy(wanted)]

    def _logits_of(self, packed: Packed) -> Float[Tensor, "rows vocab"]:
        shape = (len(packed.logits_rows), self.shape.vocab)
        logits = self._logits[: shape[0] * shape[1]]
        if len(logits) < shape[0] * shape[1]:  # the prompt's own logprobs are asked for
            logits = np.empty(shape[0] * shape[1], np.float32)
        self.run(packed, logits)
        return torch.from_numpy(logits.reshape(shape))

    def run(self, packed: Packed, logits: np.ndarray) -> None:
        """One step; writes the logits of `packed.logits_rows`, ascending, one after another."""
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


def make_workspace(shape: Shape, max_tokens: int, in_bfloat16: bool) -> Workspace:
    """What a step of at most so many tokens writes on its way."""
    heads_width = shape.q_heads * shape.head_dim
    widest = max(shape.hidden, heads_width)
    room = rounded if in_bfloat16 else quantised
    return Workspace(
        x=zeros(max_tokens * shape.hidden, np.float32),
        qkv=zeros(max_tokens * (heads_width + 2 * shape.kv_heads * shape.head_dim), np.float32),
        mixed=zeros(max_tokens * heads_width, np.float32),
        inputs=room(max_tokens * widest),
        ffn_inputs=room(max_tokens * shape.ffn),
    )


class KernelChooser:
    """Chooses tokens as `minigen.sampling.sampler.choose_tokens` does, a thread for each row."""

    def __init__(self, vocab: int, num_threads: int):
        self.vocab = vocab
        self.num_threads = available_threads(num_threads)
        self._room = make_room(self.num_threads, vocab)

    def __call__(
        self, logits: Float[Tensor, "rows vocab"], sequences: SequenceOf[Sequence]
    ) -> list[int]:
        """A token for each row; -1 where its logits are not finite."""
        flat, out = logits.numpy().reshape(-1), np.empty(len(sequences), np.int64)
        plain = all(sequence.params.plainly_greedy for sequence in sequences)
        team = team_of(min(self.num_threads, len(out)))
        if plain:
            team.run(1, likeliest_rows, flat, self.vocab, out)
        else:
            asked = asked_of(sequences, self.vocab)
            team.run(1, choose_rows, flat, self.vocab, asked, self._room, out)
        found: list[int] = out.tolist()
        return found


def asked_of(sequences: SequenceOf[Sequence], vocab: int) -> SamplingBatch:
    """What the sequences ask for, a row each."""
    params = [sequence.params for sequence in sequences]
    seen = [each.token_ids if each.params.has_penalties else [] for each in sequences]
    banned = [sequence.banned_ids for sequence in sequences]
    biased = [list(each.logit_bias) for each in params]
    biases = [bias for each in params for bias in each.logit_bias.values()]
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
        biases=np.array(biases, np.float32),
        banned_starts=_starts(banned),
        banned=_flat(banned),
    )


def _temperature(params: SamplingParams) -> float:
    """0 for greedy alone: what is above 0 stays so in float32."""
    return 0.0 if params.greedy else max(params.temperature, float(np.finfo(np.float32).tiny))


def _starts(lists: Iterable[Any]) -> np.ndarray:
    """Where each list begins in all of them laid end to end, and where the last ends."""
    return np.cumsum([0, *(len(each) for each in lists)])


def _flat(lists: Iterable[Iterable[int]]) -> np.ndarray:
    return np.array([number for each in lists for number in each], np.int64)
