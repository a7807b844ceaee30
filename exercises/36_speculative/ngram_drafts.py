"""Exercise ngram_drafts of chapter 36 (warm-up, 5 points, about 15 minutes).

Propose drafts by prompt lookup. Take the last `longest` tokens of the text and look for the
same tokens earlier in it; if they never occurred, try one token less, and so on, down to
`shortest`. Of several earlier occurrences the latest one counts, and it must have at least one
token behind it, but it may overlap with the end. Return `count` tokens from behind it. If the
text ends before that, go on from the same place again: after `[7, 8, 7, 8]`, five drafts are
`[7, 8, 7, 8, 7]`. Return an empty list if there is no occurrence. `longest` may be more than
the text has, and an empty text gives no drafts.

Check it:     minigen check exercises/36_speculative/ngram_drafts.py
With a hint:  minigen check exercises/36_speculative/ngram_drafts.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen import LLM, SamplingParams
    from minigen_course.ch36_speculative.reference import TextProposer

    llm = LLM.load(proposer=TextProposer(mine), speculative_config={"num_speculative_tokens": 6})
    text = "Mon, Tue, Wed, Thu, Fri. " * 3 + "Mon,"
    answer = llm.generate(text, SamplingParams(temperature=0, max_tokens=24))
    counts = llm.engine.speculator.counts
    print(f"{answer.text!r}: {counts.accepted} of {counts.drafted} drafts were right")

Harder: Your function looks through the whole text in every step. Keep a dict from every run of
`shortest` to `longest` tokens to the latest place behind it, and extend it by the new tokens
only. How many entries does a text of n tokens need at most?
"""

# exercise: minigen_course.ch36_speculative.reference.ngram_drafts
from collections.abc import Sequence


def ngram_drafts(token_ids: Sequence[int], count: int, shortest: int, longest: int) -> list[int]:
    """Return `count` drafts: the tokens that followed when the last few tokens occurred before.

    The longest end of the text that occurs before decides, of `longest` down to `shortest` tokens,
    and its latest occurrence with a token behind it. Where the text ends before there are `count`
    tokens, the drafts go on from that place again. Without such an occurrence there are none.
    """
    raise NotImplementedError  # your turn
