"""The opening test: seven questions, guessed in chapter 00 and answered again in chapter 52.

Guesses are predictions. They are kept in a file in the notebook's folder, and go nowhere else.
"""

import json
from dataclasses import dataclass
from html import escape
from pathlib import Path

from IPython.display import display

from minigen_course.grading.predict import Prediction

FILE = "opening_test.json"
LETTERS = "abcd"


@dataclass(frozen=True)
class Question:
    """A question with four answers, of which `right` (a letter) is best, and the reason why.

    `chapters` are those that explain it.
    """

    text: str
    answers: tuple[str, str, str, str]
    right: str
    because: str
    chapters: str


QUESTIONS = {
    "first_token": Question(
        "You send a long prompt. Why does the first token of the answer take longer than each "
        "later one?",
        (
            "The first token of an answer is the hardest one to choose.",
            "The whole prompt must be computed before it.",
            "The processor must warm up at every request.",
            "The length of the answer is planned first.",
        ),
        "b",
        "The first token comes from the prefill, which computes all tokens of the prompt; each "
        "later token is one decode step.",
        "17",
    ),
    "second_request": Question(
        "A second request runs beside the first. Why does each step not take twice as long?",
        (
            "Each request gets its own half of the processor.",
            "The second request copies from the first.",
            "Both are computed with half the precision.",
            "The weights are read from memory once, for both.",
        ),
        "d",
        "With few requests, a decode step mostly waits for the weights to arrive from memory, and "
        "one reading serves all requests of the step.",
        "17 and 24",
    ),
    "long_chats": Question(
        "Why do fewer users fit on a card when their chats are longer? The model stays the same.",
        (
            "A longer chat needs more layers.",
            "The texts fill the card's memory.",
            "The engine keeps keys and values of each token, in every layer.",
            "More weights are loaded for a longer chat.",
        ),
        "c",
        "The KV cache grows by the same number of bytes with every token of every user.",
        "17 and 21",
    ),
    "same_beginning": Question(
        "A thousand requests begin with the same page of instructions. How can an engine answer "
        "them with less work than a thousand requests that have nothing in common?",
        (
            "It computes the page once, keeps the result, and shares it.",
            "It leaves the page out, because the model has read it before.",
            "It compresses the page into a few tokens.",
            "It answers them all with one answer.",
        ),
        "a",
        "Keys and values of a token depend only on it and on the tokens before it, so an equal "
        "beginning has equal keys and values.",
        "23",
    ),
    "four_bits": Question(
        "Weights with 4 bits instead of 16 can make one chat several times as fast, although the "
        "model multiplies as many numbers as before. Why?",
        (
            "Three of four weights are left out.",
            "A token takes as long as reading the weights takes, and they have fewer bytes.",
            "Four-bit numbers need no multiplication.",
            "The answers become shorter.",
        ),
        "b",
        "Decoding a single request is limited by the bandwidth of the memory, not by arithmetic.",
        "17 and 34",
    ),
    "two_cards": Question(
        "A model is divided over two cards. Why does a token still take more than half as long as "
        "before?",
        (
            "The cards exchange results in every layer, and wait for each other.",
            "Only one card computes; the other one stores.",
            "Both cards compute the whole model.",
            "The second card is always slower.",
        ),
        "a",
        "Each layer needs two exchanges among the cards, and a message takes time however fast the "
        "cards compute.",
        "41",
    ),
    "good_mean": Question(
        "The mean response time of a server is good, and its users complain. What is the likeliest "
        "reason?",
        (
            "The users compare it with a faster server.",
            "The mean leaves out the prompts.",
            "A few requests take far longer than the mean, and the mean hides them.",
            "A mean is always shorter than what a user sees.",
        ),
        "c",
        "Percentiles show the slow requests: the 99th is what one request in a hundred exceeds.",
        "52",
    ),
}


def ask() -> None:
    """Show the seven questions with their answers, without the solution."""
    blocks = []
    for number, (name, question) in enumerate(QUESTIONS.items(), 1):
        lines = [f"**{number}. `{name}`** {question.text}", ""]
        lines += [
            f"- **{letter}** {text}" for letter, text in zip(LETTERS, question.answers, strict=True)
        ]
        blocks.append("\n".join(lines))
    text = "\n\n".join(blocks)
    display({"text/markdown": text, "text/plain": text}, raw=True)


def keep(folder: Path | None = None, **guesses: str | None) -> None:
    """Keep guesses, a letter or None for each question, in a file in `folder` (here by default).

    With None only, nothing is written. Raises `ValueError` for a name or a letter that does not
    exist.
    """
    given = _checked(guesses)
    if not given:
        print(
            'No guesses yet: write a letter, such as "a", instead of each None, and run this cell.'
        )
        return
    path = (folder or Path()) / FILE
    path.write_text(json.dumps(given, indent=1) + "\n", encoding="utf-8")
    missing = len(QUESTIONS) - len(given)
    rest = f" {missing} to go." if missing else ""
    print(f"{len(given)} guesses are kept in {FILE}, in this notebook's folder.{rest}")


def compare(folder: Path | None = None, **answers: str | None) -> None:
    """Show the guess of chapter 00, the answer of today and, if there is one, the solution.

    Raises `ValueError` for a name or a letter that does not exist.
    """
    now, before = _checked(answers), _kept(folder or Path())
    rows = []
    for name, question in QUESTIONS.items():
        guesses = [Prediction(question.text, found.get(name), 1) for found in (before, now)]
        right = f"{question.right}: {question.answers[LETTERS.index(question.right)]}"
        chapters = "Chapters" if " and " in question.chapters else "Chapter"
        because = f"{question.because} ({chapters} {question.chapters}.)"
        if name not in now:
            right, because = "(answer first)", ""
        rows.append(
            (question.text, *(_mark(each, question.right) for each in guesses), right, because)
        )
    counts = [sum(row[column].endswith("✓") for row in rows) for column in (1, 2)]
    scores = [
        f"{count} of {len(rows)}" if given else "none answered"
        for count, given in zip(counts, (before, now), strict=True)
    ]
    said = f"Right in chapter 00: {scores[0]}; right now: {scores[1]}."
    text = "\n".join([*(" | ".join(row) for row in rows), said])
    heads = ("question", "chapter 00", "now", "best answer", "because")
    table = "".join(_row(row, "td") for row in rows)
    html = f"<table>{_row(heads, 'th')}{table}</table><p>{escape(said)}</p>"
    display({"text/plain": text, "text/html": html}, raw=True)


def _checked(guesses: dict[str, str | None]) -> dict[str, str]:
    """Return the guesses that were made."""
    for name, letter in guesses.items():
        if name not in QUESTIONS:
            raise ValueError(f"There is no question {name}; there are {', '.join(QUESTIONS)}.")
        if letter is not None and letter not in tuple(LETTERS):
            raise ValueError(f"{name} has the answers a, b, c and d, not {letter!r}.")
    return {name: letter for name, letter in guesses.items() if letter is not None}


def _kept(folder: Path) -> dict[str, str]:
    try:
        return _checked(json.loads((folder / FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}


def _mark(guess: Prediction, right: str) -> str:
    if guess.value is None:
        return "–"
    return f"{guess.value} {'✓' if guess.value == right else '✗'}"


def _row(texts: tuple[str, ...], tag: str) -> str:
    cells = [f'<{tag} style="text-align:left">{escape(each)}</{tag}>' for each in texts]
    return f"<tr>{''.join(cells)}</tr>"
