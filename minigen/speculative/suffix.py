"""Drafts from finished answers as well: what followed the same tokens in any of them.

Source: suffix decoding, Oliaro et al. 2024; it keeps a suffix tree with frequencies, and this one
the latest place of each run of tokens. Only sequences of the same `cache_salt` share answers, so
that no client can tell from the speed of its own answer what others were answered.
"""

import functools
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

from minigen.sequence import Sequence
from minigen.speculative.ngram import NgramIndex, NgramProposer

MOST_TOKENS = 2**20  # of finished answers, of all salts together


class _Answers:
    """The finished answers of one salt in two generations, of which the older can be forgotten."""

    def __init__(self, shortest: int, longest: int):
        self._new = functools.partial(NgramIndex, shortest, longest)
        self.indexes = [self._new()]  # the newer generation first

    @property
    def num_tokens(self) -> int:
        return sum(len(index.token_ids) for index in self.indexes)

    def add(self, token_ids: SequenceOf[int], most_tokens: int) -> None:
        """Add an answer; a generation has about half of `most_tokens`."""
        self.indexes[0].extend(token_ids)
        if len(self.indexes[0].token_ids) > most_tokens // 2:
            self.indexes = [self._new(), self.indexes[0]]

    def following(self, end: SequenceOf[int], count: int) -> list[int]:
        """Return at most `count` tokens that followed the end of `end` before."""
        for index in self.indexes:
            if (place := index.find(end)) is not None:
                return index.token_ids[place : place + count]
        return []


class SuffixProposer:
    """Looks into the sequence's own text first, then into finished answers of the same salt."""

    def __init__(self, shortest: int, longest: int, most_tokens: int = MOST_TOKENS):
        self.shortest, self.longest, self.most_tokens = shortest, longest, most_tokens
        self._own = NgramProposer(shortest, longest)
        # By salt, the least recently used one first.
        self._finished: OrderedDict[str | None, _Answers] = OrderedDict()

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
        """Keep the answer of a sequence that has finished; forget old ones over the limit."""
        self._own.end(sequence)
        if sequence.finish_reason not in ("stop", "length") or not sequence.output_ids:
            return
        answers = self._finished.setdefault(
            sequence.cache_salt, _Answers(self.shortest, self.longest)
        )
        self._finished.move_to_end(sequence.cache_salt)
        beginning = sequence.prompt_ids[-self.longest :]  # how the answer began
        answers.add([*beginning, *sequence.output_ids], self.most_tokens)
        while sum(each.num_tokens for each in self._finished.values()) > self.most_tokens:
            oldest = next(iter(self._finished.values()))
            if len(oldest.indexes) > 1:
                oldest.indexes.pop()
            else:
                self._finished.popitem(last=False)

    def _from_finished(self, sequence: Sequence, count: int) -> list[int]:
        answers = self._finished.get(sequence.cache_salt)
        if answers is None:
            return []
        self._finished.move_to_end(sequence.cache_salt)
        return answers.following(sequence.token_ids[-self.longest :], count)
