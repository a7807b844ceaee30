"""Stop strings end an answer at the same place, however its text is divided into pieces."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minigen.tokenizer.stop_strings import StopWatcher

# Two letters, so that stop strings occur, overlap, and restart within themselves.
PIECES = st.lists(st.text("ab", max_size=5), max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)
always = settings(max_examples=400, deadline=None, derandomize=True)


def cut(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """Return the text before the stop string that completes first; of several, the longest."""
    for end in range(len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            return text[: end if include else end - max(map(len, completed))], True
    return text, False


def longest_beginning(text: str, stops: list[str]) -> int:
    """Return how many characters at the text's end may still become a stop string."""
    return max(
        length
        for length in range(len(text) + 1)
        if length == 0
        or any(stop.startswith(text[-length:]) and len(stop) > length for stop in stops)
    )


@always
@given(pieces=PIECES, stops=STOPS, include=st.booleans())
@example(pieces=["abc", "d"], stops=["abcd", "bc"], include=False)
@example(pieces=["abcd"], stops=["abcd", "bc"], include=False)
@example(pieces=["aab"], stops=["ab", "aab"], include=False)
def test_pieces_together_give_the_text_up_to_the_first_stop(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    watcher = StopWatcher(stops, include)
    shown = "".join(watcher.push(piece) for piece in pieces) + watcher.finish()
    assert (shown, watcher.stopped) == cut("".join(pieces), stops, include)


@always
@given(pieces=PIECES, stops=STOPS)
def test_no_more_is_held_back_than_may_become_a_stop_string(
    pieces: list[str], stops: list[str]
) -> None:
    watcher, text, shown = StopWatcher(stops), "", ""
    for piece in pieces:
        text += piece
        shown += watcher.push(piece)
        if watcher.stopped:
            break
        assert shown == text[: len(text) - longest_beginning(text, stops)]


@always
@given(pieces=PIECES, stops=STOPS)
def test_nothing_is_held_back_where_the_stop_string_is_shown_too(
    pieces: list[str], stops: list[str]
) -> None:
    watcher = StopWatcher(stops, include=True)
    text = ""
    for piece in pieces:
        shown = watcher.push(piece)
        if watcher.stopped:
            break
        assert shown == piece
        text += piece
    if not watcher.stopped:
        assert watcher.finish() == ""


@always
@given(pieces=PIECES, stops=STOPS)
def test_no_part_of_a_stop_string_is_ever_shown(pieces: list[str], stops: list[str]) -> None:
    final, _ = cut("".join(pieces), stops, include=False)
    watcher, shown = StopWatcher(stops), ""
    for piece in pieces:
        shown += watcher.push(piece)
        assert final.startswith(shown)


@pytest.mark.parametrize("pieces", [["abcd"], ["abc", "d"], ["a", "bcd"], list("abcd")])
def test_the_stop_string_that_is_complete_first_wins_however_the_text_is_cut(
    pieces: list[str],
) -> None:
    watcher = StopWatcher(["abcd", "bc"])
    assert "".join(map(watcher.push, pieces)) == "a"


def test_of_stop_strings_that_end_together_the_longest_is_taken_off() -> None:
    assert StopWatcher(["bc", "abc"]).push("xabcy") == "x"
    assert StopWatcher(["abc", "bc"], include=True).push("xabcy") == "xabc"


def test_nothing_more_comes_after_a_stop() -> None:
    watcher = StopWatcher(["."])
    assert watcher.push("One. Two.") == "One"
    assert watcher.stopped
    assert (watcher.push(" Three."), watcher.finish()) == ("", "")


def test_an_incomplete_stop_string_is_shown_at_the_end_and_only_once() -> None:
    watcher = StopWatcher(["</s>"])
    assert [watcher.push(piece) for piece in ("a<", "/", "b</")] == ["a", "", "</b"]
    assert (watcher.finish(), watcher.finish()) == ("</", "")
    assert not watcher.stopped


def test_without_stop_strings_everything_goes_through() -> None:
    watcher = StopWatcher([])
    assert (watcher.push("any"), watcher.push(""), watcher.finish()) == ("any", "", "")
    assert not watcher.stopped
