"""Prompt lookup: the tokens that followed the last time the same n tokens occurred.

Source: Saxena 2023 (prompt lookup decoding). It costs no model and pays where an answer repeats
its prompt, or itself.
"""

from collections.abc import Sequence as SequenceOf

from minigen.sequence import Sequence


class NgramIndex:
    """The places of all runs of `shortest` to `longest` tokens of one growing text."""

    def __init__(self, shortest: int, longest: int):
        self.shortest, self.longest = shortest, longest
        self.token_ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # the latest place after such a run

    def extend(self, token_ids: SequenceOf[int]) -> None:
        """Add tokens at the end of the text."""
        for token_id in token_ids:
            place = len(self.token_ids)
            for length in range(self.shortest, min(self.longest, place) + 1):
                self._after[tuple(self.token_ids[place - length :])] = place
            self.token_ids.append(token_id)

    def find(self, end: SequenceOf[int]) -> int | None:
        """Return the place after the latest run that equals the end of `end`, the longest first."""
        for length in range(min(self.longest, len(end)), self.shortest - 1, -1):
            place = self._after.get(tuple(end[len(end) - length :]))
            if place is not None:
                return place
        return None

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
