"""Exercise StateMatcher of chapter 53 (core, 10 points, about 20 minutes).

Write the matcher that follows one answer. `masks[state]` is an array with one bool per token of
the vocabulary, and all answers share it, so copy it before you change it.
`masks.automaton.ends` are the states in which the answer may end,
`masks.automaton.after(some_bytes, state)` follows bytes, `masks.spellings[token_id]` are a
token's bytes, `masks.end_ids` the end tokens (they have no spelling). `accept` raises
GrammarError for a token that is not allowed. `roll_back(count)` undoes the last tokens; none,
if count is 0. `fork` returns a matcher for another answer of the same form: what one accepts
must not move the other.

Check it:     minigen check exercises/53_structured_output/state_matcher.py
With a hint:  minigen check exercises/53_structured_output/state_matcher.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import LLM, SamplingParams
    from minigen_course.ch53_structured_output.automaton import AutomatonBackend

    llm = LLM.load(grammar_backend=AutomatonBackend)
    params = SamplingParams(n=3, seed=1, max_tokens=9, structured_outputs={"regex": "[a-z]{4,9}"})
    with using(53, StateMatcher=mine):
        print([each.text for each in llm.generate("My password is", params, progress=False).choices])

Harder: An answer of a thousand tokens keeps a thousand states, and each of its forks copies
them. Keep only as many as a roll back can need, when speculation takes back at most eight
tokens, and raise an error beyond that.
"""

# exercise: minigen_course.ch53_structured_output.automaton.StateMatcher
import numpy as np
from jaxtyping import Bool

from minigen.errors import GrammarError
from minigen_course.ch53_structured_output.automaton import Masks


class StateMatcher:
    """Follows one answer through an automaton, as the engine's `TokenMatcher`.

    `masks.automaton` is the automaton, `masks[state]` the tokens that may come next in a state (a
    fresh copy is needed before a change), `masks.spellings[token_id]` a token's bytes, and
    `masks.end_ids` the end tokens.
    """

    def __init__(self, masks: Masks):
        raise NotImplementedError  # your turn

    def allowed(self) -> Bool[np.ndarray, " vocab"]:
        """Return whether each token may come next; an end token only where the answer may end."""
        raise NotImplementedError  # your turn

    def accept(self, token_id: int) -> None:
        """Follow the answer by one token; an end token changes no state, but counts as a token.

        Raises `GrammarError`, and changes nothing, if the token is not allowed.
        """
        raise NotImplementedError  # your turn

    def roll_back(self, count: int) -> None:
        """Go back by `count` tokens, as if they had not been accepted."""
        raise NotImplementedError  # your turn

    def fork(self) -> "StateMatcher":
        """Return a copy that continues from the same place, for another answer."""
        raise NotImplementedError  # your turn
