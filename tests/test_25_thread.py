"""The engine's thread: many callers at once, each answered as if alone, and none left waiting."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from minigen import LLM, SamplingParams
from minigen.engine.dispatcher import Dispatcher
from minigen.engine.engine import Engine
from minigen.engine.engine_thread import EngineThread
from minigen.errors import EngineStoppedError, RequestError
from minigen.outputs import RequestState, TokenDelta
from minigen.sequence import Sequence
from tests.waiting import PATIENCE, wait_until

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@pytest.fixture
def llm(tiny_directory: Path) -> LLM:
    return LLM.load(tiny_directory, weights="float32", max_num_seqs=4, block_size=4, num_blocks=80)


@pytest.fixture
def thread(llm: LLM) -> Iterator[EngineThread]:
    with EngineThread(llm.engine) as running:
        yield running
    assert not running._thread.is_alive()


def ask(llm: LLM, *prompts: str, params: SamplingParams = GREEDY) -> list[RequestState]:
    return llm.process_requests(prompts, params)


def is_whole(llm: LLM) -> bool:
    manager = llm.engine.scheduler.manager  # type: ignore[attr-defined]
    return not manager.rows and manager.num_available == manager.allocator.num_blocks


def side_by_side(jobs: list[Callable[[], Any]]) -> None:
    """Run each job in a thread; raises if one fails, or has not ended in time."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], Any]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE)
    assert not any(worker.is_alive() for worker in workers), "a waiting caller hangs"
    if errors:
        raise errors[0]


def take(thread: EngineThread, answers: list[RequestState]) -> list[int]:
    return [delta.token_id for delta in thread.run(answers)]


class Inbox:
    """A `deliver` that stores its events."""

    def __init__(self) -> None:
        self.events: Queue[TokenDelta | Exception] = Queue()

    def __call__(self, event: TokenDelta | Exception) -> None:
        self.events.put(event)

    def next(self) -> TokenDelta | Exception:
        return self.events.get(timeout=PATIENCE)

    def last(self) -> TokenDelta | Exception:
        """Return the last event: a finishing delta, or an exception."""
        while True:
            event = self.next()
            if isinstance(event, Exception) or event.finish_reason is not None:
                return event


def test_callers_at_once_get_each_their_own_tokens(llm: LLM) -> None:
    prompts = [f"prompt {number} " * (1 + number % 3) for number in range(12)]
    expected = [output.token_ids for output in llm.generate(prompts, GREEDY)]
    found: dict[int, list[int]] = {}
    with EngineThread(llm.engine) as thread:

        def job(number: int) -> Callable[[], None]:
            answers = ask(llm, prompts[number])
            return lambda: found.update({number: take(thread, answers)})

        side_by_side([job(number) for number in range(12)])
    assert [found[number] for number in range(12)] == expected
    assert is_whole(llm)


def test_a_slow_reader_loses_no_token(llm: LLM, thread: EngineThread) -> None:
    (answer,) = answers = ask(llm, "slow")
    deltas = thread.run(answers)
    sequence = answer.sequence
    wait_until(lambda: sequence.finish_reason is not None)  # all tokens exist before any is read
    assert [delta.token_id for delta in deltas] == sequence.output_ids
    assert len(sequence.output_ids) == 10


def test_one_iterator_yields_the_tokens_of_all_siblings(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=10, ignore_eos=True)
    expected = [choice.token_ids for choice in llm.generate("abc", params).choices]
    with EngineThread(llm.engine) as thread:
        found: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for delta in thread.run(ask(llm, "abc", params=params)):
            found[delta.choice].append(delta.token_id)
    assert list(found.values()) == expected


def test_closing_the_iterator_frees_the_blocks(llm: LLM, thread: EngineThread) -> None:
    answers = ask(llm, "abc", params=SamplingParams(n=3, max_tokens=100, ignore_eos=True))
    deltas = thread.run(answers)
    next(deltas)
    deltas.close()
    wait_until(lambda: not llm.engine.live)
    assert [each.sequence.finish_reason for each in answers] == ["abort"] * 3
    wait_until(lambda: is_whole(llm))


