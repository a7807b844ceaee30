"""The exercises of chapter 16: right solutions pass, wrong ones are told what is wrong."""

import ast
import inspect
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from minigen import sampling
from minigen.teach.checking import check, judge
from minigen.teach.exercises import exercises
from minigen.teach.judge import verdict_on

CHAPTER = exercises("16")


def stub(*_: Any) -> Any:
    raise NotImplementedError


def top_p_by_sorting(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Right, and not as the package does it."""
    probabilities, ids = logits.double().softmax(-1).sort(descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities
    kept = before < top_p.unsqueeze(-1) - 1e-9
    kept[:, 0] = True
    mask = torch.zeros_like(kept).scatter(-1, ids, kept)
    return logits.masked_fill(~mask, -math.inf)


def top_p_by_rows(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Right, and slow."""
    out = torch.full_like(logits, -math.inf)
    for row in range(len(logits)):
        probabilities = logits[row].double().softmax(-1).tolist()
        mass = 0.0
        for token in sorted(range(len(probabilities)), key=lambda each: -probabilities[each]):
            out[row, token] = logits[row, token]
            mass += probabilities[token]
            if mass >= float(top_p[row]) - 1e-9:
                break
    return out


def wrong_top_p(name: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def part(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        descending = name != "ascending"
        probabilities = logits.double().softmax(-1)
        if name == "softmax over rows":
            probabilities = logits.double().softmax(0)
        ordered, ids = probabilities.sort(descending=descending, stable=True)
        mass = ordered.cumsum(-1)
        limit = top_p.unsqueeze(-1)
        if name == "rows mixed":
            limit = top_p[0]
        kept = (mass - ordered) < limit - 1e-9
        if name == "without the one that crosses":
            kept = mass < limit
        if name == "one too many":
            kept = kept.roll(1, -1)
            kept[:, 0] = True
        if name == "one more than reaches":
            kept = (mass - ordered) <= limit + 1e-9
        if name == "not brought back":
            return logits.masked_fill(~kept, -math.inf)
        mask = torch.zeros_like(kept).scatter(-1, ids, kept)
        if name == "last of equals":
            mask = torch.zeros_like(kept).scatter(-1, ids.flip(-1), kept)
        if name == "zeros for dropped":
            return logits.masked_fill(~mask, 0.0)
        if name == "probabilities":
            return probabilities.float().masked_fill(~mask, -math.inf)
        if name == "in place":
            return logits.masked_fill_(~mask, -math.inf)
        if name == "one row":
            return logits.masked_fill(~mask, -math.inf)[0]
        return logits.masked_fill(~mask, -math.inf)

    return part


WRONG_TOP_P = [
    *("ascending", "softmax over rows", "rows mixed", "without the one that crosses"),
    *("one too many", "one more than reaches", "not brought back", "last of equals"),
    *("zeros for dropped", "probabilities", "in place", "one row"),
]


def penalties_written_out(
    logits: torch.Tensor,
    in_prompt: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Right, and one number at a time."""
    out = logits.clone()
    for row in range(len(logits)):
        for token in range(logits.shape[1]):
            count = float(output_counts[row, token])
            if count or in_prompt[row, token]:
                value, factor = float(out[row, token]), float(repetition[row])
                out[row, token] = value / factor if value > 0 else value * factor
            out[row, token] -= count * float(frequency[row]) + (count > 0) * float(presence[row])
    return out


def wrong_penalties(name: str) -> Callable[..., torch.Tensor]:
    def part(logits: Any, in_prompt: Any, counts: Any, *given: Any) -> Any:
        repetition, presence, frequency = (each.unsqueeze(-1) for each in given)
        was_there = in_prompt | (counts > 0)
        if name == "output only":
            was_there = counts > 0
        if name == "prompt only":
            was_there = in_prompt
        if name == "everywhere":
            was_there = torch.ones_like(in_prompt)
        if name == "rows mixed":
            repetition = repetition[:1]
        factor = torch.where(was_there, repetition, 1.0)
        divided = torch.where(logits > 0, logits / factor, logits * factor)
        if name == "divides negatives":
            divided = logits / factor
        if name == "multiplies":
            divided = torch.where(logits > 0, logits * factor, logits / factor)
        present = was_there if name == "presence in prompt" else counts > 0
        if name == "presence counted":
            present = counts
        often = (counts > 0) if name == "frequency once" else counts
        taken = frequency * often + presence * present
        if name == "added":
            return divided + taken
        if name == "repetition last":
            late = logits - taken
            return torch.where(late > 0, late / factor, late * factor)
        return divided - taken

    return part


WRONG_PENALTIES = [
    *("output only", "prompt only", "everywhere", "rows mixed", "divides negatives"),
    *("multiplies", "presence in prompt", "presence counted", "frequency once", "added"),
    "repetition last",
]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("keep_top_p", top_p_by_sorting),
        ("keep_top_p", top_p_by_rows),
        ("keep_top_p", wrong_top_p("nothing")),
        ("apply_penalties", penalties_written_out),
        ("apply_penalties", wrong_penalties("nothing")),
        *((name, each.solution) for name, each in CHAPTER.items()),
    ],
)
def test_right_solutions_pass_however_they_are_written(name: str, part: Any) -> None:
    passed, message = verdict_on(CHAPTER[name], part)
    assert passed, message


@pytest.mark.parametrize(
    ("name", "part"),
    [
        *(("keep_top_p", wrong_top_p(each)) for each in WRONG_TOP_P),
        *(("apply_penalties", wrong_penalties(each)) for each in WRONG_PENALTIES),
    ],
    ids=[*WRONG_TOP_P, *WRONG_PENALTIES],
)
def test_wrong_solutions_are_told_what_is_wrong(name: str, part: Any) -> None:
    passed, message = verdict_on(CHAPTER[name], part)
    assert not passed
    assert message.startswith("check ")
    assert "should be" in message or "return" in message


@pytest.mark.parametrize("name", CHAPTER)
def test_an_untouched_stub_fails_kindly(name: str) -> None:
    passed, message = verdict_on(CHAPTER[name], stub)
    assert not passed
    assert "still empty" in message


COMPARISONS = {ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.Eq: ast.NotEq}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}


class Mutation(ast.NodeTransformer):
    """Changes the comparison or operator whose number is `target`."""

    def __init__(self, target: int):
        self.target, self.seen = target, 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            node.ops[0] = self._exchange(node.ops[0], COMPARISONS)
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            node.op = self._exchange(node.op, OPERATORS)
        return node

    def _exchange(self, operator: Any, others: dict[Any, Any]) -> Any:
        self.seen += 1
        return others[type(operator)]() if self.seen - 1 == self.target else operator


@pytest.mark.parametrize("target", range(8))
def test_mutants_of_the_packages_penalties_are_caught(target: int) -> None:
    tree = ast.parse(inspect.getsource(sampling.apply_penalties))
    mutation = Mutation(target)
    mutant = ast.fix_missing_locations(mutation.visit(tree))
    assert mutation.seen == 8, "every comparison and operator has its mutant"
    names = dict(vars(sampling))
    exec(compile(mutant, "mutant", "exec"), names)
    passed, _ = verdict_on(CHAPTER["apply_penalties"], names["apply_penalties"])
    assert not passed, ast.unparse(mutant)


def loops(*_: Any) -> Any:
    while True:
        pass


def kills_python(*_: Any) -> Any:
    os._exit(0)


def leaves(*_: Any) -> Any:
    sys.exit(0)


def stumbles(*_: Any) -> Any:
    return {}["nothing"]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (loops, "did not finish within 8 s"),
        (kills_python, "ended Python"),
        (leaves, "ended Python"),
        (stumbles, "raised KeyError"),
    ],
)
def test_no_part_takes_the_check_down_or_passes_by_dying(part: Any, words: str) -> None:
    result = judge("16", CHAPTER["keep_top_p"], part, seconds=8)
    assert not result.passed
    assert words in result.message


def test_check_prints_what_passed_and_hints_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    check(16, keep_top_p=top_p_by_sorting)
    assert capsys.readouterr().out == "✓ keep_top_p: all 6 checks passed.\n"
    check(16, hint=1, keep_top_p=wrong_top_p("rows mixed"))
    printed = capsys.readouterr().out
    assert printed.startswith("✗ keep_top_p: check 4 of 6")
    assert "hint 1: Sort each row's" in printed
    assert "hint=2 tells more" in printed


@pytest.mark.parametrize(
    ("chapter", "parts", "words"),
    [
        (16, {}, "Name what is to be checked"),
        (16, {"keep_top_q": stub}, "has no keep_top_q; it has keep_top_p"),
        (99, {"keep_top_p": stub}, "Chapter 99 has no exercises"),
    ],
)
def test_what_cannot_be_checked_is_refused(chapter: int, parts: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(chapter, **parts)
