"""Tests and parts that learners might hand in for chapter 36's hunt."""

import random
from collections.abc import Callable
from typing import Any


def next_tokens(token_ids: list[int]) -> list[int]:
    """Return a toy model's next token after each beginning of a text."""
    found, digest = [], 7
    for place, token_id in enumerate(token_ids):
        digest = (digest * 13 + token_id * 5 + place) % 997
        found.append(digest % 10)
    return found


def plain(token_ids: list[int], count: int) -> list[int]:
    text = list(token_ids)
    for _ in range(count):
        text.append(next_tokens(text)[-1])
    return text[len(token_ids) :]


def spoiled(*places: int) -> Callable[[list[int], int], list[int]]:
    """Return a proposer whose drafts are wrong at these places, and consistent behind them."""

    def propose(token_ids: list[int], count: int) -> list[int]:
        text = list(token_ids)
        for place in range(count):
            text.append((plain(text, 1)[0] + (place in places)) % 10)
        return text[len(token_ids) :]

    return propose


# Tests


def every_place_wrong_once(speculate: Any) -> None:
    for count in (1, 2, 4):
        for places in [(), *((place,) for place in range(count)), tuple(range(count))]:
            for length in (1, 5, 9, 10):
                found = speculate(next_tokens, spoiled(*places), [1, 2, 3], length, count)
                assert found == plain([1, 2, 3], length)


def random_drafts(speculate: Any) -> None:
    drawn = random.Random(0)

    def propose(token_ids: list[int], count: int) -> list[int]:
        wrong = [place for place in range(count) if drawn.random() < 0.3]
        return spoiled(*wrong)(token_ids, drawn.randint(0, count))

    for _ in range(60):
        prompt, length = [drawn.randrange(10) for _ in range(3)], drawn.randint(1, 12)
        assert speculate(next_tokens, propose, prompt, length, 4) == plain(prompt, length)


def right_drafts_only(speculate: Any) -> None:
    for length in range(1, 12):
        assert speculate(next_tokens, plain, [1, 2], length, 3) == plain([1, 2], length)


def wrong_drafts_only(speculate: Any) -> None:
    for length in range(1, 12):
        found = speculate(next_tokens, spoiled(0, 1, 2), [1, 2], length, 3)
        assert found == plain([1, 2], length)


def single_drafts(speculate: Any) -> None:
    for length in range(1, 12):
        for places in ((), (0,)):
            found = speculate(next_tokens, spoiled(*places), [1, 2], length, 1)
            assert found == plain([1, 2], length)


def beginnings_only(speculate: Any) -> None:
    for count in (1, 2, 4):
        for places in [(), *((place,) for place in range(count))]:
            found = speculate(next_tokens, spoiled(*places), [1, 2, 3], 9, count)
            assert found[:9] == plain([1, 2, 3], 9)


def lengths_only(speculate: Any) -> None:
    for count in (1, 2, 4):
        assert len(speculate(next_tokens, spoiled(0), [1, 2, 3], 9, count)) == 9


def wants_one_step_for_all(speculate: Any) -> None:
    every_place_wrong_once(speculate)
    steps = 0

    def counted(token_ids: list[int]) -> list[int]:
        nonlocal steps
        steps += 1
        return next_tokens(token_ids)

    speculate(counted, plain, [1, 2], 5, 4)
    assert steps == 1


def wants_the_drafts(speculate: Any) -> None:
    propose = spoiled(1)
    assert speculate(next_tokens, propose, [1, 2], 3, 3) == propose([1, 2], 3)


# Parts


def by_index(model: Any, propose: Any, prompt: list[int], num_tokens: int, count: int) -> Any:
    """Right: keeps the answer apart, and adds token by token."""
    answer: list[int] = []
    while True:
        drafts = propose(prompt + answer, count)
        own = model(prompt + answer + drafts)
        first = len(prompt) + len(answer) - 1
        for place in range(len(drafts) + 1):
            answer.append(own[first + place])
            if len(answer) == num_tokens:
                return answer
            if place < len(drafts) and drafts[place] != answer[-1]:
                break


def one_row_more(model: Any, propose: Any, prompt: list[int], num_tokens: int, count: int) -> Any:
    """Right: asks for fewer drafts at the end, so that nothing must be cut."""
    text, end = list(prompt), len(prompt) + num_tokens
    while len(text) < end:
        drafts = list(propose(list(text), count))[: end - len(text) - 1]
        own = model([*text, *drafts])[len(text) - 1 :]
        while drafts and drafts[0] == own[0]:
            text.append(drafts.pop(0))
            own.pop(0)
        text.append(own[0])
    return text[len(prompt) :]


def ignores_drafts(model: Any, propose: Any, prompt: list[int], num_tokens: int, count: int) -> Any:
    text = list(prompt)
    for _ in range(num_tokens):
        text.append(model(text)[-1])
    return text[len(prompt) :]


def one_step_per_draft(
    model: Any, propose: Any, prompt: list[int], num_tokens: int, count: int
) -> Any:
    text, end = list(prompt), len(prompt) + num_tokens
    while len(text) < end:
        for draft in [*propose(list(text), count), None]:
            text.append(model(list(text))[-1])
            if text[-1] != draft:
                break
    return text[len(prompt) : end]


def wrong_row(model: Any, propose: Any, prompt: list[int], num_tokens: int, count: int) -> Any:
    """Compares the first draft with the token that comes after it."""
    text, end = list(prompt), len(prompt) + num_tokens
    while len(text) < end:
        drafts = propose(list(text), count)
        own = model([*text, *drafts])[-max(len(drafts), 1) :]
        right = 0
        while right < min(len(drafts), len(own) - 1) and drafts[right] == own[right]:
            right += 1
        text += own[: right + 1]
    return text[len(prompt) : end]


def without_the_first(
    model: Any, propose: Any, prompt: list[int], num_tokens: int, count: int
) -> Any:
    """Takes the model's token in place of the first draft, and what follows the draft as well."""
    text, end = list(prompt), len(prompt) + num_tokens
    while len(text) < end:
        drafts = propose(list(text), count)
        own = model([*text, *drafts])[len(text) - 1 :]
        run = own[:1]
        for draft, token_id in zip(drafts[1:], own[1:], strict=False):
            run.append(token_id)
            if draft != token_id:
                break
        text += run
    return text[len(prompt) : end]


def first_alone(model: Any, propose: Any, prompt: list[int], num_tokens: int, count: int) -> Any:
    """Verifies the first draft now, but no longer the others."""
    text, end = list(prompt), len(prompt) + num_tokens
    while len(text) < end:
        drafts = propose(list(text), count)
        own = model([*text, *drafts])[len(text) - 1 :]
        right = bool(drafts) and drafts[0] == own[0]
        text += [*drafts, own[-1]] if right else own[:1]
    return text[len(prompt) : end]
