"""A rank that a signal has stopped has not ended; the others tell of it, and end with it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from minigen import SamplingParams
from minigen.errors import WorkerError
from minigen.parallel.stopped import STOPPED_SECONDS, StoppedProcesses, is_stopped
from tests.processes import children_of, is_running, workers_of
from tests.ranks import GREEDY, PROMPTS, answers, save_eight_heads, save_six_heads, split
from tests.test_41_serving import LONG, SERVE, THREE, TORCHRUN, serving
from tests.waiting import PATIENCE, wait_until

SOON = STOPPED_SECONDS + 7.0  # seconds; the ends themselves take one or two
STOPPED = r"minigen: Rank [12] (of [23] )?\(process {}\) has been stopped by a signal"


@pytest.fixture
def sleeper() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process.pid
    process.kill()
    process.wait()


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_only_a_process_that_stays_stopped_in_every_look_is_reported(sleeper: int) -> None:
    clock = Clock()
    stopped = StoppedProcesses(3.0, clock)

    def looks(seconds: list[float]) -> list[int | None]:
        found = []
        for each in seconds:
            clock.now += each
            found.append(stopped.look([sleeper, os.getpid()]))
        return found

    assert looks([1, 1, 1, 1]) == [None] * 4, "it runs"
    os.kill(sleeper, signal.SIGSTOP)
    wait_until(lambda: is_stopped(sleeper))
    assert looks([1, 1, 1]) == [None] * 3
    assert looks([1]) == [sleeper]
    assert looks([600]) == [None], "this process was paused too: the count begins again"
    assert looks([1, 1]) == [None] * 2
    os.kill(sleeper, signal.SIGCONT)
    wait_until(lambda: not is_stopped(sleeper))
    assert looks([1, 1, 1, 1]) == [None] * 4
    assert not is_stopped(psutil.pids()[-1] + 2**22), "no such process"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_eight_heads(tmp_path_factory.mktemp("split"))


@pytest.fixture(scope="module")
def long_context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_six_heads(tmp_path_factory.mktemp("long"), 32_768)


def test_a_stopped_worker_is_one_clear_error_soon_and_nothing_is_left(directory: Path) -> None:
    """A short stop only delays the answers."""
    with split(directory, 2) as llm:
        before = answers(llm, GREEDY)
        (worker,) = workers_of(os.getpid())
        os.kill(worker, signal.SIGSTOP)
        waker = subprocess.Popen(
            [sys.executable, "-c", f"import os, time; time.sleep(0.5); os.kill({worker}, 18)"]
        )
        assert answers(llm, GREEDY) == before
        waker.wait()
        stream = llm.stream_deltas(PROMPTS[:1], SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
        os.kill(worker, signal.SIGSTOP)
        started = time.monotonic()
        message = rf"Rank 1 of 2 \(process {worker}\) has been stopped by a signal .* for 3 seconds"
        with pytest.raises(WorkerError, match=message):
            list(stream)
        assert STOPPED_SECONDS <= time.monotonic() - started < SOON
        with pytest.raises(WorkerError, match="has been stopped by a signal"):
            llm.generate("abc", GREEDY)
    assert workers_of(os.getpid()) == []


@contextmanager
def generating(
    model: Path, *starter: str, cut: SequenceOf[str] = THREE
) -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """Run a long generation on ranks; yield the first process, and all that it started."""
    options = ["--weights", "float32", *cut, "--max-tokens", "30000"]
    process = subprocess.Popen(
        [sys.executable, *starter, "-m", "minigen", "generate", "-m", str(model), "abc", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    assert process.stdout is not None
    assert process.stdout.read(30), "text has come"
    started = children_of(process.pid)
    try:
        yield process, started
    finally:
        for each in [process.pid, *started]:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        process.communicate()


def rank_0(started: list[int]) -> int:
    (found,) = (each for each in started if psutil.Process(each).environ()["RANK"] == "0")
    return found


@pytest.mark.long
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("starter", "cut"),
    [
        ([], THREE),
        (TORCHRUN, THREE),
        ([], ["--pipeline-parallel-size", "2"]),
        ([], ["--context-parallel-size", "2"]),
    ],
)
def test_a_rank_stopped_in_mid_generation_ends_the_command(
    long_context: Path, starter: list[str], cut: list[str]
) -> None:
    with generating(long_context, *starter, cut=cut) as (process, started):
        stopped = next(each for each in started if not starter or each != rank_0(started))
        os.kill(stopped, signal.SIGSTOP)
        began = time.monotonic()
        _, stderr = process.communicate(timeout=PATIENCE)
        wait_until(lambda: not any(map(is_running, started)), 30)
        assert time.monotonic() - began < SOON
    assert process.returncode == 1, stderr
    assert len(re.findall(STOPPED.format(stopped), stderr)) == 1
    if not starter:
        assert len(stderr.strip().splitlines()) == 1


@pytest.mark.long
@pytest.mark.usefixtures("interruptible")
def test_a_stopped_rank_0_of_torchrun_ends_all(long_context: Path) -> None:
    with generating(long_context, *TORCHRUN) as (process, started):
        os.kill(rank_0(started), signal.SIGSTOP)
        began = time.monotonic()
        _, stderr = process.communicate(timeout=PATIENCE)
        wait_until(lambda: not any(map(is_running, started)), 30)
        assert time.monotonic() - began < SOON + 2.0
    assert process.returncode == 1, stderr


@pytest.mark.long
@pytest.mark.parametrize("starter", [[], TORCHRUN], ids=["itself", "torchrun"])
def test_a_rank_stopped_in_mid_stream_ends_the_server_with_one_error(
    long_context: Path, starter: list[str]
) -> None:
    with serving(long_context, *starter, *SERVE, *THREE) as server:
        assert LONG["ignore_eos"]
        stream = server.stream()
        next(stream)
        workers = [each for each in server.started if not starter or each != rank_0(server.started)]
        os.kill(workers[0], signal.SIGSTOP)
        began = time.monotonic()
        *texts, last = stream
        assert not any("error" in each for each in texts)
        assert last["error"]["code"] == "engine_stopped"
        assert server.process.wait(PATIENCE) == 1
        wait_until(lambda: not any(map(is_running, server.started)), 30)
        assert time.monotonic() - began < SOON
    said = "".join(server.said)
    assert len(re.findall(STOPPED.format(workers[0]), said)) == 1
