"""Drafts from finished answers as well: what followed the same tokens in any of them.

Source: suffix decoding, Oliaro et al. 2024; it keeps a suffix tree with frequencies, and this one
the latest place of each run of tokens. Only sequences of the same `cache_salt` share answers, so
that no client can tell from the speed of its own answer what others were answered.
"""

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

from minigen.sequence import Sequence
from minigen.speculative.ngram import NgramIndex, NgramProposer

MOST_TOKENS = 2**20  # of finished answers, of all salts together


class SuffixProposer:
    """Looks into the sequence's own text first, then into finished answers of the same salt."""

    def __init__(self, shortest: int, longest: int, most_tokens: int = MOST_TOKENS):
        self.shortest, self.longest, self.most_tokens = shortest, longest, most_tokens
        self._own = NgramProposer(shortest, longest)
        # By salt, the least recently used one first.
        self._finished: OrderedDict[str | None, NgramIndex] = OrderedDict()

    def propose(
        self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]
    ) -> list[SequenceOf[int]]:
        """Return drafts for each sequence; none where its last tokens are new."""
        own = self._own.propose(sequences, counts)
        return [
            found or self._from_finished(sequence, count)
            for found, sequence, count in zip(own, sequences, counts, strict=True)
        ]

    def end(self, sequence: Sequence) -> None:
        """Keep the answer of a sequence that has finished; forget what is over the limit."""
        self._own.end(sequence)
        if sequence.finish_reason not in ("stop", "length") or not sequence.output_ids:
            return
        index = self._finished.setdefault(
            sequence.cache_salt, NgramIndex(self.shortest, self.longest)
        )
        self._finished.move_to_end(sequence.cache_salt)
        index.extend(sequence.prompt_ids[-self.longest :])  # how the answer began
        index.extend(sequence.output_ids)
        while sum(len(each.token_ids) for each in self._finished.values()) > self.most_tokens:
            self._finished.popitem(last=False)

    def _from_finished(self, sequence: Sequence, count: int) -> list[int]:
        index = self._finished.get(sequence.cache_salt)
        if index is None:
            return []
        self._finished.move_to_end(sequence.cache_salt)
        place = index.find(sequence.token_ids[-self.longest :])
        return [] if place is None else index.token_ids[place : place + count]
