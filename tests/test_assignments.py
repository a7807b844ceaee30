"""What may be assigned beyond a chapter's checks: cases by seed, questions, answers in words."""

import re
from functools import cache
from importlib import import_module
from math import inf
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from minigen_course.grading.exercise import CHAPTERS, Check, Exercise, Wrong, exercises
from minigen_course.grading.question import Question, questions, value_in, written
from minigen_course.grading.stub import source_of
from minigen_course.grading.varied import example, expect_same, own_check, shown_inputs, varied_of
from minigen_course.lab.triton_interpreter import HAS_TRITON

SEEDS = (1, 2, 3)
SLOW = {("52", "diagnose"), ("52", "make_plan")}  # they simulate a server: one seed is enough
LEAST_CAUGHT = 0.5  # of an exercise's wrong answers, by the cases of three seeds alone
EXERCISES = [
    (chapter, name)
    for chapter in CHAPTERS
    for name in exercises(chapter)
    if HAS_TRITON or chapter not in ("31", "32", "33")
]
QUESTIONS = [(chapter, name) for chapter in CHAPTERS for name in questions(chapter)]
LONGEST_LINE = 20  # characters of a line of code that would give a part away


def seeds_of(key: tuple[str, str]) -> tuple[int, ...]:
    return SEEDS[:1] if key in SLOW else SEEDS


def exercise_of(key: tuple[str, str]) -> Exercise:
    return exercises(key[0])[key[1]]


def answers_of(key: tuple[str, str]) -> Any:
    module = CHAPTERS[key[0]].split(".")[1]
    return import_module(f"tests.answers.{module}").ANSWERS[key[1]]


@cache  # it computes once what the package's own part does with its cases
def check_of(key: tuple[str, str], seed: int) -> Check:
    return own_check(exercise_of(key), seed)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_exercise_varies(chapter: str) -> None:
    assert list(varied_of(chapter)) == list(exercises(chapter))


@pytest.mark.parametrize("key", EXERCISES, ids="-".join)
def test_right_answers_pass_the_cases_of_every_seed(key: tuple[str, str]) -> None:
    exercise = exercise_of(key)
    for part in (exercise.solution, *answers_of(key).right):
        for seed in seeds_of(key):
            check_of(key, seed)(part)


@pytest.mark.parametrize("key", EXERCISES, ids="-".join)
def test_the_cases_alone_catch_most_wrong_answers(key: tuple[str, str]) -> None:
    wrong = answers_of(key).wrong
    caught = [name for name, part in wrong.items() if not passes(key, part)]
    assert len(caught) >= LEAST_CAUGHT * len(wrong), sorted(set(wrong) - set(caught))


def passes(key: tuple[str, str], part: Any) -> bool:
    try:
        for seed in seeds_of(key):
            check_of(key, seed)(part)
    except Exception:
        return False
    return True


@pytest.mark.parametrize("key", EXERCISES, ids="-".join)
def test_another_seed_gives_another_example_and_the_same_seed_the_same(
    key: tuple[str, str],
) -> None:
    exercise = exercise_of(key)
    texts = [example(exercise, seed) for seed in range(4)]
    assert len(set(texts)) >= 3, texts
    assert texts[0] == example(exercise, 0)
    assert " at 0x" not in texts[0]
    given = set(exercise.statement.split())
    code = [line.strip() for line in source_of(exercise.dotted).splitlines()]
    for line in code:
        assert len(line) < LONGEST_LINE or line not in texts[0] or line in given, line
    varied = varied_of(key[0])[key[1]]
    cases = {shown_inputs(varied, exercise, 1, number) for number in range(varied.num_cases + 1)}
    assert len(cases) >= 2


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_chapter_has_questions_and_answers_in_words(chapter: str) -> None:
    assert len(questions(chapter)) >= 2
    assert written(chapter)
    for each in written(chapter).values():
        assert len(each.rubric) >= 3
        assert all(points > 0 for points in each.rubric.values())
        assert len(each.answer.split()) >= 25
    assert not set(questions(chapter)) & set(written(chapter))
    assert not (set(questions(chapter)) | set(written(chapter))) & set(exercises(chapter))


def question_of(key: tuple[str, str]) -> Question:
    return questions(key[0])[key[1]]


