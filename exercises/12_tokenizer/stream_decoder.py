"""Exercise StreamDecoder of chapter 12 (core, 10 points, about 20 minutes).

Write a decoder for token ids that come one at a time. `token_bytes(token_id)` returns the bytes
of an id. `push(token_id)` returns the text that this id completes, and "" while a character is
incomplete. `finish()` returns an incomplete rest as U+FFFD. Bytes that are not valid UTF-8
become U+FFFD at once. Ids in `skipped` give no text. With `drop_space`, the text loses one
leading space (SentencePiece puts one before every text).

Check it:     minigen check exercises/12_tokenizer/stream_decoder.py
With a hint:  minigen check exercises/12_tokenizer/stream_decoder.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams
    from minigen_course import load_model

    llm = load_model()
    with using(12, StreamDecoder=mine):
        for piece in llm.stream("1. 🍎 2. 🍌 3.", SamplingParams(temperature=0, max_tokens=24)):
            print(piece, end="|")

Harder: One visible character may consist of several code points (a flag, a letter with an
accent). Hold these back, too. Which text can then no longer be shown at once?
"""

# exercise: minigen.tokenizer.tokenizer.StreamDecoder
from collections.abc import Callable, Collection


class StreamDecoder:
    """Decodes ids one by one, and never returns an incomplete character."""

    def __init__(
        self, token_bytes: Callable[[int], bytes], skipped: Collection[int], drop_space: bool
    ) -> None:
        raise NotImplementedError  # your turn

    def push(self, token_id: int) -> str:
        """Return the text that this id completes; empty while a character is incomplete."""
        raise NotImplementedError  # your turn

    def finish(self) -> str:
        """Return the rest: U+FFFD for a character that stayed incomplete, or an empty string."""
        raise NotImplementedError  # your turn
