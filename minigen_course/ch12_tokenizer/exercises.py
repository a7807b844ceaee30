"""Checks of chapter 12: text that comes token by token, and stop strings."""

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

from minigen_course.ch12_tokenizer import bpe_checks
from minigen_course.grading.exercise import expect, expect_equal
from minigen_course.lab.texts import HARD_UNICODE

SPECIAL = 999
RESULTS = "the results of push, then of finish"


def _decoder(
    part: Any, tokens: Sequence[bytes], skipped: Collection[int] = (), drop_space: bool = False
) -> Any:
    """Return a decoder whose ids 0, 1, 2, ... stand for these bytes."""
    known = dict(enumerate(tokens)) | {SPECIAL: b"<|end|>"}
    return part(known.__getitem__, skipped=skipped, drop_space=drop_space)


def _pushed(part: Any, tokens: Sequence[bytes], drop_space: bool = False) -> list[str]:
    """Return what `push` returns for each token, then what `finish` returns."""
    decoder = _decoder(part, tokens, drop_space=drop_space)
    found = [decoder.push(token_id) for token_id in range(len(tokens))]
    return [*found, decoder.finish()]


def _cut(text: str, size: int) -> list[bytes]:
    raw = text.encode()
    return [raw[start : start + size] for start in range(0, len(raw), size)]


def whole_characters_are_given_at_once(part: Any) -> None:
    """tokens of whole characters:"""
    tokens = [b"Why", b" is", b"", " 你好".encode(), b"?"]
    expect_equal(_pushed(part, tokens), ["Why", " is", "", " 你好", "?", ""], RESULTS)
    found = _pushed(part, ["\ufffd".encode(), b"!"])
    expect_equal(found, ["\ufffd", "!", ""], f"for a token that is U+FFFD itself, {RESULTS}")


def half_a_character_is_held_back(part: Any) -> None:
    """characters that are split between tokens:"""
    for tokens, right in (
        ([b"caf\xc3", b"\xa9!"], ["caf", "é!", ""]),
        ([b"\xe4", b"\xbd", b"\xa0"], ["", "", "你", ""]),
        ([b"\xf0\x9f", b"\x8d", b"\x8e."], ["", "", "🍎.", ""]),
        ([b"a\xe4\xbd", b"\xa0\xe5", b"\xa5\xbdb"], ["a", "你", "好b", ""]),
    ):
        expect_equal(_pushed(part, tokens), right, f"for {tokens}, {RESULTS}")


def pieces_add_up_to_the_text(part: Any) -> None:
    """difficult Unicode, in tokens of 1, 2, 3 and 5 bytes:"""
    for text in HARD_UNICODE:
        for size in (1, 2, 3, 5):
            found = "".join(_pushed(part, _cut(text, size)))
            expect_equal(found, text, f"in tokens of {size} bytes, the whole text")


def broken_bytes_become_the_replacement_character(part: Any) -> None:
    """bytes that are not valid UTF-8:"""
    for tokens, right in (
        ([b"a\xff", b"b"], ["a\ufffd", "b", ""]),
        ([b"\xe4\xbd", b"x"], ["", "\ufffdx", ""]),
        ([b"\xa0", b"\xc3\xa9"], ["\ufffd", "é", ""]),
    ):
        expect_equal(_pushed(part, tokens), right, f"for {tokens}, {RESULTS}")


def finish_gives_what_stayed_incomplete(part: Any) -> None:
    """an answer that ends within a character:"""
    found = _pushed(part, [b"ok", b"\xf0\x9f", b"\x8d"])
    expect_equal(found, ["ok", "", "", "\ufffd"], RESULTS)


def skipped_ids_give_no_text(part: Any) -> None:
    """a special token that is skipped, even within a character:"""
    decoder = _decoder(part, [b"\xe4\xbd", b"\xa0"], skipped={SPECIAL})
    found = [decoder.push(token_id) for token_id in (0, SPECIAL, 1, SPECIAL)]
    expect_equal([*found, decoder.finish()], ["", "", "你", "", ""], RESULTS)
    decoder = _decoder(part, [b"a"])
    expect_equal(
        decoder.push(SPECIAL), "<|end|>", "the text of a special token that is not in `skipped`"
    )


def one_leading_space_is_dropped_if_asked(part: Any) -> None:
    """drop_space, which removes one leading space of the text:"""
    for tokens, right in (
        ([b" I", b" am", b"  here"], ["I", " am", "  here", ""]),
        ([b"  I"], [" I", ""]),
        ([b"I", b" am"], ["I", " am", ""]),
        ([b"", b" I", b" am"], ["", "I", " am", ""]),
        ([b"\xe4\xbd", b"\xa0", b" a"], ["", "你", " a", ""]),
    ):
        found = _pushed(part, tokens, drop_space=True)
        expect_equal(found, right, f"for {tokens} with drop_space, {RESULTS}")
    expect_equal(_pushed(part, [b" I"]), [" I", ""], f"without drop_space, {RESULTS}")


def two_decoders_do_not_share_what_they_hold(part: Any) -> None:
    """two answers that are streamed at the same time:"""
    one, two = (_decoder(part, [b"\xe4\xbd", b"\xa0", b"b"]) for _ in range(2))
    found = [one.push(0), two.push(2), one.push(1), two.finish()]
    expect_equal(found, ["", "b", "你", ""], "the results of the two in turn")


