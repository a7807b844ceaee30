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
from minigen.engine.engine import Engine
from minigen.engine.engine_thread import EngineThread
from minigen.errors import EngineStoppedError, RequestError
from minigen.sequence import SampledToken, Sequence
from tests.waiting import PATIENCE, wait_until

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@pytest.fixture
def llm(tiny_directory: Path) -> LLM:
    return LLM.load(tiny_directory, weights="float32", max_num_seqs=4, block_size=4, num_blocks=80)


@pytest.fixture
def thread(llm: LLM) -> Iterator[EngineThread]:
    with EngineThread(llm.engine) as running:
        yield running
    assert not running._thread.is_alive()


def ask(llm: LLM, prompt: str, params: SamplingParams = GREEDY) -> Sequence:
    return llm._requests.process([prompt], params)[0].sequence


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


def take(thread: EngineThread, sequence: Sequence) -> list[int]:
    return [token.token_id for _, token in thread.tokens(sequence)]


class Inbox:
    """A `deliver` that stores its events, with the finish reason of that moment."""

    def __init__(self) -> None:
        self.events: Queue[tuple[int, Any, str | None]] = Queue()

    def __call__(self, sequence: Sequence, event: Any) -> None:
        self.events.put((sequence.sequence_id, event, sequence.finish_reason))

    def next(self) -> tuple[int, Any, str | None]:
        return self.events.get(timeout=PATIENCE)

    def last(self) -> Any:
        """Return the last event: a finishing token, None, or an exception."""
        while True:
            _, event, reason = self.next()
            if not isinstance(event, SampledToken) or reason is not None:
                return event


def test_callers_at_once_get_each_their_own_tokens(llm: LLM) -> None:
    prompts = [f"prompt {number} " * (1 + number % 3) for number in range(12)]
    expected = [output.token_ids for output in llm.generate(prompts, GREEDY)]
    found: dict[int, list[int]] = {}
    with EngineThread(llm.engine) as thread:

        def job(number: int) -> Callable[[], None]:
            sequence = ask(llm, prompts[number])
            return lambda: found.update({number: take(thread, sequence)})

        side_by_side([job(number) for number in range(12)])
    assert [found[number] for number in range(12)] == expected
    assert is_whole(llm)


def test_a_slow_reader_loses_no_token(llm: LLM, thread: EngineThread) -> None:
    sequence = ask(llm, "slow")
    tokens = thread.tokens(sequence)
    wait_until(lambda: sequence.finish_reason is not None)  # all tokens exist before any is read
    assert [token.token_id for _, token in tokens] == sequence.output_ids
    assert len(sequence.output_ids) == 10


def test_one_iterator_yields_the_tokens_of_all_siblings(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=10, ignore_eos=True)
    expected = [choice.token_ids for choice in llm.generate("abc", params).choices]
    with EngineThread(llm.engine) as thread:
        found: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for sequence, token in thread.tokens(ask(llm, "abc", params)):
            found[sequence.choice].append(token.token_id)
    assert list(found.values()) == expected


def test_closing_the_iterator_frees_the_blocks(llm: LLM, thread: EngineThread) -> None:
    sequence = ask(llm, "abc", SamplingParams(n=3, max_tokens=100, ignore_eos=True))
    family = [sequence, *sequence.siblings]
    tokens = thread.tokens(sequence)
    next(tokens)
    tokens.close()
    wait_until(lambda: not llm.engine.live)
    assert {each.finish_reason for each in family} == {"abort"}
    wait_until(lambda: is_whole(llm))


def test_closing_an_unread_iterator_aborts_the_request(llm: LLM, thread: EngineThread) -> None:
    sequence = ask(llm, "abc", LONG)
    thread.tokens(sequence).close()
    wait_until(lambda: sequence.finish_reason == "abort")


def test_collecting_an_iterator_aborts_its_request(llm: LLM, thread: EngineThread) -> None:
    sequence = ask(llm, "abc", LONG)
    for _ in thread.tokens(sequence):
        break
    wait_until(lambda: sequence.finish_reason == "abort")


def test_an_abort_is_delivered_as_none(llm: LLM, thread: EngineThread) -> None:
    sequence, inbox = ask(llm, "abc", LONG), Inbox()
    thread.submit(sequence, inbox)
    inbox.next()
    thread.abort(sequence.sequence_id)
    assert inbox.last() is None
    assert sequence.finish_reason == "abort"


def test_an_id_that_is_not_live_cannot_be_aborted(llm: LLM, thread: EngineThread) -> None:
    with pytest.raises(RequestError, match="No request with id 12345"):
        thread.abort(12345)
    sequence = ask(llm, "abc")
    take(thread, sequence)
    with pytest.raises(RequestError, match="waiting or running"):
        thread.abort(sequence.sequence_id)


