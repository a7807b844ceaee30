"""How many drafts pay in the next step: from the share that was right, and the time of steps.

A step over more rows takes longer, and the place of a draft is only reached if all drafts before it
are right. So drafts are considered in the order of their chances, and as many are asked for as give
the most expected tokens per second. In a large batch, whose steps are long already, that is none.
"""

from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from minigen.sequence import Sequence

UNKNOWN_SLOPE = 0.05  # of a step's time for each further row, until it is measured
FIRST_SHARE, FIRST_WEIGHT = 0.5, 8.0  # what is assumed of a proposer that was not tried yet
WORTH = 1.05  # the least expected gain for which drafts are asked: times are measured with noise
MOST_TIMES = 5  # the newest measurement of a time counts for a fifth, once there are five
FORGET = 0.9  # the weight of what was known, after each further step with drafts
FIRST_WAIT, LONGEST_WAIT = 16, 256  # tokens until drafts that did not pay are tried again
TRIED = 2  # drafts of such a try
MAY_LOSE = 0.015  # of the time of steps without drafts, and of such steps:
FIRST_LOST, MOST_LOST = 1.5, 2.0  # at first, and at most at once
MOST_KEPT = 16.0  # of what drafts have gained before


class Pace(Protocol):
    """Chooses the number of drafts of each sequence."""

    def choose(self, decoding: SequenceOf[Sequence], most: int) -> list[int]:
        """Return for each of these sequences how many drafts to ask for, at most `most`."""

    def learn_right(self, sequence: Sequence, drafted: int, right: int, tokens: int) -> None:
        """Take note of how many drafts were right, in a step that gave `tokens` tokens."""

    def learn_step(self, sequences: int, rows: int, tokens: int, seconds: float) -> None:
        """Take note of a step of these decodes: its rows with drafts, its tokens and its time."""

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence, which has ended."""


class FixedPace:
    """Always asks for as many drafts as allowed."""

    def choose(self, decoding: SequenceOf[Sequence], most: int) -> list[int]:
        """Return `most` for each."""
        return [most] * len(decoding)

    def learn_right(self, sequence: Sequence, drafted: int, right: int, tokens: int) -> None:
        """Do nothing."""

    def learn_step(self, sequences: int, rows: int, tokens: int, seconds: float) -> None:
        """Do nothing."""

    def end(self, sequence: Sequence) -> None:
        """Do nothing."""


@dataclass
class Record:
    """What came of one sequence's drafts: right ones and tested ones, the older the less.

    `since` counts the tokens since the last drafts, and `wait` how many to wait for the next try.
    """

    right: float
    tested: float
    since: int = 0
    wait: int = FIRST_WAIT

    @property
    def share(self) -> float:
        """The estimated probability that a draft is right if those before it are."""
        return self.right / self.tested


class StepTimes:
    """The time of a step of decodes by its number of rows: measured, or between measured ones.

    More rows never take less time, so where measurements say so it is noise, and they are averaged
    (isotonic regression by pooling adjacent violators, Ayer et al. 1955).
    """

    def __init__(self) -> None:
        self._measured: dict[int, tuple[float, int]] = {}  # seconds, and how many times, at most 5
        self._rows: list[int] = []  # those that were measured, ascending
        self._rising: list[float] = []  # their seconds, averaged

    @property
    def most_rows(self) -> int:
        """The most rows that may be tried: twice as many as were measured."""
        return 2 * self._rows[-1] if self._rows else 0

    def learn(self, rows: int, seconds: float) -> None:
        """Add a measurement; the newest counts for a fifth, or as much as each one before it."""
        known, times = self._measured.get(rows, (0.0, 0))
        times = min(times + 1, MOST_TIMES)
        self._measured[rows] = (known + (seconds - known) / times, times)
        self._rows = sorted(self._measured)
        self._rising = rising([self._measured[each] for each in self._rows])

    def __call__(self, rows: int) -> float:
        """Return the seconds of a step with `rows` rows, in any unit if none was measured.

        Beyond what was measured, it is a guess that invites a try.
        """
        if not self._rows:
            return 1 + UNKNOWN_SLOPE * rows
        index = bisect_left(self._rows, rows)
        if index == len(self._rows) or index == 0:  # beyond what was measured
            index = max(index - 1, 0)
            nearest = self._rows[index]
            return self._rising[index] * (1 + UNKNOWN_SLOPE * (rows - nearest) / nearest)
        low, high = self._rows[index - 1], self._rows[index]
        part = (rows - low) / (high - low)
        return (1 - part) * self._rising[index - 1] + part * self._rising[index]


def rising(measured: Iterable[tuple[float, int]]) -> list[float]:
    """Return the values, each with its weight, with averages in place of runs that fall.

    >>> rising([(1.0, 1), (4.0, 1), (2.0, 3), (5.0, 1)])
    [1.0, 2.5, 2.5, 5.0]
    """
    pools: list[tuple[float, int, int]] = []  # value, weight, and how many values it stands for
    for value, weight in measured:
        count = 1
        while pools and pools[-1][0] > value:
            before, of_before, more = pools.pop()
            value = (before * of_before + value * weight) / (of_before + weight)
            weight, count = weight + of_before, count + more
        pools.append((value, weight, count))
    return [value for value, _, count in pools for _ in range(count)]


class MeasuredPace:
    """Asks for as many drafts as pay, by each sequence's record and the measured times of steps.

    Where none pay, it tries two again after 16 tokens, and after twice as many each time. While
    drafts have lost what they gained before, and 1.5 percent of the time, it asks for none.
    """

    def __init__(self) -> None:
        self.times = StepTimes()
        self._records: dict[Sequence, Record] = {}
        self._all = Record(FIRST_SHARE * FIRST_WEIGHT, FIRST_WEIGHT)
        self._allowance = FIRST_LOST  # how much more drafts may lose, in steps without drafts

    def choose(self, decoding: SequenceOf[Sequence], most: int) -> list[int]:
        """Return how many drafts to ask for, by the largest expected number of tokens a second."""
        if self._allowance <= 0:
            return [0] * len(decoding)
        records = [self._record(each) for each in decoding]
        chances = sorted(
            (
                (record.share**place, index)
                for index, record in enumerate(records)
                for place in range(1, most + 1)
            ),
            reverse=True,
        )
        expected, best = float(len(decoding)), 0
        fastest = WORTH * expected / self.times(len(decoding)) if decoding else 0.0
        for count, (chance, _) in enumerate(chances, 1):
            if len(decoding) + count > self.times.most_rows:
                break
            expected += chance
            speed = expected / self.times(len(decoding) + count)
            if speed > fastest:
                fastest, best = speed, count
        counts = [0] * len(decoding)
        for _, index in chances[:best]:
            counts[index] += 1
        for index, record in enumerate(records):
            if counts[index] == 0 and record.since >= record.wait:
                counts[index] = min(TRIED, most)
        return counts

    def learn_right(self, sequence: Sequence, drafted: int, right: int, tokens: int) -> None:
        """Update the sequence's record, and that of all sequences, with which new ones begin."""
        record = self._record(sequence)
        if drafted == 0:
            record.since += tokens
            return
        tested = right + (right < drafted)  # what follows the first wrong draft is not tested
        for each in (record, self._all):
            each.right = FORGET * each.right + right
            each.tested = FORGET * each.tested + tested
        record.since = 0
        record.wait = FIRST_WAIT if right else min(2 * record.wait, LONGEST_WAIT)

    def learn_step(self, sequences: int, rows: int, tokens: int, seconds: float) -> None:
        """Add a measurement, and what the step lost or gained to the allowance."""
        self.times.learn(rows, seconds)
        gain = tokens / sequences - self.times(rows) / self.times(sequences)
        if gain > 0 or self._allowance < MOST_LOST:
            gain += MAY_LOSE
        self._allowance = min(self._allowance + gain, MOST_KEPT)

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._records.pop(sequence, None)

    def _record(self, sequence: Sequence) -> Record:
        if sequence not in self._records:
            share = self._all.share
            self._records[sequence] = Record(share * FIRST_WEIGHT, FIRST_WEIGHT)
        return self._records[sequence]