def test_closing_an_unread_iterator_aborts_the_request(llm: LLM, thread: EngineThread) -> None:
    (answer,) = answers = ask(llm, "abc", params=LONG)
    thread.run(answers).close()
    wait_until(lambda: answer.sequence.finish_reason == "abort")


def test_collecting_an_iterator_aborts_its_request(llm: LLM, thread: EngineThread) -> None:
    (answer,) = answers = ask(llm, "abc", params=LONG)
    for _ in thread.run(answers):
        break
    wait_until(lambda: answer.sequence.finish_reason == "abort")


def test_an_aborted_request_gets_no_more_events(llm: LLM, thread: EngineThread) -> None:
    (answer,) = answers = ask(llm, "abc", params=LONG)
    inbox = Inbox()
    thread.dispatcher.submit(answers, inbox)
    inbox.next()
    thread.dispatcher.abort(answers)
    wait_until(lambda: answer.sequence.finish_reason == "abort")
    assert len(take(thread, ask(llm, "abd"))) == 10
    assert inbox.events.qsize() == len(answer.sequence.output_ids) - 1
    assert not thread.dispatcher._subscriptions


def test_an_abort_of_finished_or_unknown_answers_does_nothing(
    llm: LLM, thread: EngineThread
) -> None:
    answers = ask(llm, "abc")
    thread.dispatcher.abort(answers)
    take(thread, answers)
    thread.dispatcher.abort(answers)
    assert answers[0].sequence.finish_reason == "length"
    assert thread.dispatcher.commands.empty()


def test_an_id_is_used_once(llm: LLM, thread: EngineThread) -> None:
    first, second = ask(llm, "abc", params=LONG), ask(llm, "abc")
    second[0].sequence.sequence_id = first[0].sequence.sequence_id
    deltas = thread.run(first)
    with pytest.raises(RequestError, match=r"ids \[1\] are in use"):
        list(thread.run(second))
    family = ask(llm, "abc", params=SamplingParams(n=3))
    family[2].sequence.sequence_id = family[0].sequence.sequence_id
    with pytest.raises(RequestError, match="repeated"):
        list(thread.run(family))
    assert len(list(deltas)) == 100, "the first continues unchanged"


def test_an_engine_with_unfinished_requests_gets_no_thread(llm: LLM) -> None:
    stream = llm.stream("abc", LONG)
    next(stream)
    with pytest.raises(RequestError, match="1 unfinished requests"):
        EngineThread(llm.engine)
    stream.close()  # type: ignore[attr-defined]
    EngineThread(llm.engine).close()


class Fragile:
    """A runner that fails in every batch with one of the `doomed`."""

    def __init__(self, runner: Any):
        self.runner, self.doomed = runner, set[int]()

    def logits(self, chunks: Any) -> Any:
        if any(chunk.sequence.sequence_id in self.doomed for chunk in chunks):
            raise ZeroDivisionError("the runner's")
        return self.runner.logits(chunks)


