"""Drafts from a text that the client expects: OpenAI's `prediction`, for edits of a known text."""

from collections.abc import Sequence as SequenceOf

from minigen.protocols import Proposer
from minigen.sequence import Sequence
from minigen.speculative.ngram import NgramIndex

LONGEST = 8  # tokens of the answer that are looked for in the predicted text


class PredictedFirst:
    """Continues an answer as its predicted text does; without one, asks another proposer."""

    def __init__(self, proposer: Proposer):
        self.proposer = proposer
        self._indexes: dict[Sequence, NgramIndex] = {}

    def propose(
        self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]
    ) -> list[SequenceOf[int]]:
        """Return what follows the answer's last tokens in its prediction, or the other's drafts."""
        found = [self._propose(*each) for each in zip(sequences, counts, strict=True)]
        rest = [index for index, drafts in enumerate(found) if not drafts]
        if rest:
            others = self.proposer.propose(
                [sequences[index] for index in rest], [counts[index] for index in rest]
            )
            for index, drafts in zip(rest, others, strict=True):
                found[index] = drafts
        return found

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence, and pass it on."""
        self._indexes.pop(sequence, None)
        self.proposer.end(sequence)

    def _propose(self, sequence: Sequence, count: int) -> SequenceOf[int]:
        if not sequence.predicted_ids:
            return ()
        index = self._indexes.get(sequence) or self._shared_index(sequence)
        place = index.find(sequence.output_ids[-LONGEST:])
        return () if place is None else index.token_ids[place : place + count]

    def _shared_index(self, sequence: Sequence) -> NgramIndex:
        """Return the index of another answer with the same prediction, or else a new one."""
        predicted = sequence.predicted_ids
        same = (each for other, each in self._indexes.items() if other.predicted_ids is predicted)
        index = next(same, None)
        if index is None:
            index = NgramIndex(1, LONGEST)
            index.extend(predicted)
        self._indexes[sequence] = index
        return index
