"""A split model ends as a whole, whatever ends it: one clear error, a status, no process left."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from minigen import LLM, SamplingParams
from minigen.child_process import start_module
from minigen.errors import WorkerError
from minigen.parallel import runner
from minigen.parallel.launch import LOST_ANOTHER, _describe_exit
from tests.processes import children_of, is_running, workers_of
from tests.ranks import GREEDY, PROMPTS, answers, save_eight_heads, save_six_heads, split
from tests.waiting import PATIENCE, wait_until

SOON = 5.0  # seconds


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_eight_heads(tmp_path_factory.mktemp("split"))


@pytest.fixture(scope="module")
def long_context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_six_heads(tmp_path_factory.mktemp("long"), 32_768)


def test_a_killed_worker_is_one_clear_error_soon_and_nothing_is_left(directory: Path) -> None:
    with split(directory, 2) as llm:
        (worker,) = workers_of(os.getpid())
        stream = llm.stream_deltas(["abc"], SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
        os.kill(worker, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(WorkerError, match=rf"Rank 1 of 2 \(process {worker}\) was killed by"):
            list(stream)
        assert time.monotonic() - started < SOON
        with pytest.raises(WorkerError, match="SIGKILL"):
            llm.generate("abc", GREEDY)
    assert workers_of(os.getpid()) == []


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_step_leaves_the_ranks_together(directory: Path) -> None:
    endless = SamplingParams(max_tokens=110, ignore_eos=True, temperature=0)
    with split(directory, 2) as llm:
        before = answers(llm, GREEDY)
        for delay in (0.02, 0.05):
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS * 20, endless, progress=False)
        assert answers(llm, GREEDY) == before


def test_a_failure_of_rank_0_in_a_step_ends_the_waiting_ranks(directory: Path) -> None:
    with split(directory, 2) as llm:
        llm.engine.runner._runner.pool = None  # type: ignore[attr-defined]
        with pytest.raises(WorkerError, match="Rank 0 failed in the middle of a step"):
            llm.generate("abc", GREEDY)
        assert workers_of(os.getpid()) == []


def test_closing_the_model_ends_its_workers(directory: Path) -> None:
    with split(directory, 2) as llm:
        workers = workers_of(os.getpid())
        assert len(workers) == 1
        llm.close()
        assert workers_of(os.getpid()) == []
        llm.close()


@pytest.mark.parametrize("idle", ["until it closes", "until the keepalive"])
def test_a_worker_that_ends_while_no_step_runs_is_no_traceback(
    idle: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception of rank 0's thread would fail this test as a warning."""
    if idle == "until the keepalive":
        monkeypatch.setattr(runner, "KEEPALIVE_SECONDS", 0.05)
    with split(directory, 2) as llm:
        assert isinstance(llm.engine.runner, runner.DriverRunner)
        thread = llm.engine.runner._comm_thread._thread
        (worker,) = workers_of(os.getpid())
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not is_running(worker))
        if idle == "until the keepalive":
            wait_until(lambda: not thread.is_alive())
            with pytest.raises(WorkerError, match="was killed by SIGKILL"):
                llm.generate("abc", GREEDY)
        llm.close()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_a_model_that_was_closed_in_the_middle_says_so(directory: Path) -> None:
    with split(directory, 2) as llm:
        stream = llm.stream_deltas(["abc"], SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
        llm.close()
        for _ in range(2):
            with pytest.raises(WorkerError, match="were stopped by `close`"):
                llm.generate("abc", GREEDY)


def test_a_signal_without_a_name_is_a_number() -> None:
    assert _describe_exit(-signal.SIGKILL) == "was killed by SIGKILL"
    assert _describe_exit(-40) == "was killed by signal 40"


SCRIPT = """
import os, sys, time
from minigen import LLM, SamplingParams
llm = LLM.load(sys.argv[1], weights="float32", tensor_parallel_size=2)
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
if "forks" in sys.argv and os.fork() == 0:  # a child that has the workers' pipes as well
    os.close(1)
    time.sleep(float(sys.argv[2]))
    os._exit(0)
print(llm.generate("abc", params).token_ids, flush=True)
time.sleep(float(sys.argv[2]))
"""


def run_script(directory: Path, seconds: float, *more: str, **env: str) -> "subprocess.Popen[str]":
    """Run an unguarded script from stdin, like a notebook's cells."""
    process = subprocess.Popen(
        [sys.executable, "-", str(directory), str(seconds), *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env=os.environ | env,
    )
    assert process.stdin is not None
    process.stdin.write(SCRIPT)
    process.stdin.close()
    return process


@pytest.mark.parametrize("forks", [(), ("forks",)])
def test_it_works_from_stdin_and_workers_end_even_with_a_killed_rank_0(
    directory: Path, forks: tuple[str, ...], tmp_path: Path
) -> None:
    if forks and sys.platform == "win32":
        pytest.skip("Windows cannot fork")
    process = run_script(directory, 60, *forks, TMPDIR=str(tmp_path))
    assert process.stdout is not None
    try:
        expected = LLM.load(directory, weights="float32").generate("abc", GREEDY).token_ids
        assert process.stdout.readline().strip() == str(expected)
        workers = workers_of(process.pid)
        assert len(workers) == 1
        assert list(tmp_path.glob("minigen-*")), "where the ranks meet"
        forked = [each for each in children_of(process.pid) if each not in workers]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    try:
        wait_until(lambda: not any(map(is_running, workers)))
        assert any(map(is_running, forked)) == bool(forks), "a child of rank 0 may live on"
        assert not list(tmp_path.glob("minigen-*")), "and nothing is left"
    finally:
        for each in forked:
            os.kill(each, signal.SIGKILL)


@contextmanager
def generating(directory: Path) -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """Run a long generation on 3 ranks; yield the process and its workers."""
    command = [sys.executable, "-m", "minigen", "generate", "-m", str(directory), "abc"]
    options = ["--weights", "float32", "--tensor-parallel-size", "3", "--max-tokens", "30000"]
    process = subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    assert process.stdout is not None
    try:
        assert process.stdout.read(30), "text has come"
        workers = workers_of(process.pid)
        assert len(workers) == 2
        yield process, workers
    finally:
        process.kill()
        process.communicate()


@pytest.mark.long
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("victim", "by", "status"),
    [
        ("a worker", signal.SIGKILL, 1),
        ("rank 0", signal.SIGKILL, -signal.SIGKILL),
        ("rank 0", signal.SIGINT, 130),
    ],
)
def test_if_one_process_ends_in_mid_generation_all_end_soon_with_a_status(
    long_context: Path, victim: str, by: signal.Signals, status: int
) -> None:
    with generating(long_context) as (process, workers):
        killed = workers[1] if victim == "a worker" else process.pid
        started = time.monotonic()
        os.kill(killed, by)
        _, stderr = process.communicate(timeout=PATIENCE)
        wait_until(lambda: not any(map(is_running, workers)), 30)
        assert time.monotonic() - started < SOON
    assert process.returncode == status
    lines = stderr.strip().splitlines()
    assert len(lines) == (1 if victim == "a worker" else 0)
    for line in lines:
        message = rf"minigen: Rank [12] of 3 \(process {killed}\) was killed by SIGKILL"
        assert re.match(message, line)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("victim", ["worker", "rank 0"])
def test_the_command_ends_with_a_status_while_it_loads(directory: Path, victim: str) -> None:
    command = [sys.executable, "-m", "minigen", "generate", "-m", str(directory)]
    process = subprocess.Popen(
        [*command, "abc", "--tensor-parallel-size", "2", "--max-tokens", "100000", "--n", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    try:
        wait_until(lambda: workers_of(process.pid), 30)
        (worker,) = workers_of(process.pid)
        started = time.monotonic()
        os.kill(*((worker, signal.SIGKILL) if victim == "worker" else (process.pid, signal.SIGINT)))
        _, stderr = process.communicate(timeout=PATIENCE)
        assert time.monotonic() - started < SOON
    finally:
        process.kill()
    assert process.returncode == (1 if victim == "worker" else 130)
    assert ("was killed by SIGKILL" in stderr) == (victim == "worker")
    assert "Traceback" not in stderr
    wait_until(lambda: not is_running(worker))


def test_a_worker_that_finds_its_rendezvous_folder_gone_ends(tmp_path: Path) -> None:
    """Rank 0 was interrupted while it started the worker, and has removed its folder."""
    rendezvous = tmp_path / "gone" / "rendezvous"
    with (tmp_path / "said.txt").open("w+b") as said:
        worker = start_module(
            "minigen.parallel.worker", "1", "2", str(rendezvous), stdout=said, stderr=said
        )
        try:
            assert worker.wait(PATIENCE) == LOST_ANOTHER  # without the check it waits five minutes
        finally:
            worker.kill()
            worker.communicate()
    assert b"is gone" in (tmp_path / "said.txt").read_bytes()
