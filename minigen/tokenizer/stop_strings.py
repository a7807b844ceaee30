"""Stop strings in a stream: text is emitted only when it cannot become part of a stop string."""

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
        self.stops, self.include = tuple(stops), include
        self.stopped = False
        self._beginning = ""  # the end of the text so far, where a stop string may have started

    def push(self, text: str) -> str:
        """Add `text`, and return the text that can be emitted now; always empty once stopped."""
        if self.stopped:
            return ""
        shown = len(self._beginning) if self.include else 0
        text = self._beginning + text
        found = self._first_stop(text)
        if found is not None:
            start, end = found
            self.stopped, self._beginning = True, ""
            return text[shown : end if self.include else start]
        certain = len(text) - self._longest_beginning(text)
        self._beginning = text[certain:]
        return text[shown:] if self.include else text[:certain]

    def finish(self) -> str:
        """Return the text that was held back; the stream has ended."""
        held, self._beginning = self._beginning, ""
        return "" if self.include else held

    def _first_stop(self, text: str) -> tuple[int, int] | None:
        """Return start and end of the stop string that is complete first, the longest of ties."""
        starts = ((text.find(stop), stop) for stop in self.stops)
        found = [(start, start + len(stop)) for start, stop in starts if start >= 0]
        return min(found, key=lambda span: (span[1], span[0]), default=None)

    def _longest_beginning(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a prefix of a stop string."""
        longest = max((len(stop) for stop in self.stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops):
                return length
        return 0
