# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises of chapter 24
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/24_scheduler.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/24_scheduler.ipynb)
#
# The chapter: [Continuous batching](../notebooks/24_scheduler.ipynb). Its exercises take about 100 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `SlotScheduler` | core | 10 | 25 min |
# | `ChunkingScheduler` | core | 10 | 20 min |
# | `PreemptingScheduler` | stretch | 15 | 30 min |
# | bug hunt: `preempted` | core | 10 | 25 min |
#
# Replace the line that raises NotImplementedError, and run the cell below it: `check` runs your part in a process of its own and names the first mistake. `hint=1` adds a hint to that, `hint=2` a clearer one.

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
# %load_ext minigen_course
import torch

from minigen_course import check, using

# %% [markdown]
# ## SlotScheduler
#
# *Core, 10 points, about 25 minutes.*
#
# Write continuous batching. In each step, every running sequence gets one token. Waiting sequences start in the order of arrival. A sequence starts as soon as a slot in the batch is free, its whole prompt fits into the tokens that are left in the step, and there are blocks for its longest answer (`allocate_longest` of `minigen.engine.static_batching` allocates the blocks). No sequence overtakes another: if the first of the queue cannot start, all wait. `commit` removes finished sequences from the batch and frees their blocks.

# %%
# exercise: minigen_course.ch24_scheduler.lesson.SlotScheduler
from collections.abc import Sequence as SequenceOf

from minigen.kv_cache.block_manager import BlockManager
from minigen.sequence import SampledToken, ScheduledChunk, Sequence


