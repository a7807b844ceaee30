"""Answers to the exercises of chapter 24."""

from typing import Any

from minigen.engine.scheduler import ContinuousScheduler
from minigen.engine.static_batching import allocate_longest
from minigen.kv_cache.block_allocator import blocks_needed
from minigen.sequence import ScheduledChunk, samples_of
from minigen_course.ch24_scheduler import lesson
from tests.answers import Answers, typed_again

SlotScheduler: Any = typed_again(lesson.SlotScheduler)
ChunkingScheduler: Any = typed_again(lesson.ChunkingScheduler)
PreemptingScheduler: Any = typed_again(lesson.PreemptingScheduler)


class OneList:
    """Right: one list for all sequences, pairs instead of chunks, and commit returns None."""

    def __init__(self, manager: Any, max_num_seqs: int, max_num_batched_tokens: int):
        self.manager, self.limit, self.most = manager, max_num_seqs, max_num_batched_tokens
        self.sequences: list[Any] = []

    def add(self, sequence: Any) -> None:
        self.sequences = [*self.sequences, sequence]

    def schedule(self) -> Any:
        batch, left = [], self.most
        for place, sequence in enumerate(self.sequences):
            if sequence.block_ids:
                batch.append((sequence, 1))
                left -= 1
            elif place >= self.limit or left < len(sequence) or not self._start(sequence):
                break
            else:
                batch.append((sequence, len(sequence)))
                left -= len(sequence)
        return batch

    def _start(self, sequence: Any) -> bool:
        total = len(sequence) + sequence.max_output
        free = self.manager.num_available
        if blocks_needed(total, self.manager.block_size) > free:
            return False
        assert self.manager.allocate(sequence, len(sequence)) == sequence.num_wanted
        return bool(self.manager.allocate_slots(sequence, total))

    def commit(self, chunks: Any, tokens: Any) -> None:
        given = iter(tokens)
        for chunk in chunks:
            asks = bool(chunk.samples)
            self.manager.mark_computed(chunk.sequence, chunk.num_tokens)
            if asks:
                chunk.sequence.append(next(given).token_id)
            if chunk.sequence.finish_reason:
                self.abort(chunk.sequence)

    def abort(self, sequence: Any) -> None:
        self.manager.free(sequence)
        self.sequences = [each for each in self.sequences if each is not sequence]


class OneListInChunks(OneList):
    """Right: chunks from the same list."""

    def schedule(self) -> Any:
        batch, left = [], self.most
        for place, sequence in enumerate(self.sequences):
            if not sequence.block_ids and (place >= self.limit or left == 0):
                break
            if not sequence.block_ids and not self._start(sequence):
                break
            num_tokens = min(sequence.num_wanted, left)
            batch.append(ScheduledChunk(sequence, num_tokens))
            left -= num_tokens
        return batch


class CountsBatchSlots(SlotScheduler):
    """Right: a loop over the free batch slots."""

    def schedule(self) -> list[ScheduledChunk]:
        batch = dict.fromkeys(self.running, 1)
        for _ in range(self.max_num_seqs - len(self.running)):
            left = self.max_num_batched_tokens - sum(batch.values())
            if not self.waiting or len(self.waiting[0]) > left:
                break
            num_tokens = allocate_longest(self.manager, self.waiting[0], left)
            if not num_tokens:
                break
            batch[self.waiting[0]] = num_tokens
            self.running += [self.waiting.popleft()]
        return [ScheduledChunk(*each) for each in batch.items()]


class PreemptsFirst(PreemptingScheduler):
    """Right, in two passes: first preempt until all fit, then build the chunks."""

    def schedule(self) -> list[ScheduledChunk]:
        place = 0
        wanted: dict[Any, int] = {}
        while place < len(self.running):
            sequence = self.running[place]
            left = self.max_num_batched_tokens - sum(wanted.values())
            wanted[sequence] = min(sequence.num_wanted, left)
            if self.manager.allocate_slots(sequence, wanted[sequence]):
                place += 1
                continue
            last = self.running.pop()
            wanted.pop(last, None)
            self.manager.free(last)
            self.waiting.insert(0, last)
        left = self.max_num_batched_tokens - sum(wanted.values())
        while self.waiting and left and place < self.max_num_seqs:
            num_tokens = self.manager.allocate(self.waiting[0], left)
            if num_tokens < 1:
                break
            self.running.append(self.waiting.popleft())
            wanted[self.running[-1]] = num_tokens
            left, place = left - num_tokens, place + 1
        return [ScheduledChunk(*each) for each in wanted.items()]


SHARED_LIST: list[Any] = []


