"""Loads that repeat their prompts, steps over several rows, recorded drafts, and their gain.

Sources: Leviathan et al. 2022, section 3 (expected tokens, walltime); Saxena 2023 (prompt lookup);
Zhang et al. 2023 (Draft & Verify: a model without some of its layers drafts for itself).
"""

import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float

from minigen import LLM, SamplingParams
from minigen.engine.dispatcher import SharedSteps
from minigen.protocols import Proposer
from minigen.sequence import ScheduledChunk, num_matching
from minigen.sequence import Sequence as EngineSequence
from minigen.speculative.ngram import NgramIndex
from minigen.speculative.pace import FixedPace, MeasuredPace
from minigen.speculative.speculator import Speculator
from minigen_course.handout.course_files import results_folder
from minigen_course.lab.inspect_model import (
    manager_of,
    read_at_once,
    recorded_states,
    transformer_of,
)

NAMES = ("river", "stone", "lamp", "garden", "window", "paper", "copper", "winter", "market")
# Milliseconds of a step by its rows, each a sequence with 256 tokens of context, from
# benchmarks/results/34_step_cost.json. Rows of one sequence read one context, so they cost less.
STORED_STEPS = {
    "bfloat16": {1: 10.72, 2: 11.54, 4: 12.30, 8: 13.91, 16: 19.33, 32: 35.40, 64: 70.81},
    "int4": {1: 4.385, 2: 6.305, 4: 9.180, 8: 13.77, 16: 20.36, 32: 36.22, 64: 69.73},
}
MOST_IN_ALL = 512  # drafts of a step, which its budget of tokens must hold
QUARTER = 0.25  # of the times of a step: the quartile that a busy machine disturbs little


def records(seed: int, count: int = 5) -> str:
    """Return a list of records, at most nine, as a program would print it."""
    rng = random.Random(seed)
    return "\n".join(
        f'{{"id": {number}, "name": "{name}", "weight": {rng.randint(10, 99)}}},'
        for number, name in enumerate(rng.sample(NAMES, count), 1)
    )


def renamed(text: str) -> str:
    """Return a list of records with "number" for "id"."""
    return text.replace('"id"', '"number"')


def editing(seed: int) -> str:
    """Return a text, an edited other one as an example, and the first line of this text's edit."""
    text, other = records(seed), records(seed + 1000)
    change = '\n\nThe same list with "number" for "id":\n\n'
    start = renamed(text).partition("\n")[0]
    return f"{other}{change}{renamed(other)}\n\n{text}{change}{start}\n"


def copying(seed: int) -> str:
    """Return a text twice, and the start of a third copy."""
    text = records(seed, count=3)
    return f"{text}\n\nOnce more:\n\n{text}\n\nOnce more:\n\n{text[:12]}"


def story(seed: int) -> str:
    """Return the start of a story, which repeats nothing."""
    first, second = random.Random(seed).sample(NAMES, 2)
    return f"The story of the {first} and the {second} begins on a cold morning, when"


def sequence_of(token_ids: Sequence[int]) -> EngineSequence:
    """Return a sequence with these tokens, for a proposer to look at."""
    return EngineSequence(-1, tuple(token_ids), SamplingParams(), 0, 1, frozenset())


# The time of a step


def row_seconds(
    llm: LLM, context: int, counts: Sequence[int], repeats: int = 5
) -> dict[int, float]:
    """Return the seconds of a step of one sequence by its rows: its last token, and drafts.

    The sequence has `context` tokens. The numbers of rows take turns, and the lower quartile of
    each counts.
    """
    runner, manager = llm.engine.runner, manager_of(llm)
    greedy = SamplingParams(temperature=0.0)
    any_ids = [each % llm.config.vocab_size for each in range(1000, 1000 + context + max(counts))]
    known, after = tuple(any_ids[:context]), any_ids[context:]
    sequence = EngineSequence(-1, known, greedy, 0, max(counts), frozenset(), cache_salt="rows")
    spent: dict[int, list[float]] = {count: [] for count in counts}
    manager.allocate(sequence, context)
    try:
        runner.logits([ScheduledChunk(sequence, context - 1)])
        manager.mark_computed(sequence, context - 1)
        for _ in range(1 + repeats):
            for count in counts:
                sequence.drafts = tuple(after[: count - 1])
                manager.allocate_slots(sequence, count)
                started = time.perf_counter()
                runner.logits([ScheduledChunk(sequence, count)])
                spent[count].append(time.perf_counter() - started)
    finally:
        manager.free(sequence)
    return {count: float(np.quantile(each[1:], QUARTER)) for count, each in spent.items()}


