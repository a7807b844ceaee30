"""Questions on chapter 53 that need no code."""

from random import Random
from typing import Any

from matplotlib.figure import Figure

from minigen_course.ch53_structured_output.automaton import automaton_of, parse
from minigen_course.ch53_structured_output.figures import state_diagram
from minigen_course.grading.question import Question, Written


def _retries(random: Random) -> dict[str, Any]:
    return {
        "percent": random.choice((20, 25, 40, 50, 80)),
        "tokens": random.choice((40, 60, 100, 150)),
        "answers": random.choice((1_000, 2_000, 5_000)),
    }


def _tokens_of_retries(percent: int, tokens: int, answers: int) -> float:
    return answers * tokens * 100 / percent


def _diagram(random: Random) -> dict[str, Any]:
    return {
        "pattern": random.choice(
            ("a(b|cd)*e", "(ab|ac)d?", "a?b?c", "x(yz)*", "(a|bb)*c", "ab(c|d)?e?")
        )
    }


def _allowed_in_ends(pattern: str) -> float:
    return float(len(automaton_of(parse(pattern)).ends))


def _drawn(pattern: str) -> Figure:
    """Draw the automaton with every state alike, so that the regex must be followed."""
    return state_diagram(automaton_of(parse(pattern)))


QUESTIONS = {
    "cost_of_retries": Question(
        "estimate",
        "A client asks again until the JSON parses. A try costs {tokens} tokens and succeeds with "
        "a probability of {percent} %, independently. How many tokens do {answers} valid answers "
        "cost, on average?",
        "tokens of a try, probability, number of answers",
        _retries,
        _tokens_of_retries,
        "The expected number of tries is one over the probability, 100 / {percent}.",
        within=1.02,
    ),
    "ends": Question(
        "reading",
        "The figure shows the automaton of `{pattern}`. In how many of its states may the end "
        "token come next?",
        "the regex",
        _diagram,
        _allowed_in_ends,
        "The end token is legal exactly in the states with two circles.",
        within=1.0,
        figure=_drawn,
    ),
}

WRITTEN = {
    "what_is_guaranteed": Written(
        "A colleague says: since we use a JSON schema as a grammar, the model's answers are always "
        "valid and we can trust them. Name two things that are wrong with this, and say what the "
        "program that reads the answers must still check.",
        "An answer that is cut off by the limit of tokens is the beginning of a valid text, and "
        "no valid JSON: the program must look at the finish reason. And the grammar decides "
        "about the form only. A wrong quantity, a tool that does not fit or an invented name are "
        "perfectly valid, so values must be checked against what is known, for instance that a "
        "product exists. Also, keywords of the schema that the engine does not enforce are not "
        "guaranteed, so the answer should be validated once more.",
        {
            "answers cut off by the limit are not valid, and the finish reason tells": 4,
            "the form is guaranteed, and the content is not, with an example": 4,
            "the program checks the finish reason and the values": 2,
        },
    ),
}
