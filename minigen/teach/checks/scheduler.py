"""Exercises of chapter 24: seats that are never empty, prompts in chunks, blocks that come back."""

from minigen.teach.checks import schedules
from minigen.teach.exercises import Exercise
from minigen.teach.schedulers import ChunkingScheduler, PreemptingScheduler, SeatScheduler

SCHEDULER_USE = """from minigen import LLM, SamplingParams

llm = LLM.load(scheduler=mine, max_sequences=2{sizes})
prompts = [f"A short story about {{topic}}:" for topic in ("rain", "tea", "owls", "salt")]
for answer in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12)):
    print(repr(answer.text))
print(llm.describe()["scheduler"])"""

EXERCISES = (
    Exercise(
        "SeatScheduler",
        SeatScheduler,
        (
            schedules.one_request_alone,
            schedules.two_run_together,
            schedules.a_seat_that_is_left_is_taken_at_once,
            schedules.nobody_has_a_seat_too_many,
            schedules.a_prompt_waits_until_it_fits_into_a_step,
            schedules.who_begins_has_blocks_for_its_longest_answer,
            schedules.who_is_given_up_leaves_seat_and_blocks,
            schedules.two_schedulers_share_nothing,
            schedules.forty_find_their_seats,
        ),
        (
            "Keep a queue of who waits and a list of who runs. next_batch gives one token to each "
            "who runs, Chunk(sequence, 1), and then looks at the first of the queue, again and "
            "again, until it cannot begin.",
            "It begins by begin_with_room(self.manager, sequence, budget), of "
            "minigen.teach.schedulers, which says how many tokens to compute, 0 if there is no "
            "room. Look at seats and at the budget before: what has begun holds blocks.",
            "In commit, ask samples_of(chunks) who gets a token before self.manager.advance counts "
            "the chunks as computed. sequence.append(token.token_id) sets finish_reason at the "
            "end; then release the blocks, and leave the seat.",
        ),
        "Write continuous batching. Whoever runs gets one token in each step. Whoever waits "
        "begins, in the order of arrival, as soon as there is a seat, its whole prompt fits into "
        "what is left of the step's tokens, and there are blocks for its longest answer "
        "(`begin_with_room` of `minigen.teach.schedulers` sees to the blocks). Nobody overtakes: "
        "if the first of the queue cannot begin, all wait. Whoever has finished leaves seat and "
        "blocks in `commit`.",
        SCHEDULER_USE.format(sizes=""),
        "A prompt longer than a step's tokens never begins here, and blocks all behind it. Let "
        "such a one in alone, or refuse it in `add`: which of the two would you want of a server?",
    ),
    Exercise(
        "ChunkingScheduler",
        ChunkingScheduler,
        (
            schedules.one_request_alone,
            schedules.a_long_prompt_goes_in_chunks_beside_decodes,
            schedules.who_decodes_goes_before_prompts,
            schedules.what_is_left_of_a_step_goes_to_the_next,
            schedules.a_full_step_lets_nobody_in,
            schedules.seats_and_blocks_still_hold,
            schedules.two_schedulers_share_nothing,
            schedules.forty_go_in_chunks,
        ),
        (
            "sequence.num_wanted is how many tokens are still to be computed: 1 for whoever "
            "decodes, more for a prompt under way. Give min(num_wanted, budget).",
            "Go through those who run in the order of their arrival. Nobody who decodes comes away "
            "empty then: a prompt that takes all that is left came after them.",
            "Who begins gets begin_with_room(self.manager, sequence, budget) tokens, the first "
            "chunk. Let nobody begin when the budget is 0.",
        ),
        "Write `next_batch` with chunks. First each who decodes gets its token; then prompts that "
        "are under way, in the order of arrival, get as many tokens as are left; then newcomers "
        "begin with what is left, while there are seats and blocks. No step has more than "
        "`max_batch_tokens`. The base class is the package's `SeatScheduler` by another "
        "name; build on your own if you like.",
        SCHEDULER_USE.format(sizes=", max_batch_tokens=8"),
        "A short prompt behind a long one waits for all of its chunks. Share what is left of a "
        "step among the prompts under way. What becomes of the long one's time to first token?",
    ),
    Exercise(
        "PreemptingScheduler",
        PreemptingScheduler,
        (
            schedules.one_request_alone,
            schedules.a_long_prompt_goes_in_chunks_beside_decodes,
            schedules.room_for_now_is_enough_to_begin,
            schedules.the_last_who_came_gives_way,
            schedules.it_comes_back_first_and_is_computed_anew,
            schedules.the_last_gives_its_own_way,
            schedules.who_gives_way_leaves_the_step,
            schedules.two_schedulers_share_nothing,
            schedules.forty_in_too_little_memory,
        ),
        (
            "Now self.manager.begin(sequence, budget) begins with room for what is there, and "
            "self.manager.reserve(sequence, num_tokens) makes slots before each step; it returns "
            "False where blocks lack.",
            "To preempt: take the last of those who run, self.manager.release(it), and put it in "
            "front of the queue. release also sets its num_computed to 0, so that its text, with "
            "what it wrote already, is computed again when it begins. Then try to reserve again.",
            "The last may be the very sequence that asks; then it is not in the step. And if you "
            "do not go in the order of arrival, it may be one that has been given its token in "
            "this step already: take that back.",
        ),
        "Write `next_batch` with preemption. Whoever begins needs room for its tokens so far only. "
        "Each step reserves slots for its next tokens; where blocks lack, the last who came gives "
        "its own back and waits again, in front of all who came later, until there is enough. Who "
        "gave way is not in the step.",
        SCHEDULER_USE.format(sizes=", num_blocks=4, block_size=8"),
        "Recomputing costs arithmetic. vLLM could also copy the victim's blocks to the host's "
        "memory and back. From how many tokens on would that be faster, given a bus of 25 GB/s, "
        "23 KB of keys and values a token, and 5,000 tokens a second of prefill?",
    ),
)