def test_an_error_in_a_step_fails_only_the_sequences_in_it(tiny_directory: Path) -> None:
    llm = LLM.load(tiny_directory, weights="float32", max_num_seqs=2, enable_prefix_caching=False)
    expected = llm.generate("c", GREEDY).token_ids
    runner = Fragile(llm.engine.runner)
    engine = Engine(llm.engine.scheduler, runner, llm.engine.sampler, llm.engine.trace)
    with EngineThread(engine) as thread:
        inboxes = [Inbox(), Inbox(), Inbox()]
        requests = [ask(llm, letter) for letter in "abc"]
        runner.doomed = {requests[0][0].sequence.sequence_id}

        def submit_all(event: Any) -> None:  # between two steps, so that a and b share a batch
            for answers, inbox in zip(requests, inboxes, strict=True):
                thread.dispatcher.submit(answers, inbox)

        thread.dispatcher.submit(ask(llm, "x", params=ONE), submit_all)
        for inbox in inboxes[:2]:
            assert isinstance(inbox.last(), ZeroDivisionError)
        assert isinstance(inboxes[2].last(), TokenDelta)
        assert requests[2][0].sequence.output_ids == expected
        doomed = ask(llm, "d", "e")
        runner.doomed.add(doomed[1].sequence.sequence_id)
        with pytest.raises(ZeroDivisionError, match="the runner's"):
            take(thread, doomed)
        assert take(thread, ask(llm, "c")) == expected, "the thread still runs"
        assert thread.is_alive
    assert is_whole(llm)


class Mood:
    """A scheduler that wraps another, until `raises` is set."""

    def __init__(self, scheduler: Any):
        self.scheduler, self.raises = scheduler, False

    def schedule(self) -> Any:
        if self.raises:
            raise ArithmeticError("of no particular sequence")
        return self.scheduler.schedule()

    def add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)

    def commit(self, chunks: Any, tokens: Any) -> Any:
        return self.scheduler.commit(chunks, tokens)

    def abort(self, sequence: Sequence) -> None:
        self.scheduler.abort(sequence)


def test_a_schedulers_error_ends_the_thread_and_reaches_all_waiting_callers(llm: LLM) -> None:
    scheduler = Mood(llm.engine.scheduler)
    engine = Engine(scheduler, llm.engine.runner, llm.engine.sampler, llm.engine.trace)
    thread = EngineThread(engine)
    requests = [ask(llm, letter * 5, params=LONG) for letter in "abcdef"]  # some run, some wait
    started = threading.Barrier(len(requests) + 1)
    causes: list[BaseException | None] = []

    def wait(answers: list[RequestState]) -> None:
        deltas = thread.run(answers)
        started.wait(PATIENCE)
        with pytest.raises(EngineStoppedError, match="thread has ended") as caught:
            list(deltas)
        causes.append(caught.value.__cause__)

    def spoil() -> None:
        scheduler.raises = True
        started.wait(PATIENCE)

    thread.dispatcher.submit(ask(llm, "x"), raising)  # its `deliver` also fails at the end
    side_by_side([*(lambda each=each: wait(each) for each in requests), spoil])
    assert len(causes) == len(requests)
    assert all(isinstance(cause, ArithmeticError) for cause in causes)
    wait_until(lambda: not thread.is_alive)
    for refused in (
        lambda: thread.dispatcher.submit(ask(llm, "a"), Inbox()),
        lambda: thread.run(ask(llm, "a")),
    ):
        with pytest.raises(EngineStoppedError) as caught:
            refused()
        assert isinstance(caught.value.__cause__, ArithmeticError)
    assert isinstance(thread.error, ArithmeticError)
    thread.close()
    assert is_whole(llm)


class Picky(Mood):
    """A scheduler that refuses prompts that are too long for it."""

    def add(self, sequence: Sequence) -> None:
        if len(sequence) > 20:
            raise ValueError("too long for me")
        super().add(sequence)


def test_a_request_that_the_scheduler_refuses_does_not_affect_others(llm: LLM) -> None:
    expected = llm.generate("a", LONG).token_ids
    scheduler = Picky(llm.engine.scheduler)
    engine = Engine(scheduler, llm.engine.runner, llm.engine.sampler, llm.engine.trace)
    with EngineThread(engine) as thread:
        patient = thread.run(ask(llm, "a", params=LONG))
        family = ask(llm, "c", "b" * 30, params=SamplingParams(n=2, max_tokens=3))
        with pytest.raises(ValueError, match="too long for me"):
            list(thread.run(family))
        assert [each.sequence.finish_reason for each in family] == ["abort"] * 2 + ["error"] * 2
        assert [delta.token_id for delta in patient] == list(expected)
        assert thread.is_alive
        assert not thread.dispatcher._subscriptions
    assert is_whole(llm)


