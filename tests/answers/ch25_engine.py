"""Answers to the exercise of chapter 25."""

from typing import Any

from minigen.errors import RequestError
from minigen.sequence import samples_of
from minigen_course.ch25_engine import lesson
from tests.answers import Answers, typed_again

StepLoop: Any = typed_again(lesson.StepLoop)


class InTwoLists:
    """Right: a list of sequences, from which each step removes the finished ones."""

    def __init__(self, scheduler: Any, runner: Any, sampler: Any, deliver: Any):
        self.parts, self.deliver = (scheduler, runner, sampler), deliver
        self.known: list[Any] = []

    @property
    def live(self) -> list[int]:
        return [each.sequence_id for each in self.known]

    def add(self, sequence: Any) -> None:
        family = [sequence]
        family.extend(sequence.siblings)
        for each in family:
            if each.sequence_id in self.live:
                raise RequestError("taken")
        self.known += family
        self.parts[0].add(sequence)

    def step(self) -> int:
        scheduler, runner, sampler = self.parts
        chunks = scheduler.schedule()
        if len(chunks) == 0:
            return 0
        total = 0
        for chunk in chunks:
            total += chunk.num_tokens
        rows = runner.logits(chunks)
        asked = [each for chunk in chunks for each in chunk.samples]
        chosen = []
        if asked:
            chosen = sampler(rows, asked)
        pairs = list(scheduler.commit(chunks, chosen))
        self.known = [each for each in self.known if each.finish_reason is None]
        for sequence, token in pairs:
            self.deliver(sequence, token)
        return total

    def abort(self, sequence_id: int) -> None:
        (found,) = [each for each in self.known if each.sequence_id == sequence_id] or [None]
        if found is None:
            raise RequestError("gone")
        self.parts[0].abort(found)
        self.known.remove(found)


def wrong_loop(name: str) -> type:
    class Wrong(StepLoop):
        def add(self, sequence: Any) -> None:
            if name == "takes an id twice":
                self.live.pop(sequence.sequence_id, None)
            if name == "siblings are not live":
                self.live[sequence.sequence_id] = sequence
                self.scheduler.add(sequence)
                return
            super().add(sequence)
            if name == "adds siblings too":
                for each in sequence.siblings:
                    self.scheduler.add(each)

        def step(self) -> int:
            if name == "two steps at once":
                return StepLoop.step(self) + StepLoop.step(self)
            chunks = self.scheduler.schedule()
            if not chunks and name != "runs an empty batch":
                return 0
            samples = samples_of(chunks)
            if name == "a sample for each chunk":
                samples = [chunk.sequence for chunk in chunks]
            logits = self.runner.logits(chunks)
            if name == "computes twice":
                logits = self.runner.logits(chunks)
            if name == "rows in reverse order":
                samples = samples[::-1]
            if name == "drops the first row":
                logits, samples = logits[1:], samples[1:]
            if not samples and name == "a chunk without tokens is not committed":
                return sum(chunk.num_tokens for chunk in chunks)
            if samples or name == "samples without rows":
                tokens = self.sampler(logits, samples)
            else:
                tokens = []
            if name == "tokens rotated":
                tokens = tokens[1:] + tokens[:1]
            if name == "delivers before it commits":
                for sequence, token in zip(samples, tokens, strict=True):
                    self.deliver(sequence, token)
            if name == "appends by itself":
                for sequence, token in zip(samples, tokens, strict=True):
                    sequence.append(token.token_id)
            progress = self.scheduler.commit(chunks, tokens)
            if name == "commits twice":
                self.scheduler.commit(chunks, tokens)
            if name == "samples asked after commit":
                progress = list(zip(samples_of(chunks), tokens, strict=False))
            for sequence, token in progress:
                if sequence.finish_reason is not None:
                    if name != "keeps finished sequences":
                        self.live.pop(sequence.sequence_id, None)
                    if name == "aborts finished sequences":
                        self.scheduler.abort(sequence)
                    if name == "the last token is lost":
                        continue
                if name == "delivers twice":
                    self.deliver(sequence, token)
                if name != "delivers before it commits":
                    self.deliver(sequence, token)
            if name == "empties live":
                self.live.clear()
            if name == "returns the number of sequences":
                return len(chunks)
            return sum(chunk.num_tokens for chunk in chunks)

        def abort(self, sequence_id: int) -> None:
            if name == "abort of any id":
                self.live.pop(sequence_id, None)
            elif name == "abort skips the scheduler":
                if sequence_id not in self.live:
                    raise RequestError("gone")
                del self.live[sequence_id]
            elif name == "abort leaves it live":
                if sequence_id not in self.live:
                    raise RequestError("gone")
                self.scheduler.abort(self.live[sequence_id])
            elif name == "abort raises KeyError":
                self.scheduler.abort(self.live.pop(sequence_id))
            else:
                super().abort(sequence_id)

    return Wrong


WRONG = [
    *("takes an id twice", "siblings are not live", "two steps at once"),
    *("runs an empty batch", "a sample for each chunk", "computes twice"),
    *("rows in reverse order", "drops the first row"),
    *("a chunk without tokens is not committed", "samples without rows", "tokens rotated"),
    *("delivers before it commits", "appends by itself", "commits twice"),
    *("samples asked after commit", "keeps finished sequences", "the last token is lost"),
    *("aborts finished sequences", "delivers twice", "empties live"),
    *("returns the number of sequences", "abort of any id", "abort skips the scheduler"),
    *("abort leaves it live", "abort raises KeyError"),
]

ANSWERS = {
    "StepLoop": Answers(
        # The scheduler has queued the siblings with the first sequence, so adding them is harmless.
        right=(InTwoLists, wrong_loop("nothing"), wrong_loop("adds siblings too")),
        wrong={name: wrong_loop(name) for name in WRONG},
        equivalent={},
    ),
}
