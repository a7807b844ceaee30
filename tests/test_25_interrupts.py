"""Ctrl-C while an engine runs: the answer ends, and the engine's blocks are all there."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minigen import LLM, SamplingParams
from minigen.engine.dispatcher import interrupts_held

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = ["abcabcab", "abcd", "f"]


@pytest.fixture
def llm(tiny_directory: Path) -> LLM:
    return LLM.load(tiny_directory, weights="float32", max_num_seqs=4, block_size=4, num_blocks=40)


def part_of(llm: LLM, path: str) -> Any:
    part: Any = llm
    for name in path.split("."):
        part = getattr(part, name)
    return part


def interrupted_within(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is interrupted once, before its first caller gets the result."""
    left = [signal.SIGINT]

    def interrupted(*arguments: Any, **options: Any) -> Any:
        result = call(*arguments, **options)
        if left:
            signal.raise_signal(left.pop())
        return result

    return interrupted


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("engine", "claim"),
        ("engine.scheduler", "add"),
        ("engine.scheduler", "schedule"),
        ("manager.allocator", "allocate"),
        ("engine.runner", "logits"),
        ("manager.prefix_cache", "insert"),
        ("engine.scheduler", "commit"),
        ("engine.scheduler", "abort"),
        ("manager.allocator", "release"),
        ("_steps.dispatcher", "run_commands"),
    ],
)
def test_an_interrupt_anywhere_in_a_step_loses_no_block(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, path: str, name: str
) -> None:
    expected = [each.token_ids for each in llm.generate(PROMPTS, GREEDY)]
    answers = llm.process_requests(PROMPTS, GREEDY)
    with monkeypatch.context() as patch:
        part = part_of(llm, path)
        patch.setattr(part, name, interrupted_within(getattr(part, name)))
        if name == "abort":
            stream = llm._steps.run(answers)
            next(stream)
            with pytest.raises(KeyboardInterrupt):
                stream.close()
        else:
            with pytest.raises(KeyboardInterrupt):
                list(llm._steps.run(answers))
    assert not llm.engine.has_work()
    assert not llm.manager.rows
    assert llm.manager.num_available == llm.manager.allocator.num_blocks
    assert [each.token_ids for each in llm.generate(PROMPTS, GREEDY)] == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_does_not_wait() -> None:
    reached = []

    def interrupt_twice() -> None:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            reached.append("after the first")
            signal.raise_signal(signal.SIGINT)
            reached.append("after the second")

    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()
    assert reached == ["after the first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_block_within_a_block_holds_nothing_longer() -> None:
    reached = []

    def interrupt_within() -> None:
        with interrupts_held():
            with interrupts_held():
                signal.raise_signal(signal.SIGINT)
            reached.append("between")
        reached.append("after both")

    with pytest.raises(KeyboardInterrupt):
        interrupt_within()
    assert reached == ["between"]


def test_the_callers_own_handler_gets_the_interrupt() -> None:
    seen: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            assert not seen
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, previous)


def test_an_ignored_interrupt_stays_ignored_and_other_threads_hold_none() -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)
    handlers = []

    def other() -> None:
        with interrupts_held():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert handlers == [previous]
