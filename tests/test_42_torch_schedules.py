"""Torch's own pipelines as witnesses: `torch.distributed.pipelining`, over processes.

Comparable are the forward passes of one step: which micro-batch each stage computes in which order,
what it computes, and in which turn until torch's first backward pass. What torch does not have is
not compared: steps that follow one another (a micro-batch of a decode that comes back), a KV cache
over steps, micro-batches of unequal size (torch fixes the shapes), and transfers that take time.
Nor are torch's backward passes, for which an interleaved schedule pauses after its warm-up. If the
number of micro-batches is no multiple of the number of devices, torch divides them into fewer and
longer rounds than the simulator.
"""

import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from minigen.checkpoint.checkpoint import Checkpoint, open_checkpoint
from minigen.kv_cache.paged import Batch, KVPool, attend_paged
from minigen.model.transformer import dense_linear
from minigen.parallel.comm import Comm, SoloComm, run_ranks
from minigen.parallel.launch import Settings, load_stage
from minigen.parallel.pipeline import Stage, build_stage, micro_batches, stage_layers
from minigen.parallel.runner import Step
from minigen_course.ch42_pipeline import lesson
from tests.stages import NUM_LAYERS, save_five_layers

SEQUENCES, TOKENS, BLOCK_SIZE = 4, 3, 4
Seen = dict[int, list[Tensor]]  # by stage: what it returned for each micro-batch

# The program of rank 1 of torch's pipelines.
PEER = """
import sys
from pathlib import Path
import torch
from tests.test_42_torch_schedules import run_torch
torch.save(run_torch(1, Path(sys.argv[1]), Path(sys.argv[2])), sys.argv[3])
"""


def whole_step() -> Step:
    """Return a step of four prompts with three tokens each, which all are asked for logits."""
    positions, num_tokens = torch.arange(TOKENS), SEQUENCES * TOKENS
    batch = Batch(
        token_ids=torch.arange(3, 3 + num_tokens),
        positions=positions.repeat(SEQUENCES),
        slots=torch.cat([BLOCK_SIZE * (each + 1) + positions for each in range(SEQUENCES)]),
        query_starts=list(range(0, num_tokens + 1, TOKENS)),
        context_lens=torch.full((SEQUENCES,), TOKENS),
        block_tables=torch.arange(1, SEQUENCES + 1).unsqueeze(-1),
        logits_rows=torch.arange(num_tokens),
        num_decodes=0,
    )
    return Step([], batch)


class TorchStage(nn.Module):
    """A stage of minigen's layers, as torch's pipelines take it; a forward pass is a micro-batch.

    `seen` collects what each forward pass returned.
    """

    def __init__(self, stage: Stage, pool: KVPool, parts: list[Batch]):
        super().__init__()
        self.stage, self.pool, self.parts = stage, pool, parts
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        part = self.parts[len(self.seen)]
        x = self.stage.embed(x) if self.stage.embedding is not None else x
        attend = attend_paged(self.pool, part, [None] * len(self.stage.layers))
        x = self.stage(x, part.positions, attend)
        x = x if self.stage.head is None else self.stage.logits(x)
        self.seen.append(x)
        return x


def torch_stage(checkpoint: Checkpoint, layers: range) -> TorchStage:
    """Return a stage with these layers, and an empty KV cache of its own."""
    config, dtype = checkpoint.config, torch.float32
    stage = build_stage(config, checkpoint.tensors, dtype, dense_linear(dtype), layers, SoloComm())
    sizes = (config.kv_heads, BLOCK_SIZE, config.head_dim)
    pool = KVPool(len(layers), SEQUENCES + 1, *sizes, dtype)
    return TorchStage(stage, pool, micro_batches(whole_step().batch, SEQUENCES))