def relative(seconds: Mapping[int, float]) -> dict[int, float]:
    """Return times of steps by their rows as multiples of that of a step with one row."""
    return {rows: each / seconds[1] for rows, each in seconds.items()}


def cost_of(costs: Mapping[int, float], rows: float) -> float:
    """Return the cost of a step by its rows, between measured ones; beyond, it grows in line."""
    known = sorted(costs)
    if rows <= known[-1]:
        return float(np.interp(rows, known, [costs[each] for each in known]))
    return costs[known[-1]] * rows / known[-1]


# Expected gain


def expected_tokens(acceptance: float, count: int) -> float:
    """Return the expected tokens of a step with `count` drafts: 1 + a + a^2 + ... + a^count."""
    return sum(acceptance**place for place in range(count + 1))


def gain(
    acceptance: float,
    count: int,
    costs: Mapping[int, float],
    batch: int = 1,
    draft_cost: float = 0.0,
) -> float:
    """Return the predicted ratio of tokens per second with `count` drafts to that without.

    `costs` has the relative time of a step by its rows, `batch` sequences have drafts at once, and
    each draft takes `draft_cost` steps of the model.
    """
    plain = cost_of(costs, batch)
    spent = cost_of(costs, batch * (count + 1)) / plain + count * draft_cost
    return expected_tokens(acceptance, count) / spent


def best_drafts(
    acceptance: float, costs: Mapping[int, float], most: int, batch: int = 1, draft_cost: float = 0
) -> int:
    """Return the number of drafts with the largest predicted gain, the fewest among equals."""
    gains = [gain(acceptance, count, costs, batch, draft_cost) for count in range(most + 1)]
    return gains.index(max(gains))


# Recorded steps


@dataclass(frozen=True)
class Round:
    """A step of one sequence: its drafts, how many were right, and the tokens that it gave.

    The first `right` of the tokens are drafts, the last one is the model's own; it is missing if a
    right draft ended the answer.
    """

    drafts: tuple[int, ...]
    right: int
    tokens: tuple[int, ...]


@dataclass
class Recorded:
    """Passes a proposer's drafts on, and keeps them: (tokens of the answer so far, drafts)."""

    proposer: Proposer
    drafts: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    def propose(
        self, sequences: Sequence[EngineSequence], counts: Sequence[int]
    ) -> Sequence[Sequence[int]]:
        """Return the proposer's drafts, and keep those of the first sequence."""
        found = self.proposer.propose(sequences, counts)
        self.drafts.append((len(sequences[0].output_ids), tuple(found[0][: counts[0]])))
        return found

    def end(self, sequence: EngineSequence) -> None:
        """Pass it on."""
        self.proposer.end(sequence)

    def rounds(self, token_ids: Sequence[int]) -> list[Round]:
        """Return the steps of the answer whose tokens these are, and forget its drafts."""
        drafts, self.drafts = dict(self.drafts), []
        found, at = list[Round](), 0
        while at < len(token_ids):
            proposed = drafts.get(at, ())
            right = num_matching(proposed, token_ids[at:])
            found.append(Round(proposed, right, tuple(token_ids[at : at + right + 1])))
            at += len(found[-1].tokens)
        return found


Prompt = str | Sequence[int]


@runtime_checkable
class Generates(Protocol):
    """An engine: an `LLM`, or one with drafts."""

    def generate(self, *asked: Any, **more: Any) -> Any:
        """Generate as `LLM.generate`."""

    def count_work(self) -> Any:
        """Count as `LLM.count_work`."""


class Drafted:
    """A loaded engine that gets a proposer's drafts while it answers by this object.

    It does what `LLM.load(proposer=..., speculative_config=...)` does, and shares the weights and
    the prefix cache of `llm` in place of loading them again.
    """

    def __init__(self, llm: LLM, proposer: Proposer, most: int, adaptive: bool = False):
        self.llm = llm
        self.speculator = Speculator(
            proposer,
            MeasuredPace() if adaptive else FixedPace(),
            llm.config.vocab_size,
            manager_of(llm).num_tokens,
            most,
            MOST_IN_ALL,
        )

    def generate(self, *asked: Any, **more: Any) -> Any:
        """Generate as `LLM.generate`, with drafts."""
        engine, usual = self.llm.engine, self.llm.engine.speculator
        engine.speculator = self.speculator
        try:
            return self.llm.generate(*asked, **more)
        finally:
            engine.speculator = usual

    def count_work(self) -> Any:
        """Count as `LLM.count_work`."""
        return self.llm.count_work()