def raising(event: Any) -> None:
    raise OSError("the client has gone")


def test_a_caller_whose_deliver_fails_loses_only_its_own_request(
    llm: LLM, thread: EngineThread
) -> None:
    gone, other, inbox = ask(llm, "abc", params=LONG), ask(llm, "abd", params=LONG), Inbox()
    thread.dispatcher.submit(gone, raising)
    thread.dispatcher.submit(other, inbox)
    assert isinstance(inbox.last(), TokenDelta)
    assert other[0].sequence.finish_reason == "length"
    assert gone[0].sequence.finish_reason == "abort"
    assert len(gone[0].sequence.output_ids) < 3
    one_token = ask(llm, "abc", params=ONE)
    thread.dispatcher.submit(one_token, raising)  # fails after it has finished
    assert len(take(thread, ask(llm, "z"))) == 10
    assert one_token[0].sequence.finish_reason == "length"
    wait_until(lambda: is_whole(llm))


def test_tokens_that_cannot_be_decoded_end_only_their_own_request(
    llm: LLM, thread: EngineThread
) -> None:
    class Broken:
        def push(self, token_id: int) -> str:
            raise LookupError("no such token")

    answers, other = ask(llm, "abc", params=LONG), thread.run(ask(llm, "abd", params=LONG))
    answers[0].stream = Broken()  # type: ignore[assignment]
    with pytest.raises(LookupError, match="no such token"):
        list(thread.run(answers))
    assert answers[0].sequence.finish_reason == "abort"
    assert len(list(other)) == 100


def test_a_deliver_function_may_submit_and_abort(llm: LLM, thread: EngineThread) -> None:
    """`deliver` is therefore called without holding a lock."""
    first, second, inbox = ask(llm, "abc", params=LONG), ask(llm, "abd"), Inbox()

    def deliver(event: Any) -> None:
        if len(first[0].sequence.output_ids) == 3:
            thread.dispatcher.submit(second, inbox)
            thread.dispatcher.abort(first)

    thread.dispatcher.submit(first, deliver)
    assert isinstance(inbox.last(), TokenDelta)
    assert first[0].sequence.finish_reason == "abort"
    assert len(first[0].sequence.output_ids) == 3


def test_a_deliver_function_may_close_the_thread(llm: LLM) -> None:
    thread, inbox = EngineThread(llm.engine), Inbox()
    thread.dispatcher.submit(ask(llm, "abc", params=LONG), lambda _: thread.close())
    with suppress(EngineStoppedError):
        thread.dispatcher.submit(ask(llm, "abd", params=LONG), inbox)
    assert isinstance(inbox.last(), EngineStoppedError)
    thread.close()
    assert not thread._thread.is_alive()


def test_closing_reaches_all_waiting_callers_and_frees_the_engine(llm: LLM) -> None:
    expected = llm.generate("abc", GREEDY).token_ids
    thread = EngineThread(llm.engine)
    streams = [thread.run(ask(llm, letter, params=LONG)) for letter in "abcdefgh"]
    next(streams[0])
    thread.close()
    thread.close()
    assert not thread.is_alive
    assert not thread._thread.is_alive()
    for stream in streams:
        with pytest.raises(EngineStoppedError) as caught:
            list(stream)
        assert caught.value.__cause__ is None
    assert is_whole(llm)
    with pytest.raises(EngineStoppedError):
        thread.dispatcher.submit(ask(llm, "a"), Inbox())
    with EngineThread(llm.engine) as another:
        assert take(another, ask(llm, "abc")) == expected
    assert llm.generate("abc", GREEDY).token_ids == expected


