"""Exercise StopWatcher of chapter 12 (stretch, 15 points, about 30 minutes).

Write a watcher that ends an answer at a stop string. `push(text)` returns the text that can be
shown now: it holds back text that could still become a stop string, and shows only the text
before a complete stop string. `stopped` says whether a stop string was found. `finish()`
returns the text that is still held. With `include`, the stop string is shown as well, so
nothing needs to be held.

Check it:     minigen check exercises/12_tokenizer/stop_watcher.py
With a hint:  minigen check exercises/12_tokenizer/stop_watcher.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams
    from minigen_course import load_model

    llm = load_model()
    with using(12, StopWatcher=mine):
        params = SamplingParams(temperature=0, stop=["10"], max_tokens=40)
        print(llm.generate("1, 2, 3, 4, 5, 6,", params).text)

Harder: With a thousand stop strings, how do you avoid searching for each of them in every
piece? Aho and Corasick (1975) have an answer.
"""

# exercise: minigen.tokenizer.stop_strings.StopWatcher
from collections.abc import Sequence


class StopWatcher:
    """Passes streamed text on, up to the first of several stop strings.

    The first stop string is the one that is complete first, because generation ends there. Of
    several that end at the same place it is the longest. So the result does not depend on how the
    text is split into pieces. With `include` the stop string itself is passed on too, and no text
    has to be held back.

    >>> watcher = StopWatcher(["\\n\\n"])
    >>> [watcher.push(piece) for piece in ("one\\n", "two\\n", "\\nthree")]
    ['one', '\\ntwo', '']
    >>> watcher.stopped
    True
    """

    def __init__(self, stops: Sequence[str], include: bool = False):
        raise NotImplementedError  # your turn

    def push(self, text: str) -> str:
        """Add `text`, and return the text that can be emitted now; always empty once stopped."""
        raise NotImplementedError  # your turn

    def finish(self) -> str:
        """Return the text that was held back; the stream has ended."""
        raise NotImplementedError  # your turn
