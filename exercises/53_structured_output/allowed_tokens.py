"""Exercise allowed_tokens of chapter 53 (core, 10 points, about 15 minutes).

Walk the trie of the vocabulary and the automaton together, and return the ids of all tokens
that the automaton allows from `state` on. A node of the trie has `children` (a dict from a byte
to a node) and `token_ids`, the tokens that end there. `automaton.moves[state]` is a dict from a
byte to the next state, and a byte without an entry is forbidden. The ids may be in any order.
Never look into a branch that begins with a forbidden byte: the checks count the nodes that you
visit.

Check it:     minigen check exercises/53_structured_output/allowed_tokens.py
With a hint:  minigen check exercises/53_structured_output/allowed_tokens.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import LLM, SamplingParams
    from minigen_course.ch53_structured_output.automaton import AutomatonBackend

    llm = LLM.load(grammar_backend=AutomatonBackend)
    params = SamplingParams(temperature=0, max_tokens=9, structured_outputs={"choice": ["Paris", "Rome"]})
    with using(53, allowed_tokens=mine):
        print(llm.generate("The capital of Italy is", params).text)

Harder: In a state inside of a string, nearly all tokens are allowed, and the walk is slow. Find
out in how many of an automaton's states that is so, and store for each of them only what is
forbidden.
"""

# exercise: minigen_course.ch53_structured_output.automaton.allowed_tokens
from minigen_course.ch53_structured_output.automaton import Automaton, Trie


def allowed_tokens(trie: Trie, automaton: Automaton, state: int) -> list[int]:
    """Return the ids of the tokens all of whose bytes the automaton allows from a state on.

    Walk the trie and the automaton together: a node of the trie is visited only if the automaton
    has a move for every byte on the way to it. The ids may be in any order.
    """
    raise NotImplementedError  # your turn