def test_a_request_during_closing_always_gets_an_error(llm: LLM) -> None:
    """Either at once or later."""

    def keep_asking(thread: EngineThread) -> None:
        while True:
            take(thread, ask(llm, "a", params=SamplingParams(max_tokens=2, ignore_eos=True)))

    def come(thread: EngineThread) -> None:
        with pytest.raises(EngineStoppedError):
            keep_asking(thread)

    for _ in range(20):
        thread = EngineThread(llm.engine)
        side_by_side([partial(come, thread), partial(come, thread), thread.close])
    assert is_whole(llm)


def test_an_abort_that_follows_at_once_is_never_lost(llm: LLM, thread: EngineThread) -> None:
    def abort(answers: list[RequestState]) -> None:
        while not answers[0].sequence.finish_reason:
            thread.dispatcher.abort(answers)  # not submitted yet, or aborted already

    for _ in range(20):
        answers = ask(llm, "abc", params=LONG)
        submit = partial(thread.dispatcher.submit, answers, Inbox())
        side_by_side([partial(abort, answers), submit])
        assert answers[0].sequence.finish_reason == "abort"
        assert len(answers[0].sequence.output_ids) < 100


def test_after_any_submits_and_aborts_all_blocks_are_free_in_the_end(
    llm: LLM, thread: EngineThread
) -> None:
    def caller(number: int) -> Callable[[], None]:
        chance = random.Random(number)

        def job() -> None:
            for _ in range(25):
                params = SamplingParams(
                    n=chance.choice([1, 1, 1, 2, 4, 6]),
                    temperature=0,
                    max_tokens=chance.randint(1, 12),
                    ignore_eos=True,
                )
                deltas = thread.run(ask(llm, "p" * chance.randint(1, 20), params=params))
                if chance.random() < 0.5:
                    for _ in range(chance.randint(0, 5)):
                        next(deltas, None)
                    deltas.close()
                    continue
                assert len(list(deltas)) == params.n * (params.max_tokens or 0)

        return job

    side_by_side([caller(number) for number in range(8)])
    wait_until(lambda: not llm.engine.live)
    wait_until(lambda: is_whole(llm))
    assert not thread.dispatcher._subscriptions


def test_a_stop_string_ends_an_answer_in_its_own_step(llm: LLM, thread: EngineThread) -> None:
    """Its blocks are free before the next step, while another request continues."""
    whole = "".join(delta.text for delta in thread.run(ask(llm, "abc", params=LONG)))
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, stop=whole[3:5])
    other = thread.run(ask(llm, "xyz", params=LONG))
    stopped, blocks = ask(llm, "abc", params=params), list[int]()

    def deliver(event: Any) -> None:
        if event.finish_reason is not None:
            blocks.append(len(stopped[0].sequence.block_ids))

    thread.dispatcher.submit(stopped, deliver)
    assert len(list(other)) == 100
    wait_until(lambda: bool(blocks))
    assert blocks == [0]
    sequence = stopped[0].sequence
    assert (sequence.finish_reason, stopped[0].choice.finish_reason) == ("stop", "stop")
    assert len(sequence.output_ids) == len(stopped[0].choice.token_ids) < 100
    assert stopped[0].choice.text == whole[: whole.index(whole[3:5])]
    wait_until(lambda: is_whole(llm))


def test_without_every_token_only_each_answers_last_delta_is_delivered(
    llm: LLM, thread: EngineThread
) -> None:
    answers, inbox = ask(llm, "abc", "xyz"), Inbox()
    thread.dispatcher.submit(answers, inbox, every_token=False)
    events = [inbox.next(), inbox.next()]
    assert {(each.prompt, each.finish_reason) for each in events} == {(0, "length"), (1, "length")}  # type: ignore[union-attr]
    assert take(thread, ask(llm, "abc")) == answers[0].choice.token_ids
    assert inbox.events.empty()


