"""Runs the logits processors of a step's sequences: prepared beside the model, applied after it."""

import math
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.errors import GrammarError
from minigen.sequence import SampledToken, Sequence

Failures = dict[Sequence, Exception]


class ProcessorCalls:
    """Calls the processors of each sequence; an error of one ends only its own sequence.

    Its thread starts when the first sequence has a processor.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._prepared: Future[Failures] | None = None
        self._own: frozenset[Sequence] = frozenset()

    def prepare(self, samples: SequenceOf[Sequence]) -> None:
        """Start to prepare the processors' next calls, in another thread."""
        processed = [each for each in samples if each.processors]
        self._prepared, self._own = None, frozenset(processed)
        if processed:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "minigen-processors")
            self._prepared = self._thread.submit(_prepare, processed)

    def apply(
        self,
        logits: Float[Tensor, "rows vocab"],
        rows: SequenceOf[Sequence],
        drafted: Mapping[Sequence, SequenceOf[int]],
    ) -> tuple[Float[Tensor, "rows vocab"], Failures]:
        """Return the logits as the processors change them, and the sequences whose one failed.

        `rows` are those of `minigen.sequence.rows_of`, and `drafted` the drafts among them. The row
        of a sequence that failed is unchanged. Minus infinity becomes the lowest number, since a
        sampler takes infinite logits for a damaged model; its probability is still exactly 0.
        """
        if self._prepared is None:
            return logits, {}
        failed = self._prepared.result()
        with torch.inference_mode():
            for row, sequence in enumerate(rows):
                # Rows after drafts are copies, and follow their sequence's own.
                if sequence.processors and sequence in self._own and sequence not in failed:
                    own = logits[row : row + 1 + len(drafted.get(sequence, ()))]
                    try:
                        _apply_to(own, rows[row:], drafted.get(sequence, ()))
                    except Exception as error:
                        failed[sequence] = error
        return logits, failed

    def accept(
        self, progress: Iterable[tuple[Sequence, SampledToken]], failed: Collection[Sequence]
    ) -> Failures:
        """Tell the processors of unfinished sequences their tokens; return those that fail."""
        if self._prepared is None:
            return {}
        failures: Failures = {}
        for sequence, token in progress:
            if sequence.finish_reason is not None:
                sequence.processors = ()  # an answer that waits to be sent holds no grammar
            elif sequence.processors and sequence not in failed:
                try:
                    for each in sequence.processors:
                        each.accept(token.token_id)
                except Exception as error:
                    failures[sequence] = error
        return failures


def _prepare(sequences: Iterable[Sequence]) -> Failures:
    failures: Failures = {}
    for sequence in sequences:
        try:
            for each in sequence.processors:
                each.prepare()
        except Exception as error:
            failures[sequence] = error
    return failures


def _apply_to(
    logits: Float[Tensor, "rows vocab"], rows: SequenceOf[Sequence], drafts: SequenceOf[int]
) -> None:
    """Change the logits of one sequence and of its drafts; its processors stay where they were.

    Rows after a draft that the processors forbid are left as they are: that draft cannot be right.
    """
    processors, lowest = rows[0].processors, torch.finfo(logits.dtype).min
    num_followed = 0
    try:
        for row, draft in enumerate([*drafts, None]):
            changed = _processed(logits[row].clone(), rows[row])
            logits[row] = changed.clamp_(min=lowest)
            if draft is None or logits[row, draft] == lowest:
                break
            for each in processors:
                each.accept(draft)
            num_followed += 1
            for each in processors:
                each.prepare()
    finally:
        if num_followed:
            for each in processors:
                each.roll_back(num_followed)


def _processed(logits: Float[Tensor, " vocab"], sequence: Sequence) -> Float[Tensor, " vocab"]:
    """Return the logits after all processors; raise `GrammarError` if they leave no token."""
    for each in sequence.processors:
        logits = each(logits, sequence.output_ids)
    left, banned = logits, [*sequence.banned_ids]
    if banned:
        left = logits.clone()
        left[banned] = -math.inf
    if left.amax() == -math.inf:
        but = ", except ends that min_tokens forbids" if logits.amax() > -math.inf else ""
        raise GrammarError(
            "The grammar and the logits processors of this answer together allow no token after "
            f"its {len(sequence.output_ids)} tokens{but}."
        )
    return logits
