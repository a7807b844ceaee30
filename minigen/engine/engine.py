"""The loop: choose who runs, run the model, choose tokens, hand them on."""

from collections import deque
from collections.abc import Sequence as SequenceOf

from minigen.protocols import Runner, Sampler
from minigen.sequence import SampledToken, Sequence


class Engine:
    """Runs many sequences side by side, as many at once as `max_sequences`, first come first.

    A step computes what is new in every running sequence: a prompt of one that has just begun (at
    most `max_batch_tokens` of them together, but always one), a token of each other.
    """

    def __init__(self, runner: Runner, sampler: Sampler, max_sequences: int, max_batch_tokens: int):
        self.runner, self.sampler = runner, sampler
        self.max_sequences, self.max_batch_tokens = max_sequences, max_batch_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.waiting or self.running)

    def step(self) -> list[tuple[Sequence, SampledToken]]:
        """Move every running sequence on by one token; returns each with its token."""
        batch = self._next_batch()
        logits = self.runner.logits(batch)
        tokens = self.sampler(logits, batch)
        return self._commit(batch, tokens)

    def abort(self, sequence: Sequence) -> None:
        """Give a sequence up at once, waiting or running; one that is finished is left alone."""
        if sequence.finish_reason is None:
            sequence.finish_reason = "abort"
        self._forget(sequence)

    def _next_batch(self) -> list[Sequence]:
        budget = self.max_batch_tokens - len(self.running)
        while self.waiting and len(self.running) < self.max_sequences:
            budget -= len(self.waiting[0].new_ids)
            if budget < 0 and self.running:
                break
            self.running.append(self.waiting.popleft())
        return list(self.running)

    def _commit(
        self, batch: SequenceOf[Sequence], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]:
        for sequence, token in zip(batch, tokens, strict=True):
            sequence.num_computed = len(sequence)
            sequence.append(token.token_id)
            if sequence.finish_reason is not None:
                self._forget(sequence)
        return list(zip(batch, tokens, strict=True))

    def _forget(self, sequence: Sequence) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.runner.release(sequence)
