"""Exercise forced_text of chapter 53 (core, 10 points, about 10 minutes).

Return the bytes that must come next, from a state on: go on as long as the automaton leaves
exactly one byte, and stop where there is a choice. A state in which the text may end is a
choice as well, between an end and going on. `automaton.moves[state]` is a dict from a byte to
the next state, and `automaton.ends` are the states in which a text may end.

Check it:     minigen check exercises/53_structured_output/forced_text.py
With a hint:  minigen check exercises/53_structured_output/forced_text.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen_course.ch53_structured_output import automaton, lesson

    form = automaton.automaton_of(automaton.parse(lesson.pattern_of_schema(lesson.SCHEMA)))
    print(mine(form, 0), mine(form, form.after(b'{"drink": "tea"')))

Harder: Count, for one of the chapter's answers, how many steps of the model forced text saves
if each run of it goes through the model in one step, as a prompt does. Speculative decoding
verifies such guesses in one step.
"""

# exercise: minigen_course.ch53_structured_output.lesson.forced_text
from minigen_course.ch53_structured_output.automaton import Automaton


def forced_text(automaton: Automaton, state: int) -> bytes:
    """Return the bytes that must come next: the longest run in which there is never a choice.

    A state in which the text may end is a choice, between an end and going on.
    """
    raise NotImplementedError  # your turn
