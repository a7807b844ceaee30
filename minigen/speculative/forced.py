"""Drafts of a grammar: the tokens that it forces, such as a JSON object's keys and its colons.

A grammar forces text, and a model may have other tokens for the same text, so these are drafts like
others: the model's own token decides.
"""

from collections.abc import Sequence as SequenceOf

from minigen.protocols import Proposer
from minigen.sequence import Sequence


class ForcedFirst:
    """Proposes what a sequence's grammar forces; where it forces nothing, asks another proposer."""

    def __init__(self, proposer: Proposer):
        self.proposer = proposer

    def propose(
        self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]
    ) -> list[SequenceOf[int]]:
        """Return forced tokens, or the other proposer's drafts, for each sequence."""
        found: dict[Sequence, SequenceOf[int]] = {}
        for sequence in sequences:
            if forced := forced_ids(sequence):
                found[sequence] = forced
        rest = [
            (sequence, count)
            for sequence, count in zip(sequences, counts, strict=True)
            if sequence not in found
        ]
        if rest:
            asked, their_counts = zip(*rest, strict=True)
            found |= zip(asked, self.proposer.propose(asked, their_counts), strict=True)
        return [found[each][:count] for each, count in zip(sequences, counts, strict=True)]

    def end(self, sequence: Sequence) -> None:
        """Pass it on."""
        self.proposer.end(sequence)


class NoProposer:
    """Proposes nothing."""

    def propose(
        self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]
    ) -> list[SequenceOf[int]]:
        """Return no drafts for each sequence."""
        return [() for _ in sequences]

    def end(self, sequence: Sequence) -> None:
        """Do nothing."""


def forced_ids(sequence: Sequence) -> list[int]:
    """Return the tokens that the sequence's grammar forces next; none without a grammar."""
    for each in sequence.processors:
        own = getattr(getattr(each, "matcher", None), "forced", None)
        if own is not None:
            found: list[int] = own()
            return found
    return []
