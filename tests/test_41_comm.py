"""Messages between ranks: the same sums over threads, over processes and alone; all counted."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minigen.errors import WorkerError
from minigen.parallel.comm import (
    Comm,
    MessageCounters,
    SoloComm,
    ThreadComm,
    TracedComm,
    local_comm,
    run_ranks,
)
from minigen.parallel.runner import CommThread
from minigen.trace.events import Trace
from minigen.trace.timeline import Timeline
from tests.gpu.processes import assert_passes_interpreted

# The program of one rank; the same text runs in threads and in processes.
PEER = """
import sys
from pathlib import Path
from minigen.parallel.comm import local_comm
from tests.test_41_comm import exchange
exchange(local_comm(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
"""


def exchange(comm: Comm) -> list[Tensor]:
    """Send one message of each kind, in each dtype that the model sends."""
    own = torch.full((2, 3), 1.0 + comm.rank)
    return [
        comm.all_reduce(own.clone()),
        comm.all_reduce(own.to(torch.bfloat16)),
        comm.all_gather(own.clone()),
        comm.broadcast(torch.tensor([comm.rank + 5, 7])),
    ]


def over_threads(num_ranks: int, _: Path) -> list[Tensor]:
    everybodys = run_ranks(num_ranks, exchange)
    for theirs in everybodys[1:]:
        assert all(torch.equal(a, b) for a, b in zip(everybodys[0], theirs, strict=True))
    return everybodys[0]


def over_processes(num_ranks: int, rendezvous: Path) -> list[Tensor]:
    peers = [
        subprocess.Popen([sys.executable, "-c", PEER, str(rank), str(num_ranks), str(rendezvous)])
        for rank in range(1, num_ranks)
    ]
    try:
        return exchange(local_comm(0, num_ranks, rendezvous))
    finally:
        assert [peer.wait(timeout=60) for peer in peers] == [0] * (num_ranks - 1)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("over", [over_threads, over_processes])
def test_every_rank_gets_sums_pieces_in_order_and_rank_0s_broadcast(
    over: Callable[[int, Path], list[Tensor]], num_ranks: int, tmp_path: Path
) -> None:
    summed, halves, gathered, said = over(num_ranks, tmp_path / "rendezvous")
    total = float(sum(range(1, num_ranks + 1)))
    assert torch.equal(summed, torch.full((2, 3), total))
    assert halves.dtype == torch.bfloat16
    assert torch.equal(halves.float(), summed)
    assert gathered.tolist() == [[1.0 + r for r in range(num_ranks) for _ in range(3)]] * 2
    assert said.tolist() == [5, 7]


def test_one_rank_alone_gets_back_what_it_sends() -> None:
    summed, halves, gathered, said = exchange(SoloComm())
    assert torch.equal(summed, torch.ones(2, 3))
    assert torch.equal(halves.float(), summed)
    assert torch.equal(gathered, summed)
    assert said.tolist() == [5, 7]


def test_a_failing_rank_leaves_no_other_rank_waiting() -> None:
    def work(comm: ThreadComm) -> None:
        if comm.rank == 1:
            raise ValueError("rank 1 fell over")
        with pytest.raises(WorkerError, match="did not arrive"):
            comm.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="rank 1 fell over"):
        run_ranks(3, work)


def test_messages_are_emitted_with_their_bytes_to_subscribers() -> None:
    trace, counters = Trace(), MessageCounters()
    comm = TracedComm(SoloComm(), trace)
    exchange(comm)
    with trace.subscribed(Timeline(on_message=counters)):
        exchange(comm)
    assert counters.num_messages == {"all_reduced": 2, "all_gathered": 1, "broadcast": 1}
    assert counters.num_bytes == {"all_reduced": 24 + 12, "all_gathered": 24, "broadcast": 16}
    assert set(counters.seconds) == set(counters.num_messages)


@pytest.mark.parametrize("make", [SoloComm, lambda: TracedComm(SoloComm(), Trace())])
def test_all_of_them_are_comms(make: Callable[[], object]) -> None:
    assert isinstance(make(), Comm)


def test_one_rank_in_its_own_group_gets_back_what_it_sends() -> None:
    """Over gloo here; `make test-gpu` has the same checks over NCCL."""
    assert_passes_interpreted("equal_ranks.py")


class Interrupted:
    """A queue at which Ctrl-C arrives just before, or just after, its next `num` uses."""

    def __init__(self, queue: Any, num: int, after: bool):
        self.queue, self.num, self.after = queue, num, after

    def put(self, item: Any) -> None:
        self._use(lambda: self.queue.put(item))

    def get(self, timeout: float) -> Any:
        return self._use(lambda: self.queue.get(timeout=timeout))

    def _use(self, use: Callable[[], Any]) -> Any:
        self.num -= 1
        if self.num < 0:
            return use()
        if self.after:
            use()
        raise KeyboardInterrupt


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("queue", ["_commands", "_outcomes"])
def test_calls_continue_after_an_interrupt_at_any_point(queue: str, after: bool) -> None:
    hand = CommThread(SoloComm, lambda error: None)
    assert hand.call(lambda comm: 1) == 1
    usual = getattr(hand, queue)
    setattr(hand, queue, Interrupted(usual, 2, after))
    for number in (2, 3):
        with pytest.raises(KeyboardInterrupt):
            hand.call(lambda comm, number=number: number)
    setattr(hand, queue, usual)
    assert hand.call(lambda comm: 4) == 4
    assert hand.call(lambda comm: 5) == 5
    hand.end()
    assert not hand._thread.is_alive()


def test_a_failure_lost_by_an_interrupt_is_reported_at_the_next_call() -> None:
    def fail(comm: Comm) -> None:
        raise WorkerError("Rank 0 failed.")

    hand = CommThread(SoloComm, lambda error: None)
    usual = hand._outcomes
    hand._outcomes = Interrupted(usual, 1, after=True)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        hand.call(fail)
    hand._outcomes = usual
    with pytest.raises(WorkerError, match="communication thread has ended"):
        hand.call(lambda comm: 1)


def test_the_thread_ends_after_a_thread_of_gloo_has_released_the_last_message() -> None:
    holding: list[torch.Tensor] = []

    class Held(SoloComm):
        """Keeps a message as gloo's threads do, outside Python, until `holding` is empty."""

        def broadcast(self, x: torch.Tensor) -> torch.Tensor:
            holding.append(x.view(-1))  # a view holds its base outside Python
            return x

    hand = CommThread(Held, lambda error: None)
    assert hand.call(lambda comm: 1) == 1
    hand._commands.put(None)
    hand._thread.join(timeout=0.2)
    assert holding
    assert hand._thread.is_alive()
    holding.clear()
    hand.end()
    assert not hand._thread.is_alive()