def wrong_slot_scheduler(name: str) -> type:
    class Wrong(SlotScheduler):
        def __init__(self, manager: Any, max_num_seqs: int, max_num_batched_tokens: int):
            super().__init__(manager, max_num_seqs, max_num_batched_tokens)
            if name == "one list for all schedulers":
                self.running = SHARED_LIST
                SHARED_LIST.clear()
            if name == "one batch slot too many":
                self.max_num_seqs += 1

        def add(self, sequence: Any) -> None:
            if name == "last come first served":
                self.waiting.appendleft(sequence)
            elif name == "the shortest prompt first":
                self.waiting.append(sequence)
                in_order = sorted(self.waiting, key=len)
                self.waiting.clear()
                self.waiting.extend(in_order)
            else:
                super().add(sequence)

        def schedule(self) -> list[ScheduledChunk]:
            if name == "waits for the last of the batch" and self.running:
                return [ScheduledChunk(each, 1) for each in self.running]
            if name == "prompts in steps of their own" and self.waiting:
                others, self.running = self.running, []
                before, self.max_num_seqs = self.max_num_seqs, self.max_num_seqs - len(others)
                new = super().schedule()
                self.running, self.max_num_seqs = others + self.running, before
                return new or [ScheduledChunk(each, 1) for each in self.running]
            if name == "budget ignored":
                most, self.max_num_batched_tokens = self.max_num_batched_tokens, 10**6
                found = super().schedule()
                self.max_num_batched_tokens = most
                return found
            if name == "a short prompt overtakes" and self.waiting:
                left = self.max_num_batched_tokens - len(self.running)
                if len(self.waiting[0]) > left:
                    self.waiting.rotate(-1)
            if name == "blocks for the prompt only":
                chunks = [ScheduledChunk(each, 1) for each in self.running]
                while self.waiting and len(self.running) < self.max_num_seqs:
                    if not self.manager.allocate(self.waiting[0], len(self.waiting[0])):
                        break
                    self.running.append(self.waiting.popleft())
                    chunks.append(ScheduledChunk(self.running[-1], len(self.running[-1])))
                return chunks
            if name == "one new sequence per step":
                waiting = list(self.waiting)[1:]
                for each in waiting:
                    self.waiting.remove(each)
                found = super().schedule()
                self.waiting.extend(waiting)
                return found
            found = super().schedule()
            return found[:1] if name == "one at a time" else found

        def commit(self, chunks: Any, tokens: Any) -> Any:
            if name == "samples read after mark_computed":
                for chunk in chunks:
                    self.manager.mark_computed(chunk.sequence, chunk.num_tokens)
                for sequence, token in zip(samples_of(chunks), tokens, strict=True):
                    sequence.append(token.token_id)
                return None
            if name == "tokens swapped":
                tokens = tokens[::-1]
            if name == "commits twice":
                super().commit(chunks, tokens)
            if name == "never counts":
                self.manager.mark_computed = lambda *_: None
            if name == "the finished stay":
                for chunk, (sequence, token) in zip(
                    chunks, zip(samples_of(chunks), tokens, strict=True), strict=True
                ):
                    self.manager.mark_computed(chunk.sequence, chunk.num_tokens)
                    sequence.append(token.token_id)
                return None
            return super().commit(chunks, tokens)

        def abort(self, sequence: Any) -> None:
            if name == "blocks never freed":
                queue = self.running if sequence in self.running else self.waiting
                queue.remove(sequence)
            elif name == "abort fails for waiting sequences":
                self.running.remove(sequence)
                self.manager.free(sequence)
            elif name == "abort ignores waiting sequences":
                self.manager.free(sequence)
                if sequence in self.running:
                    self.running.remove(sequence)
            else:
                super().abort(sequence)

    return Wrong


WRONG_SLOT_SCHEDULERS = [
    *("one list for all schedulers", "one batch slot too many", "last come first served"),
    *("the shortest prompt first", "waits for the last of the batch"),
    *("prompts in steps of their own", "budget ignored", "a short prompt overtakes"),
    *("blocks for the prompt only", "one new sequence per step", "one at a time"),
    *("samples read after mark_computed", "tokens swapped", "commits twice", "never counts"),
    *("the finished stay", "blocks never freed", "abort fails for waiting sequences"),
    *("abort ignores waiting sequences",),
]


