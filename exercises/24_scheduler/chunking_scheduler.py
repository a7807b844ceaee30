"""Exercise ChunkingScheduler of chapter 24 (core, 10 points, about 20 minutes).

Write `schedule` with chunked prefill. First, each decoding sequence gets its token. Then partly
computed prompts, in the order of arrival, get as many of the remaining tokens as they need.
(Usually there is at most one. But a request may ask for the logprobs of its prompt, and then
each token of the prompt needs its logits, one number per token of the vocabulary. So such a
prompt gets at most 32 tokens per step, and several may be partly computed.) Then new sequences
start with the rest, while there are batch slots and blocks. No step has more than
`max_num_batched_tokens` tokens. The base class `WholePromptScheduler` is the course's
`SlotScheduler` under another name; build on your own if you like.

Check it:     minigen check exercises/24_scheduler/chunking_scheduler.py
With a hint:  minigen check exercises/24_scheduler/chunking_scheduler.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen import LLM, SamplingParams

    llm = LLM.load(scheduler=mine, max_num_seqs=2, max_num_batched_tokens=8)
    prompts = [f"A short story about {topic}:" for topic in ("rain", "tea", "owls", "salt")]
    for answer in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12)):
        print(repr(answer.text))
    print(llm.describe()["scheduler"])

Harder: A short prompt behind a long one waits for all chunks of the long one. Start waiting
prompts although an earlier one is not complete, and share the remaining tokens of a step among
all of them. What happens to the long prompt's time to first token (TTFT)?
"""

# exercise: minigen_course.ch24_scheduler.lesson.ChunkingScheduler
from minigen.sequence import ScheduledChunk
from minigen_course.ch24_scheduler.lesson import WholePromptScheduler


class ChunkingScheduler(WholePromptScheduler):
    """Continuous batching with chunked prefill: no step exceeds its budget of tokens."""

    def schedule(self) -> list[ScheduledChunk]:
        """Schedule decodes first, then partly computed prompts, then new sequences, in chunks."""
        raise NotImplementedError  # your turn