@pytest.mark.parametrize("key", QUESTIONS, ids="-".join)
def test_a_question_has_one_right_answer_by_seed(key: tuple[str, str]) -> None:
    question, name = question_of(key), key[1]
    rights = []
    for seed in range(8):
        right = question.right(seed, name)
        rights.append(right)
        assert question.judge(seed, name, right)[0]
        assert not question.judge(seed, name, None)[0]
        text = question.ask.format(**question.values(seed, name))
        assert "{" not in text.replace("{}", "")
        if question.choices:
            assert right in question.choices
            assert not question.judge(seed, name, "something else")[0]
            wrong = [each for each in question.choices if each != right]
            assert not any(question.judge(seed, name, each)[0] for each in wrong)
        else:
            assert isinstance(right, int | float)
            assert not isinstance(right, bool)
            assert right != 0, "nothing can be nearly zero"
            for factor in (0.5, 2, 1000, 1 / 1024):
                assert not question.judge(seed, name, factor * right)[0], factor
            assert "number" in question.judge(seed, name, "many")[1]
    assert len(set(rights)) >= 2, "a cohort could copy the last one's answer"


@pytest.mark.parametrize("key", QUESTIONS, ids="-".join)
def test_a_question_that_is_read_from_a_figure_has_one(key: tuple[str, str]) -> None:
    question, name = question_of(key), key[1]
    assert (question.kind == "estimate") == (question.figure is None)
    if question.figure is not None:
        drawn = question.figure(**question.values(1, name))
        assert isinstance(drawn, Figure | str)
        if isinstance(drawn, Figure):
            drawn.canvas.draw()


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("x = 3", 3),
        ("x = 2 * 3 + 4 // 3", 7),
        ("y = 1e9\nx = y / 2", 5e8),
        ("x = -2**3", -8),
        ("x = 'memory'", "memory"),
        ("x = None", None),
        ("y = 3", None),
        ("x: int = 3", 3),
        ("%%time\nx = (7\n    % 4)\n!ls", 3),
    ],
)
def test_an_answer_is_arithmetic_or_a_word(source: str, value: object) -> None:
    assert value_in(source, "x") == value


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = open('f')", "must be a number"),
        ("x = [1]", "must be a number"),
        ("x = 9**9**9", "too large"),
        ("x = 1 / 0", "cannot be computed"),
        ("x = 'a' * 10**10", "arithmetic is for numbers"),
        ("x = (", "is no Python"),
        ("x = y", "must be a number"),
        ("x = 9**399 * 9**399", "too large"),
        (f"x = {'+'.join('1' * 3000)}", "is no Python: it is nested deeper than 100 levels"),
        (f"y = 1\nx = {'+'.join('1' * 300)}", "deeper than 100 levels (line 2 of the cell)"),
        ("x = '\ud800'", "one half of a character (line 1 of the cell)"),
    ],
)
def test_an_answer_that_is_anything_else_is_refused(source: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        value_in(source, "x")


@pytest.mark.parametrize("given", [10**350, float("inf"), float("nan")])
def test_a_number_that_is_not_finite_is_no_answer(given: float) -> None:
    question = questions("22")["num_blocks"]
    assert question.judge(1, "num_blocks", given) == (
        False,
        "must be a finite number of at most 1.8e+308.",
    )


def test_a_difference_is_named_with_its_place() -> None:
    import torch

    zeros = torch.zeros(2, 2)
    for found, right, words in [
        ([1, 3], [1, 2], "element 1: got 3; it should be 2"),
        (zeros + 1, zeros, r"4 of 4 numbers differ, first at \[0, 0\]: 1; it should be 0"),
        (zeros[0], zeros, r"got the shape \[2\]; it should be \[2, 2\]"),
        ({"a": 1.5}, {"a": 1.0}, "'a': got 1.5; it should be 1.0"),
        ({"b": 1}, {"a": 1}, "it should be"),
        (None, [1], "got None"),
        (True, 1.0, "got True"),
        (1e9, inf, "got 1000000000.0; it should be inf"),
        (-inf, inf, "got -inf; it should be inf"),
        (inf, 1.0, "got inf; it should be 1.0"),
    ]:
        with pytest.raises(Wrong, match=words):
            expect_same(found, right, "x")
    expect_same((1, 2.0), [1, 2.00001], "x")
    expect_same(float("nan"), float("nan"), "x")
    expect_same(np.float64("inf"), inf, "x")