def wrong_chunks(name: str) -> type:
    class Wrong(ChunkingScheduler):
        def schedule(self) -> Any:
            most = self.max_num_batched_tokens
            chunks: list[ScheduledChunk] = []
            running = list(self.running)
            if name == "prompts before decodes":
                running.sort(key=lambda each: -each.num_wanted)
            if name == "youngest first":
                running.reverse()
            for sequence in running:
                wanted = sequence.num_wanted
                if name == "all tokens again" and wanted > 1:
                    wanted = len(sequence)
                if name == "a prompt at a time" and wanted > 1 and chunks:
                    continue
                num_tokens = wanted if name == "budget for new ones only" else min(wanted, most)
                if name == "half of the budget for a prompt" and wanted > 1:
                    num_tokens = max(1, num_tokens // 2)
                if num_tokens or name == "empty chunks":
                    chunks.append(ScheduledChunk(sequence, num_tokens))
                if name == "budget not counted down":
                    continue
                most -= 1 if name == "a prompt counts as one" else num_tokens
            if name == "decodes are free":
                most = self.max_num_batched_tokens
            if name == "new sequences wait for prompts" and any(c.num_tokens > 1 for c in chunks):
                return chunks
            while self.waiting and most > 0 and len(self.running) < self.max_num_seqs:
                first = self.waiting[0]
                if name == "whole prompts only" and len(first) > most:
                    break
                if name == "allocates before it checks the budget" and most < 2:
                    self.manager.allocate(first, 1)
                num_tokens = allocate_longest(self.manager, first, most)
                if num_tokens == 0:
                    break
                self.running.append(self.waiting.popleft())
                if name != "the first chunk is lost":
                    chunks.append(ScheduledChunk(self.running[-1], num_tokens))
                most -= num_tokens
                if name == "one new sequence per step":
                    break
            return chunks

    return Wrong


WRONG_CHUNKS = [
    *("prompts before decodes", "youngest first", "all tokens again", "a prompt at a time"),
    *("budget for new ones only", "half of the budget for a prompt", "a prompt counts as one"),
    *("budget not counted down", "decodes are free", "new sequences wait for prompts"),
    *("whole prompts only", "allocates before it checks the budget", "the first chunk is lost"),
    *("one new sequence per step",),
]


def wrong_preemption(name: str) -> type:
    class Wrong(PreemptingScheduler):
        def schedule(self) -> Any:
            batch: dict[Any, int] = {}
            in_order = list(self.running)
            if name in ("stays in the batch", "decodes first"):
                in_order.sort(key=lambda each: each.num_wanted > 1)
            for sequence in in_order:
                num_tokens = min(
                    sequence.num_wanted, self.max_num_batched_tokens - sum(batch.values())
                )
                while sequence in self.running:
                    if self.manager.allocate_slots(sequence, num_tokens):
                        batch[sequence] = num_tokens
                        break
                    if name == "skips a sequence without blocks":
                        break
                    if name == "runs without slots":
                        batch[sequence] = num_tokens
                        break
                    self._preempt(batch)
                    if name == "tries once":
                        break
            budget = self.max_num_batched_tokens - sum(batch.values())
            while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
                start = allocate_longest if name == "blocks for the longest answer" else _start
                num_tokens = start(self.manager, self.waiting[0], budget)
                if num_tokens == 0:
                    break
                self.running.append(self.waiting.popleft())
                batch[self.running[-1]] = num_tokens
                budget -= num_tokens
            return [ScheduledChunk(*each) for each in batch.items()]

        def _preempt(self, batch: dict[Any, int]) -> None:
            first = name == "preempts the first"
            victim = self.running.pop(0 if first else -1)
            if name == "preempts the longest":
                self.running.append(victim)
                victim = max(self.running, key=len)
                self.running.remove(victim)
            if name == "preempts all":
                while self.running:
                    self._requeue(self.running.pop(), batch)
            self._requeue(victim, batch)

        def _requeue(self, victim: Any, batch: dict[Any, int]) -> None:
            if name != "keeps its blocks":
                self.manager.free(victim)
            if name == "drops the generated tokens":
                del victim.output_ids[:]
                del victim.token_ids[len(victim.prompt_ids) :]
            if name == "counts as computed":
                victim.num_computed = len(victim) - 1
            if name == "goes to the end of the queue":
                self.waiting.append(victim)
            elif name != "is lost":
                self.waiting.appendleft(victim)
            if name != "stays in the batch":
                batch.pop(victim, None)

    return Wrong


def _start(manager: Any, sequence: Any, budget: int) -> int:
    found: int = manager.allocate(sequence, budget)
    return found


WRONG_PREEMPTIONS = [
    *("skips a sequence without blocks", "runs without slots", "tries once"),
    *("blocks for the longest answer",),
    *("preempts the first", "preempts the longest", "preempts all", "keeps its blocks"),
    *("drops the generated tokens", "counts as computed", "goes to the end of the queue"),
    *("is lost", "stays in the batch"),
]

ANSWERS = {
    "SlotScheduler": Answers(
        right=(OneList, CountsBatchSlots, wrong_slot_scheduler("nothing")),
        wrong={name: wrong_slot_scheduler(name) for name in WRONG_SLOT_SCHEDULERS},
        equivalent={"True -> False": "zip's strict: there is a token for each sample"},
    ),
    "ChunkingScheduler": Answers(
        right=(OneListInChunks, wrong_chunks("nothing")),
        wrong={
            **{name: wrong_chunks(name) for name in WRONG_CHUNKS},
            "prompts are not cut": SlotScheduler,
            "blocks for now only": PreemptingScheduler,
        },
        equivalent={},
    ),
    "PreemptingScheduler": Answers(
        right=(ContinuousScheduler, PreemptsFirst, wrong_preemption("decodes first")),
        wrong={
            **{name: wrong_preemption(name) for name in WRONG_PREEMPTIONS},
            "preempts none": ChunkingScheduler,
        },
        equivalent={},
    ),
}
