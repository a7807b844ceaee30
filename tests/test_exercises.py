"""Every exercise: right answers pass; wrong ones, mutants and stubs get a helpful message."""

import re
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch

from minigen.sequence import ScheduledChunk
from minigen_course.ch24_scheduler.lesson import ChunkingScheduler
from minigen_course.ch36_speculative.reference import best_count
from minigen_course.ch51_server.lesson import event_data
from minigen_course.ch53_structured_output.automaton import StateMatcher
from minigen_course.grading.exercise import CHAPTERS, Exercise, exercises
from minigen_course.grading.judge import verdict_on
from minigen_course.grading.stub import dotted_name
from minigen_course.lab.triton_interpreter import HAS_TRITON
from tests.answers import Answers
from tests.mutants import mutants

ANSWERS: dict[tuple[str, str], Answers] = {
    (chapter, name): answers
    for chapter, module in CHAPTERS.items()
    for name, answers in import_module(f"tests.answers.{module.split('.')[1]}").ANSWERS.items()
}
EXERCISES = [
    (chapter, name)
    for chapter in CHAPTERS
    for name in exercises(chapter)
    if HAS_TRITON or chapter not in ("31", "32", "33")
]


def exercise_of(key: tuple[str, str]) -> Exercise:
    return exercises(key[0])[key[1]]