def test_an_id_is_used_once(llm: LLM, thread: EngineThread) -> None:
    first, second = ask(llm, "abc", LONG), ask(llm, "abc")
    second.sequence_id = first.sequence_id
    tokens = thread.tokens(first)
    with pytest.raises(RequestError, match=r"ids \[1\] are in use"):
        thread.submit(second, Inbox())
    family = ask(llm, "abc", SamplingParams(n=3))
    family.siblings[1].sequence_id = family.sequence_id
    with pytest.raises(RequestError, match="repeated"):
        thread.submit(family, Inbox())
    assert len(list(tokens)) == 100, "the first continues unchanged"


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
        sequences = [ask(llm, letter) for letter in "abc"]
        runner.doomed = {sequences[0].sequence_id}

        def submit_all(_: Engine) -> None:  # between two steps, so that a and b share a batch
            for sequence, inbox in zip(sequences, inboxes, strict=True):
                thread.submit(sequence, inbox)

        thread.call(submit_all)
        for inbox in inboxes[:2]:
            assert isinstance(inbox.last(), ZeroDivisionError)
        assert isinstance(inboxes[2].last(), SampledToken)
        assert sequences[2].output_ids == expected
        doomed = ask(llm, "d")
        runner.doomed.add(doomed.sequence_id)
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
    sequences = [ask(llm, letter * 5, LONG) for letter in "abcdef"]  # some run, some wait
    started = threading.Barrier(len(sequences) + 1)
    causes: list[BaseException | None] = []

    def wait(sequence: Sequence) -> None:
        tokens = thread.tokens(sequence)
        started.wait(PATIENCE)
        with pytest.raises(EngineStoppedError, match="thread has ended") as caught:
            list(tokens)
        causes.append(caught.value.__cause__)

    def spoil() -> None:
        thread.call(lambda _: setattr(scheduler, "raises", True))
        started.wait(PATIENCE)

    thread.submit(ask(llm, "x"), raising)  # its `deliver` also fails when it gets the end
    side_by_side([*(lambda each=each: wait(each) for each in sequences), spoil])
    assert len(causes) == len(sequences)
    assert all(isinstance(cause, ArithmeticError) for cause in causes)
    wait_until(lambda: not thread.is_alive)
    for refused in (
        lambda: thread.submit(ask(llm, "a"), Inbox()),
        lambda: thread.tokens(ask(llm, "a")),
        lambda: thread.abort(1),
        lambda: thread.call(print),
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
        patient = thread.tokens(ask(llm, "a", LONG))
        family = llm._requests.process(["b" * 30], SamplingParams(n=2, max_tokens=3))
        with pytest.raises(ValueError, match="too long for me"):
            list(thread.tokens(family[0].sequence))
        assert [each.sequence.finish_reason for each in family] == ["error"] * 2
        assert [token.token_id for _, token in patient] == list(expected)
        assert thread.is_alive
        assert not thread._deliver
    assert is_whole(llm)


def raising(sequence: Sequence, event: Any) -> None:
    raise OSError("the client has gone")


def test_a_caller_whose_deliver_fails_loses_only_its_own_request(
    llm: LLM, thread: EngineThread
) -> None:
    gone, inbox = ask(llm, "abc", LONG), Inbox()
    other = ask(llm, "abd", LONG)
    thread.submit(gone, raising)
    thread.submit(other, inbox)
    assert isinstance(inbox.last(), SampledToken)
    assert other.finish_reason == "length"
    assert gone.finish_reason == "abort"
    one_token = ask(llm, "abc", SamplingParams(max_tokens=1))
    thread.submit(one_token, raising)  # fails after it has finished
    assert len(take(thread, ask(llm, "z"))) == 10
    assert one_token.finish_reason == "length"
    wait_until(lambda: is_whole(llm))


def test_a_deliver_function_may_submit_and_abort(llm: LLM, thread: EngineThread) -> None:
    """`deliver` is therefore called without holding a lock."""
    first, second, inbox = ask(llm, "abc", LONG), ask(llm, "abd"), Inbox()

    def deliver(sequence: Sequence, event: Any) -> None:
        if len(sequence.output_ids) == 3 and event is not None:
            thread.submit(second, inbox)
            thread.abort(sequence.sequence_id)

    thread.submit(first, deliver)
    assert isinstance(inbox.last(), SampledToken)
    assert first.finish_reason == "abort"


def test_a_deliver_function_may_close_the_thread(llm: LLM) -> None:
    thread, inbox = EngineThread(llm.engine), Inbox()
    thread.submit(ask(llm, "abc", LONG), lambda *_: thread.close())
    thread.submit(ask(llm, "abd", LONG), inbox)
    assert isinstance(inbox.last(), EngineStoppedError)
    thread.close()
    assert not thread._thread.is_alive()


def test_a_function_that_is_called_between_steps_may_fail(llm: LLM, thread: EngineThread) -> None:
    seen: Queue[Engine] = Queue()
    thread.call(lambda engine: 1 / 0)  # type: ignore[arg-type, return-value]
    thread.call(seen.put)
    assert seen.get(timeout=PATIENCE) is llm.engine
    assert len(take(thread, ask(llm, "a"))) == 10


def test_closing_reaches_all_waiting_callers_and_frees_the_engine(llm: LLM) -> None:
    expected = llm.generate("abc", GREEDY).token_ids
    thread = EngineThread(llm.engine)
    streams = [thread.tokens(ask(llm, letter, LONG)) for letter in "abcdefgh"]
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
        thread.submit(ask(llm, "a"), Inbox())
    with EngineThread(llm.engine) as another:
        assert take(another, ask(llm, "abc")) == expected
    assert llm.generate("abc", GREEDY).token_ids == expected


def test_a_request_during_closing_always_gets_an_error(llm: LLM) -> None:
    """Either at once or later."""
    asking = threading.Lock()  # protects the ids that `ask` counts

    def keep_asking(thread: EngineThread) -> None:
        while True:
            with asking:
                sequence = ask(llm, "a", SamplingParams(max_tokens=2, ignore_eos=True))
            take(thread, sequence)

    def come(thread: EngineThread) -> None:
        with pytest.raises(EngineStoppedError):
            keep_asking(thread)

    for _ in range(20):
        thread = EngineThread(llm.engine)
        side_by_side([partial(come, thread), partial(come, thread), thread.close])
    assert is_whole(llm)


def test_an_abort_that_follows_at_once_is_never_lost(llm: LLM, thread: EngineThread) -> None:
    def abort(sequence: Sequence) -> None:
        while not sequence.finish_reason:
            with suppress(RequestError):  # not submitted yet, or aborted already
                thread.abort(sequence.sequence_id)

    for _ in range(20):
        sequence, inbox = ask(llm, "abc", LONG), Inbox()
        side_by_side([partial(abort, sequence), partial(thread.submit, sequence, inbox)])
        assert inbox.last() is None
        assert len(sequence.output_ids) < 100


def test_after_any_submits_and_aborts_all_blocks_are_free_in_the_end(
    llm: LLM, thread: EngineThread
) -> None:
    asking = threading.Lock()  # RequestProcessor counts ids, and is not thread-safe

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
                with asking:
                    sequence = ask(llm, "p" * chance.randint(1, 20), params)
                tokens = thread.tokens(sequence)
                if chance.random() < 0.5:
                    for _ in range(chance.randint(0, 5)):
                        next(tokens, None)
                    tokens.close()
                    continue
                num_answers = params.n if params.n <= 4 else 1  # more than 4 run one by one
                assert len(list(tokens)) == num_answers * (params.max_tokens or 0)

        return job

    side_by_side([caller(number) for number in range(8)])
    wait_until(lambda: not llm.engine.live)
    wait_until(lambda: is_whole(llm))
    assert not thread._deliver


def test_a_sequence_that_a_deliver_finishes_gets_no_further_token(
    llm: LLM, thread: EngineThread
) -> None:
    """A stop string ends an answer in this way: in that step, with free blocks before the next."""
    ended: Queue[list[int]] = Queue()
    other, inbox = ask(llm, "xyz", LONG), Inbox()
    thread.submit(other, inbox)

    def third_is_enough(sequence: Sequence, event: Any) -> None:
        if len(sequence.output_ids) == 3:
            thread.finish(sequence.sequence_id)
            ended.put(sequence.output_ids)

    sequence = ask(llm, "abc", LONG)
    thread.submit(sequence, third_is_enough)
    assert ended.get(timeout=PATIENCE) is sequence.output_ids
    assert inbox.last() is not None
    assert (len(sequence.output_ids), sequence.finish_reason) == (3, "stop")
    assert not thread._deliver
    wait_until(lambda: is_whole(llm))


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


def test_on_step_end_is_called_after_all_events_of_a_step(llm: LLM) -> None:
    calls: list[object] = []

    def deliver(sequence: Sequence, event: object) -> None:
        calls.append(event)

    def fail() -> None:
        calls.append("failed")
        raise RuntimeError("the other side is closed")

    with EngineThread(llm.engine) as thread:
        thread.on_step_end(fail)
        thread.on_step_end(lambda: calls.append("all"))
        sequences = [ask(llm, prompt) for prompt in ("abc", "de", "f")]
        thread.call(lambda _: [thread.submit(each, deliver) for each in sequences])  # together
        wait_until(lambda: all(each.finish_reason for each in sequences))
    assert calls.count("failed") == 1, "a function that failed is not called again"
    words = ["token" if isinstance(each, SampledToken) else each for each in calls]
    steps = " ".join(map(str, words)).split("all")
    assert [each.count("token") for each in steps if "token" in each] == [3] * 10
