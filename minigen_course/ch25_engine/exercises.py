"""Checks of chapter 25: a loop that loses no token, repeats none, and gives each to its own."""

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
        expect_equal(len(sequence.output_ids), count, f"tokens of the answer {after}")
    stage.expect_whole()


def a_step_without_work_does_nothing(part: Any) -> None:
    """nobody has come; and all have been answered:"""
    stage = Stage(part)
    expect_equal(stage.step(), 0, "what a step with nobody returns")
    stage.arrive(2, 1)
    stage.step()
    expect_equal(stage.step(), 0, "what a step after the last answer returns")


def a_chunk_of_a_prompt_gives_no_token(part: Any) -> None:
    """a prompt of 20 tokens in steps of 8: only the third step leads to a token:"""
    stage = Stage(part, budget=8)
    stage.arrive(20, 2)
    for number, count in enumerate((0, 0, 1, 2)):
        stage.step()
        expect_equal(len(stage.delivered), count, f"tokens delivered after step {number}")
    stage.expect_whole()


def each_row_goes_to_its_own(part: Any) -> None:
    """five requests that come and end at different steps, a long prompt among them:"""
    stage = Stage(part, budget=12)
    for prompt, output in ((3, 4), (25, 3), (2, 9)):
        stage.arrive(prompt, output)
    stage.step()
    stage.arrive(4, 1)
    stage.step()
    stage.arrive(1, 5)
    stage.drain()


def several_answers_to_one_prompt(part: Any) -> None:
    """three answers to one prompt, which fork from it, beside another request:"""
    stage = Stage(part)
    stage.arrive(6, 3, n=3)
    stage.arrive(2, 5)
    expect_equal(sorted(stage.loop.live), [1, 2, 3, 4], "ids in live: siblings are live, too")
    stage.drain()


def who_was_preempted_repeats_nothing(part: Any) -> None:
    """8 blocks of 4 tokens and four requests of up to 20: some are computed twice:"""
    stage = Stage(part, num_blocks=8)
    for _ in range(4):
        stage.arrive(8, 12)
    stage.drain()


def an_id_is_free_again_when_its_request_has_finished(part: Any) -> None:
    """a second request of the same id: refused while the first is live, welcome afterwards:"""
    stage = Stage(part)
    stage.arrive(3, 2, n=2)
    for number in (1, 2):
        try:
            stage.arrive(4, 1, number=number)
        except RequestError:
            continue
        raise Wrong(f"add took id {number}, which is in use; it should raise RequestError.")
    stage.step()
    stage.step()
    stage.sequences.clear()
    stage.delivered.clear()
    stage.arrive(4, 1, number=1)
    stage.drain()


def who_is_given_up_gets_no_more(part: Any) -> None:
    """one who runs and one who has just come are aborted, and one who does not exist:"""
    stage = Stage(part)
    running, _, waiting = (stage.arrive(3, 4) for _ in range(3))
    stage.step()
    late = stage.arrive(2, 2)
    for each in (running, late):
        each.finish_reason = "abort"
        stage.calls = []
        stage.loop.abort(each.sequence_id)
        expect_equal(stage.calls, ["abort"], "what abort calls of the scheduler")
    expect_equal(sorted(stage.loop.live), [2, waiting.sequence_id], "ids in live after two aborts")
    for number in (running.sequence_id, 99):
        try:
            stage.loop.abort(number)
        except RequestError:
            continue
        raise Wrong(f"abort({number}) of a request that is not live should raise RequestError.")
    stage.drain()


EXERCISES = (
    Exercise(
        "StepLoop",
        StepLoop,
        (
            one_answer_is_delivered_token_by_token,
            a_step_without_work_does_nothing,
            a_chunk_of_a_prompt_gives_no_token,
            each_row_goes_to_its_own,
            several_answers_to_one_prompt,
            who_was_preempted_repeats_nothing,
            an_id_is_free_again_when_its_request_has_finished,
            who_is_given_up_gets_no_more,
        ),
        (
            "A step is four calls: scheduler.schedule(), runner.logits(chunks), "
            "sampler(logits, samples), scheduler.commit(chunks, tokens). Without chunks it ends "
            "after the first.",
            "samples_of(chunks) says whose the rows of the logits are. Ask it before commit, "
            "which counts the chunks as computed. Where it is empty, nobody samples, but the "
            "chunks must still be committed.",
            "commit returns (sequence, token) pairs. Those whose finish_reason is set leave live; "
            "all are delivered. Siblings (sequence.siblings) are live from the start, each by its "
            "own id, but the scheduler is given the first only.",
        ),
        "Write the loop. `add` queues a sequence; `step` asks the scheduler who runs, has the "
        "runner compute it and the sampler choose, commits, and delivers each token, once; it "
        "returns how many tokens went through the model. Whoever has finished is forgotten, so "
        "that its id is free again. `abort` lets somebody go. `samples_of` is in "
        "`minigen.sequence`, `RequestError` in `minigen.errors`.",
        """from minigen import SamplingParams
from minigen_course import load_model
from minigen_course.ch25_engine.lesson import answers_by_loop

llm = load_model()
prompts = [f"A short story about {topic}:" for topic in ("rain", "tea", "owls")]
for text in answers_by_loop(llm, mine, prompts, SamplingParams(temperature=0, max_tokens=12)):
    print(repr(text))""",
        "A client may leave while its token is being delivered, and `deliver` then calls `abort`, "
        "perhaps of another request whose token has been chosen in the same step. What must `step` "
        "look at before each delivery?",
    ),
)
