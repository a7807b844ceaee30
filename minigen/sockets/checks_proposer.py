"""A wrapper that checks a user's proposer: drafts are lists of whole numbers, one list each."""

from collections.abc import Sequence as SequenceOf
from typing import Any

from minigen.sequence import Sequence
from minigen.sockets.resolve import items_of, name_of, part_error


class CheckedProposer:
    """Checks a user's proposer. A function of (sequences, counts) is one without state.

    Drafts beyond the count, tokens that do not exist and everything after them are ignored, since a
    wrong draft never changes a text.
    """

    def __init__(self, proposer: Any):
        self.proposer = proposer
        self.__name__ = name_of(proposer)
        self._propose = getattr(proposer, "propose", proposer)
        if not callable(self._propose):
            raise part_error(proposer, "", "must have propose(sequences, counts)")

    def propose(
        self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]
    ) -> list[SequenceOf[int]]:
        """Return the proposer's drafts. Raises `PartError` if they are none."""
        returned = self._propose(tuple(sequences), tuple(counts))
        wanted = "a list with a list of token ids for each sequence"
        found: list[Any] = list(items_of(self.proposer, "propose", returned, wanted))
        if len(found) != len(sequences):
            what = f"returned {len(found)} lists for {len(sequences)} sequences"
            raise part_error(self.proposer, "propose", what)
        drafts = [list(items_of(self.proposer, "propose", each, wanted)) for each in found]
        for each in drafts:
            for token_id in each:
                if isinstance(token_id, bool) or not isinstance(token_id, int):
                    what = f"returned {token_id!r} as a token; it must return {wanted}"
                    raise part_error(self.proposer, "propose", what)
        return [each[:count] for each, count in zip(drafts, counts, strict=True)]

    def end(self, sequence: Sequence) -> None:
        """Call the proposer's own method, if there is one."""
        own = getattr(self.proposer, "end", None)
        if own is not None:
            own(sequence)
