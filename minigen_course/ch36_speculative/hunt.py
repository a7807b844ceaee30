"""Bug hunt of chapter 36: a token in the answer that the model never chose."""

import random
from collections.abc import Callable
from typing import Any

from minigen_course.grading.exercise import expect, expect_equal
from minigen_course.grading.hunt import Hunt

NextTokens = Callable[[list[int]], list[int]]
Propose = Callable[[list[int], int], list[int]]
Speculate = Callable[[NextTokens, Propose, list[int], int, int], list[int]]


def speculate(
    next_tokens: NextTokens, propose: Propose, prompt: list[int], num_tokens: int, count: int
) -> list[int]:
    """Return the `num_tokens` tokens that a model writes after a prompt, in fewer steps.

    `next_tokens(token_ids)` is one step of the model. It returns one token per place: number i is
    the model's own next token after `token_ids[: i + 1]`. `propose(token_ids, count)` returns at
    most `count` drafts, right or wrong. The result is the same as without drafts.
    """
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + num_tokens:
        drafts = propose(list(token_ids), count)
        own = next_tokens([*token_ids, *drafts])[-max(len(drafts), 1) :]
        run = drafts[:1]
        for draft, token_id in zip(drafts[1:], own, strict=False):
            if draft != token_id:
                break
            run.append(draft)
        token_ids += [*run, own[max(len(run), 1) - 1]]
    return token_ids[len(prompt) : len(prompt) + num_tokens]


def test_drafts(speculate: Speculate) -> None:
    """Assert what every correct `speculate` does, and the one above does not."""

    def next_tokens(token_ids: list[int]) -> list[int]:
        return [(3 * sum(token_ids[: end + 1]) + end) % 11 for end in range(len(token_ids))]

    def written(token_ids: list[int], count: int, wrong: tuple[int, ...] = ()) -> list[int]:
        text = list(token_ids)
        for place in range(count):
            text.append((next_tokens(text)[-1] + (place in wrong)) % 11)
        return text[len(token_ids) :]

    for num_drafts in range(5):
        for wrong in [(), (0,), (1,), (2,), (3,), (0, 1, 2, 3)]:

            def propose(
                token_ids: list[int],
                count: int,
                num_drafts: int = num_drafts,
                wrong: tuple[int, ...] = wrong,
            ) -> list[int]:
                return written(token_ids, min(num_drafts, count), wrong)

            for num_tokens in range(1, 12):
                found = speculate(next_tokens, propose, [4, 2], num_tokens, 4)
                assert found == written([4, 2], num_tokens)


def _num_right(drafts: list[int], own: list[int]) -> int:
    """Return how many drafts equal the model's own tokens at their places, up to a difference."""
    count = 0
    while count < len(drafts) and drafts[count] == own[count]:
        count += 1
    return count


def _with(take: Callable[[list[int], list[int]], list[int]], *, cut: bool = True) -> Speculate:
    """Return a part that takes the tokens of a step from its drafts and the model's own tokens.

    There is one token of the model more than drafts, beginning with the one at the first draft.
    """

    def part(
        next_tokens: NextTokens, propose: Propose, prompt: list[int], num_tokens: int, count: int
    ) -> list[int]:
        token_ids = list(prompt)
        while len(token_ids) < len(prompt) + num_tokens:
            drafts = propose(list(token_ids), count)
            own = next_tokens([*token_ids, *drafts])[len(token_ids) - 1 :]
            token_ids += take(drafts, own)
        return token_ids[len(prompt) :][: num_tokens if cut else None]

    return part


def _mended(
    next_tokens: NextTokens, propose: Propose, prompt: list[int], num_tokens: int, count: int
) -> list[int]:
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + num_tokens:
        drafts = propose(list(token_ids), count)
        own = next_tokens([*token_ids, *drafts])[-len(drafts) - 1 :]
        run: list[int] = []
        for draft, token_id in zip(drafts, own, strict=False):
            if draft != token_id:
                break
            run.append(draft)
        token_ids += [*run, own[len(run)]]
    return token_ids[len(prompt) : len(prompt) + num_tokens]


# Takes of a step: with `own`, the model's token at the place of each draft, and the one after them.


def _right_ones_alone(drafts: list[int], own: list[int]) -> list[int]:
    return own[: max(_num_right(drafts, own), 1)]


def _last_unverified(drafts: list[int], own: list[int]) -> list[int]:
    num_right = _num_right(drafts[:-1], own)
    if drafts and num_right == len(drafts) - 1:
        return [*drafts, own[-1]]
    return own[: num_right + 1]


def _first_decides(drafts: list[int], own: list[int]) -> list[int]:
    return [*drafts, own[-1]] if _num_right(drafts[:1], own) else own[:1]


def _wrong_ones_left_out(drafts: list[int], own: list[int]) -> list[int]:
    kept = [draft for draft, token_id in zip(drafts, own, strict=False) if draft == token_id]
    return [*kept, own[len(kept)]]


