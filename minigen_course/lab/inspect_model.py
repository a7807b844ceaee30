"""Inspect a loaded model: hidden states, queries and keys of a forward pass, and logits."""

import gc
import math
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from minigen import hub
from minigen.checkpoint.checkpoint import ModelFiles, read_model
from minigen.config import EngineConfig
from minigen.errors import CapacityError, PromptError
from minigen.kv_cache.block_manager import BlockManager
from minigen.llm import LLM
from minigen.model.attention import attend_packed, causal_mask
from minigen.model.layers import apply_rotary
from minigen.model.transformer import Transformer, run_layer
from minigen.progress import shown_progress
from minigen.renamed import refuse_old_options
from minigen.sampling.params import SamplingParams
from minigen.sequence import ScheduledChunk, Sequence

NO_WORDS = "Write at least one word."


def load_model(name: str = hub.DEFAULT_MODEL, **options: Any) -> LLM:
    """Load a model with `LLM.load`; pull it first, with progress bars, if it is missing.

    What is in memory before the first model is set apart from the garbage collector (`gc.freeze`):
    nearly all of it are modules' objects, half a million that live as long as the process. Each
    full run of the collector would look through them again, for some tenths of a second.

    A GGUF file is read once. Engines of it share the tokenizer and, in the same form, the weights,
    which are freed when no engine uses them.
    """
    refuse_old_options(options)
    config = EngineConfig(**options)
    if gc.get_freeze_count() == 0:
        gc.freeze()
    if hub.find(name) is None:
        print(f"{name} is not on this machine yet. It is pulled now, once.")
        with shown_progress() as progress:
            hub.pull(name, progress=progress)
    return LLM.of_files(_read_once(hub.resolve(name)), config)


_read: dict[tuple[Path, int, int], ModelFiles] = {}  # by path, size and time of the last change


def _read_once(path: Path) -> ModelFiles:
    if path.is_dir():
        return read_model(path)
    found = path.stat()
    key = (path, found.st_size, found.st_mtime_ns)
    if key not in _read:
        _read[key] = read_model(path)
    return _read[key]


def share_no_more() -> None:
    """Let the next engine share nothing with those before it, because a part was exchanged."""
    _read.clear()


def transformer_of(llm: LLM) -> Transformer:
    """Return the model that a loaded engine runs."""
    model: Transformer = llm.engine.runner.model  # type: ignore[attr-defined]
    return model


def manager_of(llm: LLM) -> BlockManager:
    """Return the block manager of a loaded engine."""
    manager: BlockManager = llm.engine.runner.manager  # type: ignore[attr-defined]
    return manager


@torch.inference_mode()
def next_logits(llm: LLM, text: str) -> Float[Tensor, " vocab"]:
    """Return the logits of the token after `text`, computed in one pass without a cache."""
    model = transformer_of(llm)
    token_ids = llm.tokenizer.encode(text)
    if not token_ids:
        raise ValueError(NO_WORDS)
    attend = attend_packed([len(token_ids)], llm.config.sliding_windows)
    hidden = model(torch.tensor(token_ids), torch.arange(len(token_ids)), attend)
    return model.logits(hidden[-1:])[0].float()


_salts = count()  # a salt per reading, so that no cached prefix is shared


