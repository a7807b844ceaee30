"""Bug hunt first_draft of chapter 36 (core, 10 points, about 20 minutes).

**The report.** *With speculation on, most answers are the same as without, and they come
faster. But now and then there is a word in them that does not belong there, and it often stands
where a sentence takes a turn. With a drafter that guesses badly, nearly every answer is
nonsense.* Speculation must not change a text, so a faster answer that is another one is a bug.
The engine lattice had this one with drafts by prompt lookup (issue 243): of its drafts of a
single token, the model never rejected any.

Find the mistake in the part below. Catch it with a test that fails on this part and passes on
every correct one. Then mend the part in the same file.

Check both:  minigen check exercises/36_speculative/hunt_first_draft.py
"""

# hunt: minigen_course.ch36_speculative.hunt
from minigen_course.ch36_speculative.hunt import NextTokens, Propose, Speculate


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
    raise NotImplementedError  # your turn
