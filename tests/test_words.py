"""The project's prose is plain English: old-fashioned words of a short list occur nowhere.

Files are read as text, so docstrings, comments, strings and identifiers are all covered;
identifiers are split at underscores and capitals. notebooks' prose is not held to this list yet.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WORDS = ["whoever", "nobody", "somebody", "told", "heed", "begun", "anew", "lent"]
PHRASES = ["so many", "let go"]
ENDINGS = r"(?:s|ed|ing)?"  # nobodys, heeded, heeding
FORBIDDEN = re.compile(
    rf"\b(?:(?:{'|'.join(WORDS)}){ENDINGS}|{'|'.join(PHRASES).replace(' ', ' +')})\b", re.I
)
PLACES = {
    **{folder: ["**/*.py"] for folder in ("minigen", "tools", "benchmarks")},
    "minigen_course": ["**/*.py", "*/exercises.toml"],
    "tests": ["**/*.py"],
    "docs": ["**/*.md"],
    ".": ["*.md", "Makefile", "pyproject.toml", "mkdocs.yml", ".pre-commit-config.yaml"],
}
LEFT_OUT = ("tests/test_words.py", "minigen_course/lab/texts")  # this list, and quoted texts
COPIED = "a prompt whose answers were measured; another text would need new measurements"
EXCEPTIONS = {  # quoted data that stays, by file, with the reason
    "benchmarks/questions.py": {
        "Nobody knew where the small wooden boat had come from.": COPIED,
        "The letter was written in a language nobody could read.": COPIED,
    },
}


def forbidden_words(text: str, quoted: Iterable[str] = ()) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each forbidden word, also of a phrase that spans two lines."""
    for each in quoted:
        text = text.replace(each, "")
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text).replace("_", " ")
    joined = re.sub(r"\n[ #]*", lambda gap: " " * len(gap[0]), words)
    for found in FORBIDDEN.finditer(joined):
        yield words.count("\n", 0, found.start()) + 1, " ".join(found[0].split())


@pytest.mark.parametrize("place", PLACES)
def test_the_project_uses_no_forbidden_word(place: str) -> None:
    found = []
    for path in sorted(path for pattern in PLACES[place] for path in (ROOT / place).glob(pattern)):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        if not name.startswith(LEFT_OUT):
            words = forbidden_words(text, EXCEPTIONS.get(name, ()))
            found += [f"{name}:{line}: {word!r}" for line, word in words]
    assert not found, "\n".join(["forbidden words (see tests/test_words.py):", *found])


def test_every_exception_is_still_needed() -> None:
    for name, quoted in EXCEPTIONS.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert all(each in text for each in quoted), name


@pytest.mark.parametrize("word", [*WORDS, *PHRASES])
def test_a_forbidden_word_is_found_in_prose_and_names(word: str) -> None:
    name = word.replace(" ", "_")
    for sentence in (f"# A reader {word} knows.", f"def is_{name}_known(): ...", f"{name}_x = 1"):
        assert list(forbidden_words(f"first\n{sentence}\n")) == [(2, word)]
    in_class = "".join(part.title() for part in word.split())
    assert [found.lower() for _, found in forbidden_words(f"class Is{in_class}Known:")] == [word]


def test_a_phrase_over_two_lines_is_found_and_longer_words_are_not() -> None:
    assert list(forbidden_words("    # It has so\n    # many.")) == [(1, "so many")]
    assert not list(forbidden_words("an equivalent, excellent, silent renewal; also many"))
