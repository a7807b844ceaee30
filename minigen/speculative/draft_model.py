"""Drafts of a smaller model: it writes a few tokens, which the model then verifies in one step.

It draws with the same random numbers as the model, so where both find the same tokens likely, they
draw the same ones. Source: Leviathan et al. 2022; Chen et al. 2023.
"""

from collections.abc import Sequence as SequenceOf

from minigen.kv_cache.block_manager import BlockManager
from minigen.protocols import Runner, Sampler
from minigen.sequence import ScheduledChunk, Sequence


class DraftModelProposer:
    """Follows each sequence with a copy in a KV cache of its own.

    Of the copy's computed tokens those stay that are still right; drafts that were wrong are
    computed over. No draft follows a sequence of more than `max_model_len` tokens, the draft
    model's context.
    """

    def __init__(
        self,
        runner: Runner,
        manager: BlockManager,
        sampler: Sampler,
        max_num_batched_tokens: int,
        max_model_len: int,
    ):
        self.runner, self.manager, self.sampler = runner, manager, sampler
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = min(max_model_len, manager.num_tokens)
        self._copies: dict[Sequence, Sequence] = {}
        self._num_right: dict[Sequence, int] = {}  # tokens of the copy that are the sequence's own

    def propose(
        self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]
    ) -> list[SequenceOf[int]]:
        """Return drafts for each sequence; none where its copy finds no blocks."""
        copies = [self._followed(each) for each in sequences]
        drafts: list[list[int]] = [[] for _ in sequences]
        active = set(range(len(sequences)))
        while active:
            chunks: list[ScheduledChunk] = []
            members: list[int] = []
            budget = self.max_num_batched_tokens
            for index in sorted(active, key=lambda each: copies[each].num_wanted):
                num_tokens = self._reserve(copies[index], budget) if budget else 0
                if num_tokens:
                    chunks.append(ScheduledChunk(copies[index], num_tokens))
                    members.append(index)
                    budget -= num_tokens
                elif budget:
                    active.discard(index)
            if not chunks:
                break
            drawn = self._run(chunks)
            for index, chunk in zip(members, chunks, strict=True):
                if chunk.sequence not in drawn:
                    continue
                token_id = drawn[chunk.sequence]
                drafts[index].append(token_id)
                chunk.sequence.output_ids.append(token_id)
                chunk.sequence.token_ids.append(token_id)
                if len(drafts[index]) == counts[index] or token_id in chunk.sequence.stop_ids:
                    active.discard(index)
        return list(drafts)

    def end(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence's copy."""
        copy = self._copies.pop(sequence, None)
        self._num_right.pop(sequence, None)
        if copy is not None:
            self.manager.free(copy)

    def _run(self, chunks: list[ScheduledChunk]) -> dict[Sequence, int]:
        """Compute chunks; return the next token of each copy that is computed to its end."""
        logits = self.runner.logits(chunks)
        samples = [each for chunk in chunks for each in chunk.samples]
        tokens = self.sampler(logits, samples) if samples else []
        for chunk in chunks:
            self.manager.mark_computed(chunk.sequence, chunk.num_tokens)
        return {each: token.token_id for each, token in zip(samples, tokens, strict=True)}

    def _reserve(self, copy: Sequence, budget: int) -> int:
        """Return how many tokens of a copy have slots for the next step; 0 if there are none."""
        if len(copy) > self.max_model_len:
            return 0
        if copy not in self.manager.rows:
            return self.manager.allocate(copy, budget)
        num_tokens = min(copy.num_wanted, budget)
        return num_tokens if self.manager.allocate_slots(copy, num_tokens) else 0

    def _followed(self, sequence: Sequence) -> Sequence:
        """Return the sequence's copy, with exactly its tokens."""
        copy = self._copies.get(sequence)
        if copy is None:
            copy = self._copies[sequence] = sequence.after(())
            copy.num_computed = copy.num_cached_blocks = 0
            copy.processors, copy.prompt_logprobs = (), []
            self._num_right[sequence] = 0
        right = self._num_right[sequence]
        longest = min(len(copy), len(sequence))
        while right < longest and copy.token_ids[right] == sequence.token_ids[right]:
            right += 1
        copy.num_computed = min(copy.num_computed, right)
        copy.output_ids, copy.token_ids = list(sequence.output_ids), list(sequence.token_ids)
        self._num_right[sequence] = len(sequence)
        return copy