class AlwaysWrong:
    """Proposes one rare token, as often as it is asked: the drafts that cost the most."""

    def propose(
        self, sequences: Sequence[EngineSequence], counts: Sequence[int]
    ) -> list[list[int]]:
        """Return runs of the rare token."""
        return [[49_000] * count for count in counts]

    def end(self, sequence: EngineSequence) -> None:
        """Do nothing."""


def predicted_answer(
    llm: LLM, prompt: str, params: SamplingParams, predicted: str
) -> tuple[list[int], int]:
    """Return the answer to a prompt whose client predicts a text, and its number of steps."""
    ids = llm.tokenizer.encode(predicted, add_special_tokens=False)
    states = llm.process_requests([prompt], params, predicted_ids=ids)
    with llm.count_work() as work:
        deltas = list(SharedSteps(llm.engine).run(states))
    return [each.token_id for each in deltas], work.steps


def num_steps(
    llm: LLM | Drafted, prompt: Any, params: SamplingParams, salt: str | None = None
) -> int:
    """Return how many steps an answer takes."""
    with llm.count_work() as work:
        llm.generate(prompt, params, cache_salt=salt, progress=False)
    return work.steps


# The naive way


def lenient_answer(
    llm: LLM, prompt_ids: Sequence[int], rank: int, count: int, max_tokens: int
) -> tuple[list[int], int]:
    """Return an answer that accepts each draft among the `rank` likeliest tokens, and its steps.

    Drafts come from prompt lookup, at most `count`. After the last accepted one, the likeliest
    token follows. With rank 1 it is greedy decoding.
    """
    runner, manager = llm.engine.runner, manager_of(llm)
    greedy = SamplingParams(temperature=0.0)
    index = NgramIndex(2, 4)
    sequence = EngineSequence(
        -1, tuple(prompt_ids), greedy, 0, max_tokens, frozenset(), cache_salt="lenient"
    )
    manager.allocate(sequence, len(sequence))
    steps = 0
    try:
        while sequence.finish_reason is None:
            index.extend(sequence.token_ids[len(index.token_ids) :])
            place = index.find(sequence.token_ids) if sequence.output_ids else None
            room = min(count, max_tokens - len(sequence.output_ids) - 1)
            sequence.drafts = () if place is None else tuple(index.following(place, room))
            num_new = len(sequence) - sequence.num_computed
            manager.allocate_slots(sequence, num_new + len(sequence.drafts))
            rows = runner.logits([ScheduledChunk(sequence, num_new + len(sequence.drafts))])
            drafts, sequence.drafts, steps = sequence.drafts, (), steps + 1
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] in rows[accepted].topk(rank).indices:
                accepted += 1
            for token_id in (*drafts[:accepted], int(rows[accepted].argmax())):
                sequence.append(token_id)
            manager.mark_computed(sequence, num_new + accepted)
    finally:
        manager.free(sequence)
    return sequence.output_ids, steps


# Draft models


def next_probs(logits: torch.Tensor, temperature: float = 1.0) -> list[np.ndarray]:
    """Return the probabilities of the next token from rows of logits, as float64."""
    return list((logits.double() / temperature).softmax(-1).numpy())


def answer_logits(
    llm: LLM, prompt_ids: Sequence[int], answer_ids: Sequence[int]
) -> Float[torch.Tensor, "tokens vocab"]:
    """Return the logits that decide each token of an answer, all of them from one step."""
    (found,) = read_at_once(llm, [*prompt_ids, *answer_ids])
    return found[len(prompt_ids) - 1 : -1]


@torch.inference_mode()
def depth_probs(llm: LLM, token_ids: Sequence[int]) -> list[np.ndarray]:
    """Return the probabilities of the token after a text, by the first n layers, n = 0, 1, 2, ...

    The output norm and head follow directly after layer n. The model must run layer by layer.
    """
    return next_probs(transformer_of(llm).logits(recorded_states(llm, token_ids)[:, -1]))


