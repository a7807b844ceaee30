"""A pipeline ends as a whole, whichever rank ends: one clear error, a status, no process left."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from minigen import SamplingParams
from minigen.errors import WorkerError
from minigen.parallel.comm import ThreadComm, run_ranks
from tests.processes import is_running, workers_of
from tests.ranks import GREEDY, PROMPTS, answers
from tests.stages import save_five_layers, staged
from tests.test_41_ends import SOON
from tests.test_41_serving import SERVE, TORCHRUN, serving
from tests.waiting import PATIENCE, wait_until

PLACE = torch.zeros(2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_five_layers(tmp_path_factory.mktemp("staged"))


@pytest.fixture(scope="module")
def long_context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    return save_five_layers(folder, max_position_embeddings=32_768)


@pytest.mark.parametrize("victim", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_killed_stage_is_one_clear_error_soon_and_nothing_is_left(
    directory: Path, victim: int
) -> None:
    """Rank 1 is in the middle, and rank 2 has the head: rank 0 waits for its logits only."""
    with staged(directory, 3) as llm:
        worker = workers_of(os.getpid())[victim - 1]
        stream = llm.stream_deltas(["abc"], SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
        os.kill(worker, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(WorkerError, match=rf"Rank \d of 3 \(process {worker}\) was killed by"):
            list(stream)
        assert time.monotonic() - started < SOON
        with pytest.raises(WorkerError, match="SIGKILL"):
            llm.generate("abc", GREEDY)
    assert workers_of(os.getpid()) == []


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_step_leaves_the_stages_together_and_a_failure_of_rank_0_ends_them(
    directory: Path,
) -> None:
    endless = SamplingParams(max_tokens=110, ignore_eos=True, temperature=0)
    with staged(directory, 2) as llm:
        before = answers(llm, GREEDY)
        for delay in (0.02, 0.05):
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS * 20, endless, progress=False)
        assert answers(llm, GREEDY) == before

        llm.engine.runner._runner.stage = None  # type: ignore[attr-defined]
        with pytest.raises(WorkerError, match="Rank 0 failed in the middle of a step"):
            llm.generate("abc", GREEDY)
        assert workers_of(os.getpid()) == []


def test_a_failing_rank_leaves_no_rank_waiting_for_its_message_or_its_subgroup() -> None:
    def work(comm: ThreadComm) -> None:
        pair = comm.subgroup([0, 1] if comm.rank < 2 else [2, 3])
        if comm.rank == 3:
            raise ValueError("rank 3 fell over")
        with pytest.raises(WorkerError, match="did not arrive"):
            comm.receive(PLACE.clone(), 3) if comm.rank < 2 else pair.broadcast(PLACE.clone())

    with pytest.raises(ValueError, match="rank 3 fell over"):
        run_ranks(4, work)


@pytest.mark.long
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("victim", "by", "status"),
    [
        ("a stage", signal.SIGKILL, 1),
        ("a stage", signal.SIGTERM, 1),
        ("rank 0", signal.SIGKILL, -signal.SIGKILL),
        ("rank 0", signal.SIGINT, 130),
    ],
)
def test_if_one_process_ends_in_mid_generation_all_end_soon_with_a_status(
    long_context: Path, victim: str, by: signal.Signals, status: int
) -> None:
    command = [sys.executable, "-m", "minigen", "generate", "-m", str(long_context), "abc"]
    options = ["--weights", "float32", "--pipeline-parallel-size", "3", "--max-tokens", "30000"]
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
        killed = workers[0] if victim == "a stage" else process.pid
        started = time.monotonic()
        os.kill(killed, by)
        _, stderr = process.communicate(timeout=PATIENCE)
        wait_until(lambda: not any(map(is_running, workers)), 30)
        assert time.monotonic() - started < SOON
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == status
    lines = stderr.strip().splitlines()
    assert len(lines) == (1 if victim == "a stage" else 0)
    for line in lines:
        message = rf"minigen: Rank [12] of 3 \(process {killed}\) was killed by {by.name}"
        assert re.match(message, line)


@pytest.mark.long
@pytest.mark.parametrize("starter", [[], TORCHRUN], ids=["itself", "torchrun"])
def test_a_stage_killed_in_mid_stream_is_one_error_to_the_client_and_the_servers_end(
    long_context: Path, starter: list[str]
) -> None:
    with serving(long_context, *starter, *SERVE, "--pipeline-parallel-size", "3") as server:
        stream = server.stream()
        assert next(stream)["choices"][0]["text"] is not None
        started = time.monotonic()
        os.kill(server.started[1], signal.SIGKILL)
        *texts, last = stream
        assert not any("error" in each for each in texts)
        assert last["error"]["code"] == "engine_stopped"
        assert server.ends_soon(started) == 1
    if starter == []:
        (error,) = [line for line in server.said if "SIGKILL" in line]
        assert re.match(r"minigen: Rank [12] of 3 \(process \d+\) was killed by SIGKILL", error)
        assert not any("Traceback" in line for line in server.said)
