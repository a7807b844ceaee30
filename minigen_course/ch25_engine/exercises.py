"""Exercise of chapter 25: an engine loop that delivers every token once, to its own request."""

from typing import Any

from minigen.errors import RequestError
from minigen_course.ch25_engine.lesson import StepLoop
from minigen_course.grading.exercise import Exercise
from minigen_course.grading.messages import Wrong, expect_equal
from minigen_course.lab.stage import Stage


def one_answer_is_delivered_token_by_token(part: Any) -> None:
    """a prompt of 5 tokens and an answer of 3:"""
    stage = Stage(part)
    sequence = stage.arrive(5, 3)
    expect_equal(sorted(stage.loop.live), [1], "ids in live after add")
    for count in (1, 2, 3):
        stage.step()
        after = f"after step {count - 1}"
        expect_equal(len(stage.delivered), count, f"tokens delivered {after}")
        expect_equal(len(sequence.output_ids), count, f"tokens in the answer {after}")
    stage.expect_whole()


def a_step_without_work_does_nothing(part: Any) -> None:
    """a step before the first request, and a step after the last answer:"""
    stage = Stage(part)
    expect_equal(stage.step(), 0, "what a step without requests returns")
    stage.arrive(2, 1)
    stage.step()
    expect_equal(stage.step(), 0, "what a step after the last answer returns")


def a_chunk_of_a_prompt_gives_no_token(part: Any) -> None:
    """a prompt of 20 tokens in steps of 8 tokens: the third step gives the first token:"""
    stage = Stage(part, budget=8)
    stage.arrive(20, 2)
    for number, count in enumerate((0, 0, 1, 2)):
        stage.step()
        expect_equal(len(stage.delivered), count, f"tokens delivered after step {number}")
    stage.expect_whole()


def each_row_goes_to_its_own_sequence(part: Any) -> None:
    """five requests that arrive and finish in different steps, one of them with a long prompt:"""
    stage = Stage(part, budget=12)
    for prompt, output in ((3, 4), (25, 3), (2, 9)):
        stage.arrive(prompt, output)
    stage.step()
    stage.arrive(4, 1)
    stage.step()
    stage.arrive(1, 5)
    stage.drain()


def several_answers_to_one_prompt(part: Any) -> None:
    """three answers to one prompt, which fork after it, next to another request:"""
    stage = Stage(part)
    stage.arrive(6, 3, n=3)
    stage.arrive(2, 5)
    expect_equal(sorted(stage.loop.live), [1, 2, 3, 4], "ids in live (siblings are live too)")
    stage.drain()


def a_preempted_request_repeats_no_token(part: Any) -> None:
    """8 blocks of 4 tokens, four requests of up to 20 tokens: some are preempted and recomputed:"""
    stage = Stage(part, num_blocks=8)
    for _ in range(4):
        stage.arrive(8, 12)
    stage.drain()


def an_id_is_free_again_when_its_request_has_finished(part: Any) -> None:
    """a second request with the same id: rejected while the first is live, accepted afterwards:"""
    stage = Stage(part)
    stage.arrive(3, 2, n=2)
    for number in (1, 2):
        try:
            stage.arrive(4, 1, number=number)
        except RequestError:
            continue
        raise Wrong(f"add accepted id {number}, which is in use; it should raise RequestError.")
    stage.step()
    stage.step()
    stage.sequences.clear()
    stage.delivered.clear()
    stage.arrive(4, 1, number=1)
    stage.drain()


def an_aborted_request_gets_no_more_tokens(part: Any) -> None:
    """a running request, a request that was just added and an unknown one are aborted:"""
    stage = Stage(part)
    running, _, waiting = (stage.arrive(3, 4) for _ in range(3))
    stage.step()
    late = stage.arrive(2, 2)
    for each in (running, late):
        each.finish_reason = "abort"
        stage.calls = []
        stage.loop.abort(each.sequence_id)
        expect_equal(stage.calls, ["abort"], "the calls of the scheduler in abort")
    expect_equal(sorted(stage.loop.live), [2, waiting.sequence_id], "ids in live after two aborts")
    for number in (running.sequence_id, 99):
        try:
            stage.loop.abort(number)
        except RequestError:
            continue
        raise Wrong(
            f"abort({number}) was accepted, but this id is not live; it should raise RequestError."
        )
    stage.drain()


EXERCISES = (
    Exercise(
        "StepLoop",
        StepLoop,
        (
            one_answer_is_delivered_token_by_token,
            a_step_without_work_does_nothing,
            a_chunk_of_a_prompt_gives_no_token,
            each_row_goes_to_its_own_sequence,
            several_answers_to_one_prompt,
            a_preempted_request_repeats_no_token,
            an_id_is_free_again_when_its_request_has_finished,
            an_aborted_request_gets_no_more_tokens,
        ),
        (
            "A step is four calls: scheduler.schedule(), runner.logits(chunks), "
            "sampler(logits, samples), scheduler.commit(chunks, tokens). Without chunks the step "
            "ends after the first call.",
            "samples_of(chunks) returns the sequence of each row of the logits. Call it before "
            "commit, which counts the chunks as computed. If it is empty, do not call the sampler, "
            "but still commit the chunks.",
            "commit returns (sequence, token) pairs. Deliver every pair, and remove the sequences "
            "whose finish_reason is set from live. Siblings (sequence.siblings) are in live from "
            "the start, each under its own id, but only the first sequence is added to the "
            "scheduler.",
        ),
        "Write the engine's loop. `add` queues a sequence. `step` gets the chunks from the "
        "scheduler, computes the logits with the runner, chooses tokens with the sampler, commits "
        "them, and delivers each token once. It returns how many tokens went through the model. "
        "Finished sequences leave `live`, so that their ids are free again. `abort` removes an "
        "unfinished sequence. `add` raises `RequestError` if an id is in use, and `abort` raises "
        "it if the id is not live. `samples_of` is in `minigen.sequence`, `RequestError` in "
        "`minigen.errors`.",
        """from minigen import SamplingParams
from minigen_course import load_model
from minigen_course.ch25_engine.lesson import answers_by_loop

llm = load_model()
prompts = [f"A short story about {topic}:" for topic in ("rain", "tea", "owls")]
for text in answers_by_loop(llm, mine, prompts, SamplingParams(temperature=0, max_tokens=12)):
    print(repr(text))""",
        "A client may disconnect while its token is delivered. Then `deliver` calls `abort`, "
        "perhaps for another request whose token was chosen in the same step. What must `step` "
        "check before each delivery?",
    ),
)