@dataclass(frozen=True)
class Reading:
    """The logits after each token of each text, and the seconds of each step."""

    logits: tuple[Float[Tensor, "_ vocab"], ...]  # each text has its own number of tokens
    seconds: tuple[float, ...]

    @property
    def step_seconds(self) -> float:
        """The time of an undisturbed step: the 10th percentile."""
        return sorted(self.seconds)[len(self.seconds) // 10]


def read_along(llm: LLM, *texts: SequenceOf[int]) -> Reading:
    """Run one token of every text per step, whatever the model would choose (teacher forcing).

    Raises `CapacityError` if the KV cache cannot hold the texts, `PromptError` for an empty one.
    """
    runner, manager = llm.engine.runner, manager_of(llm)
    sequences = _beginnings(manager, texts)
    logits: list[list[Tensor]] = [[] for _ in texts]
    seconds = []
    try:
        for step in range(max(len(ids) for ids in texts)):
            running = [number for number, ids in enumerate(texts) if step < len(ids)]
            for number in running:
                if step == 0:
                    has_room = manager.allocate(sequences[number], 1) > 0
                else:
                    sequences[number].append(texts[number][step])
                    has_room = manager.allocate_slots(sequences[number], 1)
                _expect_room(has_room)
            started = time.perf_counter()
            found = runner.logits([ScheduledChunk(sequences[number], 1) for number in running])
            seconds.append(time.perf_counter() - started)
            for number, row in zip(running, found.clone(), strict=True):
                logits[number].append(row)
                manager.mark_computed(sequences[number], 1)
    finally:
        for sequence in sequences:
            manager.free(sequence)
    return Reading(tuple(torch.stack(rows) for rows in logits), tuple(seconds))


def read_at_once(llm: LLM, *texts: SequenceOf[int]) -> tuple[Float[Tensor, "_ vocab"], ...]:
    """Return the logits after each token of each text, from one step that computes all tokens.

    They come from the engine's own runner and KV cache, as those of `read_along` do: a text is read
    as a first token and its drafts. Raises `CapacityError` if the step or the KV cache cannot hold
    the texts, and `PromptError` for an empty one.
    """
    manager, lengths = manager_of(llm), [len(ids) for ids in texts]
    sequences = _beginnings(manager, texts)
    most = llm.options.max_num_batched_tokens
    if sum(lengths) > most:
        raise CapacityError(f"{sum(lengths)} tokens are too many for one step of at most {most}.")
    try:
        for sequence, ids in zip(sequences, texts, strict=True):
            sequence.drafts = tuple(ids[1:])
            has_room = manager.allocate(sequence, 1) and manager.allocate_slots(sequence, len(ids))
            _expect_room(bool(has_room))
        chunks = map(ScheduledChunk, sequences, lengths)
        return llm.engine.runner.logits(list(chunks)).clone().split(lengths)
    finally:
        for sequence in sequences:
            manager.free(sequence)


def _expect_room(has_room: bool) -> None:
    if not has_room:
        raise CapacityError("The KV cache has too few free blocks for these texts.")


def _beginnings(manager: BlockManager, texts: SequenceOf[SequenceOf[int]]) -> list[Sequence]:
    """Return a sequence for each text that holds its first token; no prefix is shared.

    Raises `PromptError` for no texts or an empty one, and `CapacityError` for one that is too long.
    """
    if not texts or not all(len(ids) for ids in texts):
        raise PromptError("A text has no tokens; give at least one text, and each with a token.")
    longest = max(len(ids) for ids in texts)
    if longest > manager.num_tokens:
        raise CapacityError(f"A text has {longest} tokens, and room for {manager.num_tokens}.")
    greedy, salt = SamplingParams(temperature=0.0), f"reading {next(_salts)}"
    return [
        Sequence(-1 - number, (ids[0],), greedy, 0, len(ids), frozenset(), cache_salt=salt)
        for number, ids in enumerate(texts)
    ]


def agreement(one: SequenceOf[Tensor], other: SequenceOf[Tensor]) -> float:
    """Return the share of positions at which both readings have the same likeliest token.

    Both are logits of the same texts, [tokens, vocab] per text.
    """
    likeliest, others = (torch.cat([text.argmax(-1) for text in each]) for each in (one, other))
    return float((likeliest == others).float().mean())


def perplexity_of(logits: SequenceOf[Tensor], texts: SequenceOf[SequenceOf[int]]) -> float:
    """Return the perplexity of these texts: among how many equally likely tokens one chooses."""
    found = [log_probabilities_in(*each) for each in zip(logits, texts, strict=True)]
    return math.exp(-float(torch.cat(found).mean()))


def log_probabilities_in(
    logits: Float[Tensor, "tokens vocab"], token_ids: SequenceOf[int]
) -> Float[Tensor, " followers"]:
    """Return the log-probability of each token after the first, from the logits after each token.

    It is computed in float64.
    """
    before = logits[:-1].double()
    chosen = before.gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    return chosen - before.logsumexp(-1)


@dataclass(frozen=True)
class HeadInputs:
    """The inputs of one layer's attention: rotated queries and keys, and values."""

    q: Float[Tensor, "tokens q_heads head_dim"]
    k: Float[Tensor, "tokens kv_heads head_dim"]
    v: Float[Tensor, "tokens kv_heads head_dim"]


@torch.inference_mode()
def log_probabilities(
    llm: LLM,
    token_ids: SequenceOf[int],
    positions: Int64[Tensor, " tokens"] | None = None,
    frequencies: Float[Tensor, " half"] | None = None,
) -> Float[Tensor, " followers"]:
    """Return the log-probability of each token after the first, given the tokens before it.

    `positions` default to 0, 1, 2, ..., and `frequencies` to the model's own.
    """
    model = transformer_of(llm)
    if frequencies is not None:
        model = replace(model, frequencies=frequencies)
    if positions is None:
        positions = torch.arange(len(token_ids))
    ids = torch.tensor(token_ids)
    hidden = model(ids, positions, attend_packed([len(ids)], llm.config.sliding_windows))
    return model.logits(hidden[:-1]).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def perplexity(log_probabilities: Float[Tensor, " followers"]) -> float:
    """Return the perplexity: among how many equally likely tokens the model chooses on average."""
    return math.exp(-float(log_probabilities.double().mean()))


@torch.inference_mode()
def recorded_states(llm: LLM, token_ids: SequenceOf[int]) -> Float[Tensor, "states tokens hidden"]:
    """Return the hidden states before the first layer and after each layer."""
    model, ids = transformer_of(llm), torch.tensor(token_ids)
    attend = attend_packed([len(ids)], llm.config.sliding_windows)
    rotation = model.rotation(torch.arange(len(ids)))
    states = [model.embed(ids)]
    for layer_id, layer in enumerate(model.layers):
        in_layer = partial(attend, layer_id)
        states.append(
            run_layer(layer, states[-1], rotation, in_layer, model.head_dim, model.norm_eps)
        )
    return torch.stack(states)


@torch.inference_mode()
def recorded_heads(llm: LLM, token_ids: SequenceOf[int]) -> tuple[HeadInputs, ...]:
    """Return every layer's queries, keys and values, recorded by a wrapped `attend`."""
    if not len(token_ids):
        raise ValueError(NO_WORDS)
    heads: list[HeadInputs] = []
    usual = attend_packed([len(token_ids)], llm.config.sliding_windows)

    def recording(layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads.append(HeadInputs(q, k, v))
        return usual(layer_id, q, k, v)

    transformer_of(llm)(torch.tensor(token_ids), torch.arange(len(token_ids)), recording)
    return tuple(heads)


def turned_back(llm: LLM, heads: HeadInputs) -> HeadInputs:
    """Return the queries and keys as they were before the rotation by their positions."""
    cos, sin = transformer_of(llm).rotation(torch.arange(len(heads.q)))
    return HeadInputs(apply_rotary(heads.q, cos, -sin), apply_rotary(heads.k, cos, -sin), heads.v)


def head_scores(heads: HeadInputs) -> Float[Tensor, "q_heads tokens tokens"]:
    """Return q k^T / sqrt(head_dim) per head, minus infinity where a key is after its query."""
    keys = heads.k.repeat_interleave(heads.q.shape[1] // heads.k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", heads.q, keys) / math.sqrt(heads.q.shape[-1])
    return scores.masked_fill(~causal_mask(len(keys), len(keys)), -math.inf)