def test_an_engine_has_one_owner_at_a_time(llm: LLM) -> None:
    with EngineThread(llm.engine):
        for ask_it in (llm.generate, lambda prompt: next(llm.stream(prompt))):
            with pytest.raises(RequestError, match="in its own thread"):
                ask_it("abc")
        with pytest.raises(RequestError, match="Another thread"):
            EngineThread(llm.engine)
    assert llm.generate("abc", GREEDY).token_ids
    stream = llm.stream("abc", GREEDY)
    next(stream)
    with pytest.raises(RequestError, match="1 unfinished requests"):
        EngineThread(llm.engine)
    stream.close()
    with EngineThread(llm.engine) as thread:
        assert take(thread, ask(llm, "abc"))


def test_threads_that_share_generate_are_each_answered_as_if_alone(llm: LLM) -> None:
    prompts = [f"prompt {number} " * (1 + number % 3) for number in range(8)]
    expected = [llm.generate(prompt, GREEDY).text for prompt in prompts]
    found: dict[int, list[str]] = {number: [] for number in range(8)}

    def job(number: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(4):
                found[number].append(llm.generate(prompts[number], GREEDY).text)
                found[number].append("".join(llm.stream(prompts[number], GREEDY)))
                next(llm.stream(prompts[number], GREEDY))  # and no further

        return run

    side_by_side([job(number) for number in range(8)])
    assert found == {number: [text] * 8 for number, text in enumerate(expected)}
    assert is_whole(llm)
    with EngineThread(llm.engine) as thread:
        assert take(thread, ask(llm, "abc"))


def test_the_events_of_a_step_are_handed_over_together(llm: LLM) -> None:
    steps: list[list[int]] = []
    arrived: list[int] = []

    def hand_over(deliver_all: Callable[[], None]) -> None:
        arrived.clear()
        deliver_all()
        steps.append(list(arrived))

    with EngineThread(llm.engine, hand_over) as thread:
        answers = ask(llm, "abc", "de", "f")
        thread.dispatcher.submit(answers, lambda event: arrived.append(event.prompt))  # type: ignore[union-attr]
        wait_until(lambda: all(each.sequence.finish_reason for each in answers))
    assert steps == [[0, 1, 2]] * 10


def test_events_that_wait_for_a_busy_loop_are_handed_over_by_one_call(llm: LLM) -> None:
    calls: Queue[Callable[[], None]] = Queue()
    inbox = Inbox()
    with EngineThread(llm.engine, calls.put) as thread:
        answers = ask(llm, "abc", "de")
        thread.dispatcher.submit(answers, inbox)
        wait_until(lambda: len(thread.dispatcher._outbox) == 20)
        calls.get(timeout=PATIENCE)()
        assert inbox.events.qsize() == 20
    assert calls.empty()


def test_an_interrupted_hand_over_loses_no_event(llm: LLM) -> None:
    interrupts = [KeyboardInterrupt()]

    def hand_over(deliver_all: Callable[[], None]) -> None:
        if interrupts:
            raise interrupts.pop()
        deliver_all()

    dispatcher, inbox, answers = Dispatcher(llm.engine, hand_over), Inbox(), ask(llm, "abc")
    dispatcher.submit(answers, inbox)
    with pytest.raises(KeyboardInterrupt):
        dispatcher.step()
    while llm.engine.has_work():
        dispatcher.step()
    assert inbox.events.qsize() == 10


def test_a_side_that_is_closed_does_not_end_the_thread(llm: LLM) -> None:
    num_calls = 0

    def fail(deliver_all: Callable[[], None]) -> None:
        nonlocal num_calls
        num_calls += 1
        raise RuntimeError("the event loop is closed")

    with EngineThread(llm.engine, fail) as thread:
        for prompt in ("abc", "de"):
            answers = ask(llm, prompt)
            thread.dispatcher.submit(answers, Inbox())
            wait_until(lambda: answers[0].sequence.finish_reason is not None)  # noqa: B023
        assert thread.is_alive
    assert num_calls == 1, "it is not called again"