@torch.inference_mode()
def shallow_agreement(
    llm: LLM, token_ids: Sequence[int], first: int, every: int = 1
) -> dict[int, float]:
    """Return how often the first n layers have the full model's likeliest token, by n.

    n is the number of all layers, and `every` fewer each time, down to 0. The output norm and head
    follow directly after layer n (early exit). Places from `first` on count. The model must run
    layer by layer.
    """
    model = transformer_of(llm)
    states = recorded_states(llm, token_ids)[:, first:]
    depths = range(len(states) - 1, -1, -every)
    likeliest = {depth: model.logits(states[depth]).argmax(-1) for depth in depths}
    own = likeliest[depths[0]]
    return {
        depth: float((each == own).float().mean()) for depth, each in reversed(likeliest.items())
    }


# Loads and results


@dataclass(frozen=True)
class Run:
    """What one way of answering took: seconds of each turn, steps, drafts and accepted drafts.

    `answers` are the token ids of each prompt's answer.
    """

    seconds: list[float]
    steps: int
    drafted: int
    accepted: int
    answers: list[list[int]]

    @property
    def share(self) -> float:
        """The share of drafts that were accepted."""
        return self.accepted / max(1, self.drafted)


def compared(
    llms: Mapping[str, Generates],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    repeats: int,
    warm_up: int = 1,
) -> dict[str, Run]:
    """Answer the prompts with each engine by turns, and check that all answers are the same.

    The first turn does not count, and its answers have at most `warm_up` tokens: it computes the
    prompts. An adaptive engine needs more of them, in which it measures the first steps.
    """
    spent: dict[str, list[float]] = {name: [] for name in llms}
    counts: dict[str, Any] = {}
    first = replace(params, max_tokens=min(params.max_tokens or warm_up, warm_up))
    for turn in (first, *repeat(params, repeats)):
        answers = []
        for name, llm in llms.items():
            with llm.count_work() as work:
                started = time.perf_counter()
                found = llm.generate(prompts, turn, progress=False)
                spent[name].append(time.perf_counter() - started)
            answers.append([each.token_ids for each in found])
            counts[name] = work
        if any(each != answers[0] for each in answers):
            raise AssertionError("speculation changed a text")
    return {
        name: Run(
            spent[name][1:], work.steps, work.tokens_drafted, work.tokens_accepted, answers[0]
        )
        for name, work in counts.items()
    }


def times_as_fast(one: Run, other: Run) -> float:
    """Return the median, over the turns, of one way's seconds divided by the other's."""
    pairs = zip(one.seconds, other.seconds, strict=True)
    return float(np.median([before / after for before, after in pairs]))


@dataclass(frozen=True)
class Stored:
    """The stored gains: form and load -> way -> batch -> ratio of decode time without to with.

    `spans` has the lowest and the highest turn of each.
    """

    ratios: dict[tuple[str, str], dict[str, dict[int, float]]]
    spans: dict[tuple[str, str], dict[str, dict[int, tuple[float, float]]]]

    def at(self, form: str, load: str, way: str, batch: int) -> float | None:
        """Return one ratio; None if it was not measured."""
        return self.ratios.get((form, load), {}).get(way, {}).get(batch)


def stored_gains(path: Path | None = None) -> Stored | None:
    """Return the results of benchmarks/36_speculative.py; None if there are none yet."""
    path = path or results_folder() / "36_speculative.json"
    if not path.exists():
        return None
    ratios: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    spans: dict[tuple[str, str], dict[str, dict[int, tuple[float, float]]]] = {}
    stored = json.loads(path.read_text(encoding="utf-8"))
    for form in ("bfloat16", "auto"):
        for name, found in stored[form]["batches"].items():
            load, _, batch = name.partition(", batch ")
            for way, each in found.items() if batch else ():
                if isinstance(each, dict):
                    by_batch = ratios.setdefault((form, load), {}).setdefault(way, {})
                    by_batch[int(batch)] = each["ratio"]
                    turns = spans.setdefault((form, load), {}).setdefault(way, {})
                    turns[int(batch)] = (min(each["ratios"]), max(each["ratios"]))
    return Stored(ratios, spans)


def mean(values: Iterable[float]) -> float:
    """Return the mean of some values."""
    return float(np.mean(list(values)))