@contextmanager
def time_limit(seconds: float) -> Generator[None, None, None]:
    """Raise `TimeoutError` in a part that uses too much processor time, or waits forever.

    Time in which other programs run does not count, so a busy machine ends nothing.
    """

    def stop(*_: Any) -> None:
        raise TimeoutError

    if not hasattr(signal, "SIGALRM"):
        yield
        return
    limits = (signal.ITIMER_PROF, signal.SIGPROF, seconds), (signal.ITIMER_REAL, signal.SIGALRM, 60)
    before = [signal.signal(number, stop) for _, number, _ in limits]
    for timer, _, limit in limits:
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for (timer, number, _), handler in zip(limits, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def passes_in_time(exercise: Exercise, part: Any, seconds: float) -> bool:
    try:
        with time_limit(seconds):
            return verdict_on(exercise.checks, part)[0]
    except TimeoutError:  # between two checks
        return False


def test_every_exercise_has_enough_answers() -> None:
    assert [key for key in ANSWERS if key in EXERCISES] == EXERCISES
    for key, answers in ANSWERS.items():
        assert len(answers.right) >= 2, f"{key} needs two right answers written otherwise"
        assert len(answers.wrong) >= 8, f"{key} needs eight wrong answers"


@pytest.mark.parametrize("key", EXERCISES, ids="-".join)
def test_the_packages_own_and_other_right_answers_pass(key: tuple[str, str]) -> None:
    exercise = exercise_of(key)
    for part in (exercise.solution, *ANSWERS[key].right):
        passed, message = verdict_on(exercise.checks, part)
        assert passed, f"{part}: {message}"


@pytest.mark.parametrize(
    ("key", "wrong"),
    [(key, wrong) for key in EXERCISES for wrong in ANSWERS[key].wrong],
    ids=lambda each: each.replace(" ", "_") if isinstance(each, str) else "-".join(each),
)
def test_wrong_answers_get_a_message_with_the_mistake(key: tuple[str, str], wrong: str) -> None:
    passed, message = verdict_on(exercise_of(key).checks, ANSWERS[key].wrong[wrong])
    assert not passed, "this wrong answer passes"
    assert message.startswith("check ")
    assert any(word in message for word in ("should", "return", "must", "raised")), message


@pytest.mark.parametrize("key", EXERCISES, ids="-".join)
def test_mutants_of_the_packages_own_are_caught(key: tuple[str, str]) -> None:
    exercise, equivalent = exercise_of(key), ANSWERS[key].equivalent
    found = list(mutants(exercise.solution))
    assert found, "nothing to change"
    assert set(equivalent) <= {name for name, _ in found}, "an equivalent mutant is no longer there"
    started = time.process_time()
    assert verdict_on(exercise.checks, exercise.solution)[0]
    patience = 1 + 10 * (time.process_time() - started)  # a passing one takes as long
    survivors = [
        name
        for name, part in found
        if name not in equivalent and passes_in_time(exercise, part, patience)
    ]
    assert not survivors


def damaged(value: Any) -> bool:
    """Change a tensor, array, list or dict in place, and return whether it was one."""
    if isinstance(value, torch.Tensor | np.ndarray):
        value[...] = 1 - value if value.dtype not in (torch.bool, bool) else ~value
    elif isinstance(value, list) and value:
        value.append(value.pop(0))
        value.append(value[0])
    elif isinstance(value, dict) and value:
        value.clear()
    else:
        return False
    return True


@pytest.mark.parametrize("key", EXERCISES, ids="-".join)
def test_a_part_that_changes_its_arguments_after_its_work_is_refused(key: tuple[str, str]) -> None:
    exercise, num_damaged = exercise_of(key), 0
    if not isinstance(exercise.solution, FunctionType):
        return

    def part(*given: Any) -> Any:
        nonlocal num_damaged
        found = exercise.solution(*given)
        num_damaged += sum(map(damaged, given))
        return found

    passed, _ = verdict_on(exercise.checks, part)
    assert not (passed and num_damaged)


@pytest.mark.parametrize("key", EXERCISES, ids="-".join)
def test_an_untouched_stub_has_the_packages_signature_and_a_helpful_failure(
    key: tuple[str, str],
) -> None:
    exercise = exercise_of(key)
    assert dotted_name(exercise.solution) == exercise.dotted
    names: dict[str, Any] = {}
    exec(exercise.stub, names)
    passed, message = verdict_on(exercise.checks, names[exercise.name])
    assert not passed
    assert "still empty" in message


@pytest.mark.parametrize("key", EXERCISES, ids="-".join)
def test_an_exercise_contains_all_that_a_learner_needs(key: tuple[str, str]) -> None:
    exercise = exercise_of(key)
    assert exercise.hints
    assert exercise.statement.endswith((".", "."))
    assert exercise.harder.endswith((".", "?"))
    assert "mine" in exercise.use
    compile(exercise.use, "use", "exec")


@pytest.mark.parametrize("chapter", ["13", "14", "15", "16", "17"])
def test_a_part_of_torchs_layers_is_used_in_torchs_engine(chapter: str) -> None:
    """The compiled step, which `auto` takes, calls no function of these chapters."""
    for exercise in exercises(chapter).values():
        calls = re.findall(r"load_model\((.*)\)", exercise.use)
        assert all('weights="float32"' in call for call in calls), exercise.name


def drops_empty_events(pieces: Any) -> Any:
    return (each for each in event_data(pieces) if each)


class SpellsFirst(StateMatcher):
    """Looks a token's bytes up before it asks whether the token is allowed."""

    def accept(self, token_id: int) -> None:
        if token_id not in self.masks.end_ids:
            assert self.masks.spellings[token_id]
        super().accept(token_id)


class WholeRest(ChunkingScheduler):
    """Gives the first prompt all that is left of a step, also if its logprobs are asked for."""

    def schedule(self) -> list[ScheduledChunk]:
        chunks = super().schedule()
        spare = self.max_num_batched_tokens - sum(each.num_tokens for each in chunks)
        if chunks:
            first, num_tokens = chunks[0].sequence, chunks[0].num_tokens
            rest = len(first) - first.num_computed - num_tokens
            chunks[0] = ScheduledChunk(first, num_tokens + min(spare, rest))
        return chunks


def sums_floats(
    codes: np.ndarray, scales: np.ndarray, inputs: np.ndarray, input_scales: np.ndarray
) -> np.ndarray:
    """Multiplies integers, and adds them up as floats."""
    dots = (codes.astype(np.int32) * inputs.astype(np.int32)).sum(axis=-1, dtype=np.float32)
    return (dots * scales * input_scales).sum(axis=-1).astype(np.float32)


@pytest.mark.parametrize(
    ("key", "part", "words"),
    [
        (("51", "event_data"), drops_empty_events, "some is empty"),
        (("53", "StateMatcher"), SpellsFirst, "KeyError"),
        (("24", "ChunkingScheduler"), WholeRest, "prompt_logprobs"),
        (("34", "multiply_bytes"), sums_floats, "should be a sum of integers"),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, tuple) else None,
)
def test_a_mistake_that_is_easily_missed_is_seen(
    key: tuple[str, str], part: Any, words: str
) -> None:
    passed, message = verdict_on(exercise_of(key).checks, part)
    assert not passed
    assert words in message


def test_a_count_may_be_numpys() -> None:
    def of_numpy(acceptance: float, step_costs: Any) -> Any:
        return np.int64(best_count(acceptance, step_costs))

    passed, message = verdict_on(exercise_of(("36", "best_count")).checks, of_numpy)
    assert passed, message
