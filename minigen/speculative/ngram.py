"""Prompt lookup: the tokens that followed the last time the same n tokens occurred.

Source: Saxena 2023 (prompt lookup decoding). It costs no model and pays where an answer repeats
its prompt, or itself.
"""

from collections.abc import Sequence as SequenceOf

from minigen.sequence import Sequence

MOST_PLACES = 1000  # that are compared for one draft, the latest ones


class NgramIndex:
    """The places of all runs of `shortest` to `longest` tokens of one growing text.

    Only runs of `shortest` tokens are stored, so the memory is one entry per token; longer runs are
    found by comparing what stands before these.
    """

    def __init__(self, shortest: int, longest: int):
        self.shortest, self.longest = shortest, longest
        self.token_ids: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # the latest place after a shortest run
        self._earlier: list[int | None] = []  # by place: the one before it, after the same run

    def extend(self, token_ids: SequenceOf[int]) -> None:
        """Add tokens at the end of the text."""
        for token_id in token_ids:
            place, earlier = len(self.token_ids), None
            if place >= self.shortest:
                run = tuple(self.token_ids[place - self.shortest :])
                earlier = self._latest.get(run)
                self._latest[run] = place
            self._earlier.append(earlier)
            self.token_ids.append(token_id)

    def find(self, end: SequenceOf[int]) -> int | None:
        """Return the place after the latest run that equals the end of `end`, the longest first."""
        if len(end) < self.shortest:
            return None
        last, found, length = end[-self.longest :], None, 0
        place = self._latest.get(tuple(end[len(end) - self.shortest :]))
        for _ in range(MOST_PLACES):
            if place is None or length == len(last):
                break
            equal = self._num_equal(last, place)
            if equal > length:
                found, length = place, equal
            place = self._earlier[place]
        return found

    def _num_equal(self, last: SequenceOf[int], place: int) -> int:
        """Return how many tokens before a place equal the last ones of `last`."""
        for count in range(self.shortest, min(len(last), place)):
            if last[-1 - count] != self.token_ids[place - 1 - count]:
                return count
        return min(len(last), place)

    def following(self, place: int, count: int) -> list[int]:
        """Return `count` tokens from a place on; behind the text's end it goes on from that place.

        So the end of a text that repeats itself is continued by further repetitions.
        """
        known = self.token_ids[place : place + count]
        return [known[index % len(known)] for index in range(count)]


class NgramProposer:
    """Continues each sequence as it went on after the same tokens before."""

    def __init__(self, shortest: int, longest: int):
        self.shortest, self.longest = shortest, longest
        self._indexes: dict[Sequence, NgramIndex] = {}

    def propose(
        self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]
    ) -> list[SequenceOf[int]]:
        """Return drafts for each sequence; none where its last tokens never occurred before."""
        return [self._propose(*each) for each in zip(sequences, counts, strict=True)]

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._indexes.pop(sequence, None)

    def _propose(self, sequence: Sequence, count: int) -> list[int]:
        index = self._indexes.get(sequence)
        if index is None:
            index = self._indexes[sequence] = NgramIndex(self.shortest, self.longest)
        index.extend(sequence.token_ids[len(index.token_ids) :])
        place = index.find(sequence.token_ids)
        return [] if place is None else index.following(place, count)