class SlotScheduler:
    """Continuous batching: when a sequence finishes, the next takes its slot in the batch at once.

    Prompts are computed whole, in the order of arrival. A sequence starts only with blocks for its
    longest answer. At most `max_num_seqs` sequences run, and a step has at most
    `max_num_batched_tokens` tokens.
    """

    def __init__(self, manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        raise NotImplementedError  # your turn

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the end of the queue."""
        raise NotImplementedError  # your turn

    def schedule(self) -> list[ScheduledChunk]:
        """Schedule a token per running sequence, then whole prompts, within all limits."""
        raise NotImplementedError  # your turn

    def commit(
        self, chunks: SequenceOf[ScheduledChunk], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]:
        """Count the chunks as computed, append each sample's token, and return these pairs."""
        raise NotImplementedError  # your turn

    def abort(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or running, and free its blocks."""
        raise NotImplementedError  # your turn


# %%
mine = check(24, SlotScheduler=SlotScheduler)

# %% [markdown]
# In the running engine:

# %%
from minigen import LLM, SamplingParams

llm = LLM.load(scheduler=mine, max_num_seqs=2)
prompts = [f"A short story about {topic}:" for topic in ("rain", "tea", "owls", "salt")]
for answer in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12)):
    print(repr(answer.text))
print(llm.describe()["scheduler"])

# %% [markdown]
# **Harder.** A prompt longer than `max_num_batched_tokens` never starts here, and blocks all requests behind it. Reject it in `add`, with a `RequestError` of `minigen.errors` that says the limit. It cannot run alone in a larger step, because the engine refuses such a step: what did the runner allocate for `max_num_batched_tokens` tokens when it was built?

# %% [markdown]
# ## ChunkingScheduler
#
# *Core, 10 points, about 20 minutes.*
#
# Write `schedule` with chunked prefill. First, each decoding sequence gets its token. Then partly computed prompts, in the order of arrival, get as many of the remaining tokens as they need. (Usually there is at most one. But a request may ask for the logprobs of its prompt, and then each token of the prompt needs its logits, one number per token of the vocabulary. So such a prompt gets at most 32 tokens per step, and several may be partly computed.) Then new sequences start with the rest, while there are batch slots and blocks. No step has more than `max_num_batched_tokens` tokens. The base class `WholePromptScheduler` is the course's `SlotScheduler` under another name; build on your own if you like.

# %%
# exercise: minigen_course.ch24_scheduler.lesson.ChunkingScheduler
from minigen.sequence import ScheduledChunk
from minigen_course.ch24_scheduler.lesson import WholePromptScheduler


class ChunkingScheduler(WholePromptScheduler):
    """Continuous batching with chunked prefill: no step exceeds its budget of tokens."""

    def schedule(self) -> list[ScheduledChunk]:
        """Schedule decodes first, then partly computed prompts, then new sequences, in chunks."""
        raise NotImplementedError  # your turn


# %%
mine = check(24, ChunkingScheduler=ChunkingScheduler)

# %% [markdown]
# In the running engine:

# %%
from minigen import LLM, SamplingParams

llm = LLM.load(scheduler=mine, max_num_seqs=2, max_num_batched_tokens=8)
prompts = [f"A short story about {topic}:" for topic in ("rain", "tea", "owls", "salt")]
for answer in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12)):
    print(repr(answer.text))
print(llm.describe()["scheduler"])

# %% [markdown]
# **Harder.** A short prompt behind a long one waits for all chunks of the long one. Start waiting prompts although an earlier one is not complete, and share the remaining tokens of a step among all of them. What happens to the long prompt's time to first token (TTFT)?

# %% [markdown]
# ## PreemptingScheduler
#
# *Stretch, 15 points, about 30 minutes.*
#
# Write `schedule` with preemption. A sequence starts with blocks for its tokens so far only. Each step allocates KV-cache slots for the next tokens of each running sequence. If there are not enough blocks, the last sequence to arrive is preempted, and then the next to last, until there are enough. A preempted sequence frees its blocks, and waits again in front of all that arrived later. It is not in the step.

# %%
# exercise: minigen_course.ch24_scheduler.lesson.PreemptingScheduler
from minigen.sequence import ScheduledChunk
from minigen_course.ch24_scheduler.lesson import WholePromptScheduler


class PreemptingScheduler(WholePromptScheduler):
    """Chunked prefill and preemption: a sequence has only the blocks that it needs now.

    If blocks run out, the last sequence to arrive is preempted: it frees its blocks, waits in front
    of all that arrive later, and is computed again, except for what the prefix cache still holds.
    """

    def schedule(self) -> list[ScheduledChunk]:
        """Schedule chunks, with KV slots for the next tokens only; preempted sequences get none."""
        raise NotImplementedError  # your turn


# %%
mine = check(24, PreemptingScheduler=PreemptingScheduler)

# %% [markdown]
# In the running engine:

# %%
from minigen import LLM, SamplingParams

llm = LLM.load(scheduler=mine, max_num_seqs=2, num_blocks=4, block_size=8)
prompts = [f"A short story about {topic}:" for topic in ("rain", "tea", "owls", "salt")]
for answer in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12)):
    print(repr(answer.text))
print(llm.describe()["scheduler"])

# %% [markdown]
# **Harder.** The chapter compares recomputation with copies to the host's memory and back, for Llama-3-8B in bfloat16 on an H100 and a victim of 2,048 tokens. Compare them for a victim of 100 tokens in blocks of 16, twice. First it is computed again in a step of its own. Then it is computed in the step in which 32 sequences of 1,000 tokens decode anyway: the bytes and FLOPs of both add up, but the step reads the weights only once. (`prefill_step`, `decode_step` and `Step` of `minigen_course.lab.cost_model` compute this.) How much longer does the victim make that step?

# %% [markdown]
# ## A bug hunt: preempted
#
# *Core, 10 points, about 25 minutes.*
#
# **The report.** *Under load, answers repeat themselves in the middle and then stop too early. The same questions, asked again at night, get perfect answers.* FastDeploy prefilled only the prompt when a preempted request started again (pull request 3080: "we should prefill all the tokens"). vLLM's Gaudi plugin did the same, and also counted output tokens twice (pull request 524). vLLM has a report of incomplete answers after recomputation (issue 16832).
#
# Find the mistake in the part below. Catch it with a test that fails on this part and passes on every correct one. Then mend the part in the same cell.

# %%
# hunt: minigen_course.ch24_scheduler.hunt
from collections import deque
from collections.abc import Sequence as SequenceOf
from typing import Any

from minigen.kv_cache.block_manager import BlockManager
from minigen.sequence import SampledToken, ScheduledChunk, Sequence, samples_of


class PlainScheduler:
    """First come, first served, one answer per prompt; the last sequence to arrive is preempted."""

    def __init__(self, manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.manager = manager
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> list[ScheduledChunk]:
        chunks: list[ScheduledChunk] = []
        budget = self.max_num_batched_tokens
        for sequence in list(self.running):
            num_tokens = min(sequence.num_wanted, budget)
            while sequence in self.running and not self.manager.allocate_slots(
                sequence, num_tokens
            ):
                self.preempt(self.running[-1])
            if sequence in self.running and num_tokens:
                chunks.append(ScheduledChunk(sequence, num_tokens))
                budget -= num_tokens
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            num_tokens = self.manager.allocate(self.waiting[0], budget)
            if num_tokens == 0:
                break
            self.running.append(self.waiting.popleft())
            chunks.append(ScheduledChunk(self.running[-1], num_tokens))
            budget -= num_tokens
        return chunks

    def preempt(self, victim: Sequence) -> None:
        """Free its blocks; it starts again once there are enough, before all waiting sequences."""
        self.running.remove(victim)
        self.manager.free(victim)
        victim.token_ids = list(victim.prompt_ids)
        self.waiting.appendleft(victim)

    def commit(
        self, chunks: SequenceOf[ScheduledChunk], tokens: SequenceOf[SampledToken]
    ) -> list[tuple[Sequence, SampledToken]]:
        progress = list(zip(samples_of(chunks), tokens, strict=True))
        for chunk in chunks:
            self.manager.mark_computed(chunk.sequence, chunk.num_tokens)
        for sequence, token in progress:
            sequence.append(token.token_id)
            if sequence.finish_reason is not None:
                self.abort(sequence)
        return progress

    def abort(self, sequence: Sequence) -> None:
        self.manager.free(sequence)
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)


def test_scheduler(Scheduler: Any) -> None:
    """Assert what every correct scheduler does, and the one above does not.

    `serve_toy(prompts, scheduler=Scheduler, num_blocks=...)` of minigen_course.lab.toy_engine
    runs it.
    """
    raise NotImplementedError  # your turn


# %%
from minigen_course.grading.hunt import hunt

mine = hunt(24, test=test_scheduler, mended=PlainScheduler)