def _watched(part: Any, stops: Sequence[str], pieces: Sequence[str], include: bool = False) -> Any:
    """Return what `push` returns for each piece, then what `finish` returns, then `stopped`."""
    watcher = part(stops, include)
    found = [watcher.push(piece) for piece in pieces]
    return [*found, watcher.finish(), watcher.stopped]


WHAT = f"{RESULTS}, then `stopped`"


def _expect_watched(
    part: Any, stops: list[str], pieces: list[str], right: list[Any], include: bool = False
) -> None:
    said = f"stops {stops}, text {pieces}{', include=True' if include else ''}: {WHAT}"
    expect_equal(_watched(part, stops, pieces, include), right, said)


def text_without_a_stop_passes_at_once(part: Any) -> None:
    """text without a stop string:"""
    _expect_watched(part, ["END"], ["one", " two", ""], ["one", " two", "", "", False])
    _expect_watched(part, [], ["one", "two"], ["one", "two", "", False])


def text_ends_before_the_stop(part: Any) -> None:
    """a stop string within a piece, which ends the text:"""
    _expect_watched(part, ["END"], ["one END two", "three"], ["one ", "", "", True])
    _expect_watched(part, ["END"], ["END"], ["", "", True])
    _expect_watched(part, ["\n"], ["one", "\ntwo"], ["one", "", "", True])


def what_may_become_a_stop_is_held_back(part: Any) -> None:
    """a stop string that is split between pieces:"""
    _expect_watched(part, ["END"], ["oneE", "N", "D."], ["one", "", "", "", True])
    _expect_watched(part, ["END"], ["oneE", "N", "E."], ["one", "", "ENE.", "", False])
    _expect_watched(part, ["aab"], ["a", "aa", "b"], ["", "a", "", "", True])
    _expect_watched(part, ["\n\n"], ["one\n", "two\n", "\n"], ["one", "\ntwo", "", "", True])


def finish_gives_what_was_held(part: Any) -> None:
    """an answer that ends with the beginning of a stop string:"""
    _expect_watched(part, ["END"], ["one EN"], ["one ", "EN", False])
    _expect_watched(part, ["ab", "xyzab"], ["xyz"], ["", "xyz", False])


def the_stop_that_is_complete_first_counts(part: Any) -> None:
    """several stop strings; the first one to be complete ends the answer:"""
    _expect_watched(part, ["abcd", "bc"], ["xabcd"], ["xa", "", True])
    _expect_watched(part, ["cd", "abcd"], ["xabcd"], ["x", "", True])
    _expect_watched(part, ["abcd", "cd"], ["xabcd"], ["x", "", True])
    _expect_watched(part, ["far", "no"], ["so near, no far"], ["so near, ", "", True])


def with_include_the_stop_is_shown_and_nothing_held(part: Any) -> None:
    """include, which shows the stop string as well:"""
    _expect_watched(part, ["END"], ["oneE", "ND two"], ["oneE", "ND", "", True], include=True)
    _expect_watched(part, ["END"], ["one EN"], ["one EN", "", False], include=True)
    _expect_watched(part, ["END"], ["EN", "X", "END"], ["EN", "X", "END", "", True], include=True)


def the_size_of_the_pieces_does_not_matter(part: Any) -> None:
    """one text in pieces of 1 to 8 characters:"""
    text = "a list\n- one\n- two\n\nUser: three"
    for stops in (["\n\n", "User:"], ["\n- two"], ["- t", "one\n- "], ["zzz"], ["e", "three"]):
        for include in (False, True):
            whole = _watched(part, stops, [text], include)
            for size in range(1, 9):
                marks = [*range(0, len(text), size), len(text)]
                found = _watched(part, stops, [text[a:b] for a, b in pairwise(marks)], include)
                said = f"stops {stops} in pieces of {size}: "
                expect_equal("".join(found[:-1]), "".join(whole[:-1]), said + "the whole text")
                expect_equal(found[-1], whole[-1], said + "`stopped`")


def two_watchers_do_not_share_what_they_hold(part: Any) -> None:
    """two answers that are streamed at the same time:"""
    one, two = part(["END"]), part(["END"])
    found = [one.push("E"), two.push("ND"), one.push("ND"), two.finish()]
    expect_equal(found, ["", "ND", "", ""], "the results of the two in turn")
    expect(one.stopped is True, "the first should be stopped after END.")
    expect(two.stopped is False, "the second should not be stopped: its text has no END.")


CHECKS = {
    **bpe_checks.CHECKS,
    "StreamDecoder": (
        whole_characters_are_given_at_once,
        half_a_character_is_held_back,
        pieces_add_up_to_the_text,
        broken_bytes_become_the_replacement_character,
        finish_gives_what_stayed_incomplete,
        skipped_ids_give_no_text,
        one_leading_space_is_dropped_if_asked,
        two_decoders_do_not_share_what_they_hold,
    ),
    "StopWatcher": (
        text_without_a_stop_passes_at_once,
        text_ends_before_the_stop,
        what_may_become_a_stop_is_held_back,
        finish_gives_what_was_held,
        the_stop_that_is_complete_first_counts,
        with_include_the_stop_is_shown_and_nothing_held,
        the_size_of_the_pieces_does_not_matter,
        two_watchers_do_not_share_what_they_hold,
    ),
}
