"""The progress bar of many answers: finished answers and tokens per second, on stderr alone."""

import re
import time
from contextlib import suppress
from io import StringIO

import pytest
from rich.console import Console

from minigen import LLM, SamplingParams
from minigen.outputs import TokenDelta
from minigen.progress import answering

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def plain(text: str) -> str:
    """Return text as it is read, without cursor movements and colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def terminal() -> Console:
    return Console(file=StringIO(), force_terminal=True, width=100)


def written(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return plain(console.file.getvalue())


def test_on_request_it_shows_answers_and_tokens_per_second_on_stderr(
    tiny_llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = tiny_llm.generate(["a", "b", "c"], GREEDY, progress=True)
    assert [len(output.token_ids) for output in outputs] == [5, 5, 5]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "3/3" in plain(shown.err)
    assert re.search(r"[\d,]+ tokens/s", plain(shown.err))


def test_by_default_it_shows_nothing_if_stderr_is_not_a_terminal(
    tiny_llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_llm.generate(["a", "b", "c"], GREEDY)
    tiny_llm.generate(["a", "b", "c"], GREEDY, progress=False)
    assert capsys.readouterr() == ("", "")


def test_by_default_one_answer_has_no_bar(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("minigen.progress.PATIENCE", 0.0)
    tiny_llm.generate("a", GREEDY)
    tiny_llm.generate(["a"], GREEDY)
    assert capsys.readouterr() == ("", "")
    tiny_llm.generate(["a", "b"], GREEDY)
    assert "2/2" in plain(capsys.readouterr().err)


def test_it_counts_finished_answers() -> None:
    console = terminal()
    with answering(2, always=True, console=console) as push:
        push(TokenDelta(0, 0, "a", 1))
        push(TokenDelta(0, 0, "b", 2, "length"))
        push(TokenDelta(1, 0, "c", 3))
    assert "1/2" in written(console)
    assert "2/2" not in written(console)


def test_a_quick_generation_shows_no_bar() -> None:
    console = terminal()
    with answering(2, console=console) as push:
        push(TokenDelta(0, 0, "a", 1, "stop"))
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]


def test_a_slow_generation_shows_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minigen.progress.PATIENCE", 0.01)
    console = terminal()
    with answering(2, console=console) as push:
        time.sleep(0.02)
        push(TokenDelta(0, 0, "a", 1, "stop"))
    assert "1/2" in written(console)


def test_the_bar_ends_when_generation_fails() -> None:
    console = terminal()
    with suppress(ZeroDivisionError), answering(2, True, console) as push:
        push(TokenDelta(0, 0, "a", 1))
        raise ZeroDivisionError
    assert console.file.getvalue().endswith("\x1b[?25h")  # type: ignore[attr-defined]