@torch.no_grad()
def run_torch(rank: int, model: Path, meeting: Path) -> list[Seen]:
    """Run both of torch's schedules on this rank of two; return what its stages saw in each.

    GPipe has one stage per rank, and the interleaved schedule two.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting.as_uri(), rank=rank, world_size=2)
    try:
        checkpoint = open_checkpoint(model)
        return [_run_schedule(checkpoint, rank, num_groups) for num_groups in (1, 2)]
    finally:
        dist.destroy_process_group()


def _run_schedule(checkpoint: Checkpoint, rank: int, num_groups: int) -> Seen:
    config, tokens = checkpoint.config, whole_step().batch.token_ids
    num_stages = 2 * num_groups
    spans = stage_layers(NUM_LAYERS, num_stages)
    modules = {each: torch_stage(checkpoint, spans[each]) for each in range(rank, num_stages, 2)}
    hidden = torch.empty(TOKENS, config.hidden)
    stages = [
        PipelineStage(
            module,
            each,
            num_stages,
            torch.device("cpu"),
            input_args=(tokens[:TOKENS] if each == 0 else hidden,),
            output_args=(
                torch.empty(TOKENS, config.vocab_size) if each == num_stages - 1 else hidden,
            ),
        )
        for each, module in modules.items()
    ]
    schedule: Any = (
        ScheduleGPipe(stages[0], SEQUENCES)
        if num_groups == 1
        else ScheduleInterleaved1F1B(stages, SEQUENCES)  # type: ignore[arg-type]
    )
    schedule.step(*([tokens] if rank == 0 else []))
    return {each: module.seen for each, module in modules.items()}


class WatchedStage:
    """A stage that keeps what it returned for each micro-batch."""

    def __init__(self, stage: Stage):
        self.stage, self.embed = stage, stage.embed
        self.seen: list[Tensor] = []

    def __call__(self, *inputs: Any) -> Tensor:
        self.seen.append(self.stage(*inputs))
        return self.seen[-1]

    def logits(self, x: Tensor) -> Tensor:
        self.seen[-1] = self.stage.logits(x)
        return self.seen[-1]


def run_minigen(model: Path, num_stages: int) -> list[list[Tensor]]:
    """Return what each of minigen's stages returned for each micro-batch of the same step."""
    checkpoint = open_checkpoint(model)
    sizes = (BLOCK_SIZE, SEQUENCES, 1, num_stages, SEQUENCES)

    def work(comm: Comm) -> list[Tensor]:
        runner: Any = load_stage(checkpoint, Settings(str(model), "float32", *sizes), comm, None)
        runner.stage = WatchedStage(runner.stage)
        runner.run(whole_step())
        seen: list[Tensor] = runner.stage.seen
        return seen

    return run_ranks(num_stages, work)


@pytest.mark.long
def test_torchs_pipelines_return_every_bit_of_each_stage(tmp_path: Path) -> None:
    """GPipe on two stages and the interleaved schedule on four, over the same two processes."""
    model, meeting, theirs = (tmp_path / name for name in ("model", "meeting", "seen.pt"))
    model.mkdir()
    save_five_layers(model)
    command = [sys.executable, "-c", PEER, *map(str, (model, meeting, theirs))]
    peer = subprocess.Popen(command)
    try:
        mine = run_torch(0, model, meeting)
        assert peer.wait(60) == 0
    finally:
        peer.kill()
        peer.wait()
    for num_stages, own, other in zip((2, 4), mine, torch.load(theirs), strict=True):
        found = own | other
        assert sorted(found) == list(range(num_stages))
        for stage, right in enumerate(run_minigen(model, num_stages)):
            assert len(found[stage]) == len(right) == SEQUENCES
            assert all(map(torch.equal, found[stage], right)), stage
    run = lesson.pass_once([1.0] * 2, SEQUENCES)  # each stage took the micro-batches in this order
    assert [each[2] for each in simulated(run, 1)] == list(range(SEQUENCES))


def torchs_orders(devices: int, batches: int, groups: int) -> list[list[Any]]:
    """Return torch's actions of each device, one per turn; None is a turn without one."""
    whole = {"num_stages": groups * devices, "group_size": devices, "group_rank": 0}
    stages: Any = [SimpleNamespace(**whole) for _ in range(groups)]
    orders = ScheduleInterleaved1F1B(stages, batches).pipeline_order
    return [orders[device] for device in range(devices)]


def is_forward(action: Any) -> bool:
    return action is not None and action.computation_type.name == "FORWARD"


def forwards(actions: list[Any]) -> list[tuple[int, int, int]]:
    """Return (turn, stage, micro-batch) of each forward pass."""
    return [
        (turn, each.stage_index, each.microbatch_index)
        for turn, each in enumerate(actions)
        if is_forward(each)
    ]


def simulated(run: lesson.Timeline, device: int) -> list[tuple[int, int, int]]:
    """Return the same of a device in the simulator, where a group of layers takes one turn."""
    own = sorted((each for each in run.spans if each.rank == device), key=lambda each: each.start)
    return [(round(each.start), each.chunk * run.num_ranks + device, each.batch) for each in own]


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize(("devices", "batches"), [(2, 2), (2, 8), (3, 6), (4, 4), (4, 8), (4, 3)])
def test_interleaved_stages_have_the_order_of_torchs_and_the_turns_of_its_warm_up(
    devices: int, batches: int, groups: int
) -> None:
    """Torch's actions take turns together; with fewer batches than devices they wait elsewhere."""
    run = lesson.interleaved([float(groups)] * devices, batches, groups)
    num_compared = 0
    for device, actions in enumerate(torchs_orders(devices, batches, groups)):
        mine, theirs = simulated(run, device), forwards(actions)
        assert [each[1:] for each in mine] == [each[1:] for each in theirs]
        if batches >= devices:
            num_turns = sum(1 for _ in takewhile(is_forward, actions[device:]))
            assert mine[:num_turns] == theirs[:num_turns]
            num_compared += num_turns
    assert num_compared > devices * devices * (groups - 1) or batches < devices
