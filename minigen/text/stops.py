"""Stop strings in a stream: text is passed on only when it can no longer become part of one."""

from collections.abc import Sequence


class StopWatcher:
    """Lets streamed text through up to the first of several stop strings.

    >>> watcher = StopWatcher(["\\n\\n"])
    >>> [watcher.push(piece) for piece in ("one\\n", "two\\n", "\\nthree")]
    ['one', '\\ntwo', '']
    >>> watcher.stopped
    True
    """

    def __init__(self, stops: Sequence[str], include: bool = False):
        self.stops, self.include = tuple(stops), include
        self.stopped = False
        self._held = ""

    def push(self, text: str) -> str:
        """What may be shown after `text` has come; nothing any more once stopped."""
        if self.stopped:
            return ""
        text = self._held + text
        ends = [(text.find(stop), stop) for stop in self.stops if stop in text]
        if ends:
            start, stop = min(ends, key=lambda end: (end[0], -len(end[1])))
            self.stopped, self._held = True, ""
            return text[: start + len(stop)] if self.include else text[:start]
        shown = len(text) - self._longest_beginning(text)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = max((len(stop) for stop in self.stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops):
                return length
        return 0