def _token_after_the_wrong_one(drafts: list[int], own: list[int]) -> list[int]:
    num_right = _num_right(drafts, own)
    return [*own[:num_right], own[min(num_right + 1, len(drafts))]]


def _skips_a_token(drafts: list[int], own: list[int]) -> list[int]:
    num_right = _num_right(drafts, own)
    if drafts and num_right == len(drafts):
        return [*own[: num_right - 1], own[num_right]]
    return own[: num_right + 1]


MOST = 40  # places of a random text


class _Model:
    """A model of 7 tokens, whose next token depends on the whole text; it counts its steps."""

    def __init__(self, seed: int):
        self.factors = random.Random(seed).choices(range(1, 7), k=MOST)
        self.num_steps = 0

    def next_tokens(self, token_ids: list[int]) -> list[int]:
        self.num_steps += 1
        return self._after_each(token_ids)

    def written(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Return what the model writes without drafts; this counts no steps."""
        token_ids = list(prompt)
        for _ in range(num_tokens):
            token_ids.append(self._after_each(token_ids)[-1])
        return token_ids[len(prompt) :]

    def _after_each(self, token_ids: list[int]) -> list[int]:
        found, digest = [], 1
        for factor, token_id in zip(self.factors, token_ids, strict=False):
            digest = (digest * 5 + factor * token_id + 1) % 101
            found.append(digest % 7)
        return found


def the_text_is_the_models(part: Any) -> None:
    """texts with drafts of any quality:"""
    for seed in range(40):
        drawn, model = random.Random(seed), _Model(seed)
        quality, count = drawn.choice((0.0, 0.5, 0.8, 1.0)), drawn.randint(1, 5)

        def propose(
            token_ids: list[int],
            count: int,
            drawn: random.Random = drawn,
            model: _Model = model,
            quality: float = quality,
        ) -> list[int]:
            text = list(token_ids)
            for _ in range(drawn.randint(0, count)):
                right = drawn.random() < quality
                text.append(model.written(text, 1)[0] if right else drawn.randrange(7))
            return text[len(token_ids) :]

        prompt = [drawn.randrange(7) for _ in range(drawn.randint(1, 4))]
        num_tokens = drawn.randint(1, 12)
        found = part(model.next_tokens, propose, list(prompt), num_tokens, count)
        right = model.written(prompt, num_tokens)
        what = f"{num_tokens} tokens after {prompt}, drafts per step: at most {count}"
        expect_equal(found, right, what)


def right_drafts_save_steps(part: Any) -> None:
    """drafts that are all right:"""
    for count in (1, 2, 5):
        model = _Model(count)
        found = part(model.next_tokens, model.written, [3, 1], 20, count)
        expect_equal(found, model.written([3, 1], 20), f"20 tokens with {count} right drafts")
        most = -(-20 // count)
        what = f"{model.num_steps} steps for 20 tokens with {count} right drafts per step"
        expect(model.num_steps <= most, f"{what}; it should be {most} or fewer.")


HUNT = Hunt(
    "first_draft",
    speculate,
    test_drafts,
    _mended,
    {
        "one that counts the right drafts first": _with(
            lambda drafts, own: own[: _num_right(drafts, own) + 1]
        ),
        "one that takes no further token after right drafts": _with(_right_ones_alone),
    },
    {
        "does not verify the last draft": _with(_last_unverified),
        "accepts all drafts if the first is right": _with(_first_decides),
        "takes right drafts that come after a wrong one": _with(_wrong_ones_left_out),
        "goes on with the token after the wrong draft": _with(_token_after_the_wrong_one),
        "skips a token where all drafts are right": _with(_skips_a_token),
        "returns more tokens than were asked for": _with(
            lambda drafts, own: own[: _num_right(drafts, own) + 1], cut=False
        ),
    },
    (the_text_is_the_models, right_drafts_save_steps),
    (
        "Speculation must not change a text. So write a small model whose next token depends on "
        "the whole text, let it write without drafts, and compare.",
        "A proposer that is always right shows nothing, and one that is always wrong shows only "
        "the first draft. Make a wrong draft at each place in turn, with right ones before it, and "
        "behind it what the model would write after the wrong one.",
        "Number i of the step's tokens comes after place i of the text. Which number is the "
        "model's own token at the place of the first draft? Try also no drafts at all, and a "
        "number of tokens at which a run of right drafts would end too late.",
    ),
    "**The report.** *With speculation on, most answers are the same as without, and they come "
    "faster. But now and then there is a word in them that does not belong there, and it often "
    "stands where a sentence takes a turn. With a drafter that guesses badly, nearly every answer "
    "is nonsense.* Speculation must not change a text, so a faster answer that is another one "
    "is a bug. The engine lattice had this one with drafts by prompt lookup (issue 243): of its "
    "drafts of a single token, the model never rejected any.",
    minutes=20,
)
