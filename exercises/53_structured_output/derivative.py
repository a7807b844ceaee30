"""Exercise derivative of chapter 53 (core, 10 points, about 20 minutes).

Write Brzozowski's derivative of a regex by a byte: the regex of what may still follow once that
byte was read. A regex is one of four classes: `Bytes` with the set `choices`, `Then` with the
tuple `parts`, `Either` with the set `options`, `Star` with `inner`. Build your result with
`then(...)`, `either(...)` and `star(...)`, which simplify it, and with the constants EMPTY
(matches the empty text only) and NOTHING (matches no text).

Check it:     minigen check exercises/53_structured_output/derivative.py
With a hint:  minigen check exercises/53_structured_output/derivative.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import LLM, SamplingParams
    from minigen_course.ch53_structured_output.automaton import AutomatonBackend

    llm = LLM.load(grammar_backend=AutomatonBackend)
    params = SamplingParams(temperature=0, max_tokens=9, structured_outputs={"regex": "[0-9]{2}-[0-9]{2}"})
    with using(53, derivative=mine):
        print(llm.generate("The date is", params).text)

Harder: Brzozowski's regexes also have "and" and "not", whose derivatives are one line each. Add
a class for "not", and build the texts that have three letters and are not "yes". Which of the
simplifications does the walk over the trie need, so that a branch still counts as dead?
"""

# exercise: minigen_course.ch53_structured_output.automaton.derivative
from minigen_course.ch53_structured_output.automaton import (
    EMPTY,
    NOTHING,
    Bytes,
    Either,
    Regex,
    Star,
    Then,
    either,
    may_end,
    star,
    then,
)


def derivative(regex: Regex, byte: int) -> Regex:
    """Return the regex of what may follow `byte`: what remains after it of each match.

    A regex is `Bytes` (`choices`), `Then` (`parts`), `Either` (`options`) or `Star` (`inner`).
    Build the result with `then`, `either` and `star`, which simplify it; NOTHING matches no text,
    and EMPTY the empty one. `may_end` says whether a regex matches the empty text.
    """
    raise NotImplementedError  # your turn
