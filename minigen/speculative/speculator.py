"""Asks a proposer for drafts before a step, and learns from those that were right.

The rule is *sample and match*: the step draws the model's own token at every drafted place, by that
place's own random number, and drafts are right as long as they equal these. So every text is the
same with and without speculation, at any temperature and with any proposer. Sources: Leviathan et
al. 2022 and Chen et al. 2023 for verifying drafts in one pass; Daliri et al. 2024 for comparing
drafts with samples ("drafter-invariant").
"""

import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf

from minigen.protocols import Proposer
from minigen.sequence import DraftCounts, SampledToken, Sequence, num_matching
from minigen.speculative.pace import Pace


class Speculator:
    """Sets `Sequence.drafts` before each step, within the limits of the engine.

    A sequence gets at most `most_drafts` tokens, and all together at most `most_in_all`. `pace`
    chooses how many to ask for. `num_slots` is the length of the longest sequence that a block
    table holds. With `only_predicted`, it does nothing while no sequence has a predicted text.
    """

    def __init__(
        self,
        proposer: Proposer,
        pace: Pace,
        vocab_size: int,
        num_slots: int,
        most_drafts: int,
        most_in_all: int,
        only_predicted: bool = False,
    ):
        self.proposer, self.pace = proposer, pace
        self.vocab_size, self.num_slots = vocab_size, num_slots
        self.most_drafts, self.most_in_all = most_drafts, most_in_all
        self.only_predicted = only_predicted
        self.counts = DraftCounts(accepted_at=[0] * most_drafts)
        self._started = 0.0  # when this step's drafts were asked for

    def serves(self, sequences: Iterable[Sequence]) -> bool:
        """Return whether a step with these sequences may have drafts."""
        return not self.only_predicted or any(each.predicted_ids for each in sequences)

    def draft(self, decoding: SequenceOf[Sequence]) -> None:
        """Set the drafts of these sequences, which are decoding."""
        self._started = time.perf_counter()
        asked, counts, left = [], [], self.most_in_all
        wanted = self.pace.choose(decoding, self.most_drafts)
        for sequence, count in zip(decoding, wanted, strict=True):
            sequence.drafts = ()
            # The step gives one token more than drafts, and the last token needs no slot.
            longest = min(sequence.max_output - len(sequence.output_ids) - 1, left)
            count = min(count, longest, self.num_slots - len(sequence))
            if count > 0 and all(getattr(each, "rolls_back", True) for each in sequence.processors):
                asked.append(sequence)
                counts.append(count)
                left -= count
        if asked:
            proposed = self.proposer.propose(asked, counts)
            for sequence, count, drafts in zip(asked, counts, proposed, strict=True):
                sequence.drafts = self._usable(sequence, drafts[:count])

    def learn(
        self,
        drafted: Mapping[Sequence, SequenceOf[int]],
        progress: SequenceOf[tuple[Sequence, SampledToken]],
        num_rows: int,
        num_tokens: int,
    ) -> dict[Sequence, int]:
        """Take note of a step; return how many drafts of each sequence were right.

        The step had `num_rows` rows of logits and computed `num_tokens` tokens.
        """
        if num_rows == num_tokens:  # no prompts
            seconds = time.perf_counter() - self._started
            num_sequences = num_rows - sum(map(len, drafted.values()))
            self.pace.learn_step(num_sequences, num_rows, len(progress), seconds)
        appended: dict[Sequence, list[int]] = {}
        for sequence, token in progress:
            appended.setdefault(sequence, []).append(token.token_id)
        right: dict[Sequence, int] = {}
        for sequence, token_ids in appended.items():
            drafts = drafted.get(sequence, ())
            num_right = min(num_matching(drafts, token_ids), len(token_ids))
            if sequence.finish_reason is None:
                self.pace.learn_right(sequence, len(drafts), num_right, len(token_ids))
            if drafts:
                right[sequence] = num_right
                self._count(sequence, len(drafts), num_right)
        return right

    def end(self, sequence: Sequence) -> None:
        """Take note that a sequence has ended, for whatever reason."""
        self.pace.end(sequence)
        self.proposer.end(sequence)

    def _usable(self, sequence: Sequence, drafts: SequenceOf[int]) -> tuple[int, ...]:
        """Return the drafts before the first one that ends the answer, or that is no token."""
        ends = sequence.stop_ids
        for index, token_id in enumerate(drafts):
            if token_id in ends or not 0 <= token_id < self.vocab_size:
                return tuple(drafts[:index])
        return tuple(drafts)

    def _count(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        sequence.num_drafted += drafted
        sequence.num_accepted += accepted
        self.counts.drafts += 1
        self.counts.drafted += drafted
        self.counts.accepted += accepted
        for place in range(accepted):
            self.counts.accepted_at[place] += 1
