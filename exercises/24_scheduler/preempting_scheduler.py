"""Exercise PreemptingScheduler of chapter 24 (stretch, 15 points, about 30 minutes).

Write `schedule` with preemption. A sequence starts with blocks for its tokens so far only. Each
step allocates KV-cache slots for the next tokens of each running sequence. If there are not
enough blocks, the last sequence to arrive is preempted, and then the next to last, until there
are enough. A preempted sequence frees its blocks, and waits again in front of all that arrived
later. It is not in the step.

Check it:     minigen check exercises/24_scheduler/preempting_scheduler.py
With a hint:  minigen check exercises/24_scheduler/preempting_scheduler.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen import LLM, SamplingParams

    llm = LLM.load(scheduler=mine, max_num_seqs=2, num_blocks=4, block_size=8)
    prompts = [f"A short story about {topic}:" for topic in ("rain", "tea", "owls", "salt")]
    for answer in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12)):
        print(repr(answer.text))
    print(llm.describe()["scheduler"])

Harder: The chapter compares recomputation with copies to the host's memory and back, for
Llama-3-8B in bfloat16 on an H100 and a victim of 2,048 tokens. Compare them for a victim of 100
tokens in blocks of 16, twice. First it is computed again in a step of its own. Then it is
computed in the step in which 32 sequences of 1,000 tokens decode anyway: the bytes and FLOPs of
both add up, but the step reads the weights only once. (`prefill_step`, `decode_step` and `Step`
of `minigen_course.lab.cost_model` compute this.) How much longer does the victim make that
step?
"""

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
