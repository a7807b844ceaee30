"""The GPU's engine gives the results of plain torch; on a GPU its decodes are captured."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.gpu.engines import Shape, greedy, make_engine, random_model, run
from benchmarks.gpu.workloads import below_likeliest, margins
from minigen.assembly import cuda
from minigen.checkpoint.safetensors import read_safetensors
from minigen.config import EngineConfig
from minigen.engine.engine import Engine
from minigen.engine.scheduler import ContinuousScheduler
from minigen.kernels.triton.attention import DevicePool
from minigen.kv_cache.block_allocator import BlockAllocator
from minigen.kv_cache.block_manager import BlockManager
from minigen.model.transformer import build_transformer, dense_linear, expected_tensors
from minigen.sampling.sampler import BatchSampler
from minigen.speculative.pace import FixedPace
from minigen.speculative.speculator import Speculator
from minigen.trace.events import Trace
from tests.gpu.contexts import DEVICE
from tests.gpu.small_llama import CONFIG

HERE = torch.device(DEVICE)
# The interpreter's arithmetic in bfloat16 is wrong.
DTYPE, MOST_MARGIN = (torch.bfloat16, 0.3) if DEVICE == "cuda" else (torch.float32, 1e-3)
TINY = Shape(97, 64, 2, 4, 2, 16, 96, tied=True, head_norms=True)


@pytest.mark.parametrize("budget", [8, 40])
def test_tokens_prefilled_in_chunks_and_beside_others_are_those_of_one_pass(budget: int) -> None:
    model = random_model(TINY, 128, HERE, DTYPE)
    assert float(margins(model, TINY, (1, 17, 33), budget).max()) < MOST_MARGIN


class Repeated:
    """Proposes the last token again and again, and at times what a sequence had before."""

    def propose(self, sequences, counts):
        return [
            (each.token_ids[-1:] * count if len(each) % 2 else each.token_ids[:count])
            for each, count in zip(sequences, counts, strict=True)
        ]

    def end(self, sequence) -> None:
        pass


def test_tokens_after_drafts_are_those_of_one_pass() -> None:
    model = random_model(TINY, 128, HERE, DTYPE)
    engine = make_engine(model, TINY, 64, 4, 20)
    engine.speculator = Speculator(Repeated(), FixedPace(), TINY.vocab, 64, 3, 20)
    sequences = [greedy(i, [5 + i] * (3 + 7 * i), 9) for i in range(3)]
    run(engine, sequences)
    assert engine.speculator.counts.drafted > 0
    assert float(below_likeliest(model.model, sequences, [None] * TINY.layers).max()) < MOST_MARGIN


def test_copied_blocks_are_whole_in_every_layer_and_no_others_change() -> None:
    pool = DevicePool(3, 6, 2, 4, 8, torch.float32, HERE)
    pool.kv.normal_()
    expected = pool.kv.clone()
    expected[:, :, 4], expected[:, :, 6] = pool.kv[:, :, 1], pool.kv[:, :, 3]
    pool.copy_blocks([(1, 4), (3, 6)])
    assert torch.equal(pool.kv, expected)


def test_the_slots_of_a_finished_sequence_are_not_written_by_later_steps() -> None:
    model = random_model(TINY, 128, HERE, DTYPE)
    engine = make_engine(model, TINY, 64, 4, 20)
    sequences = [greedy(i, [5 + i] * 20, 6) for i in range(4)]
    for each in sequences:
        engine.add(each)
    last = sequences[-1]
    while len(last.output_ids) < 2:  # four decodes: a captured step is as large
        engine.step()
    pool, blocks = engine.runner.pool, list(last.block_ids)
    left = pool.kv[:, :, blocks].clone()
    engine.abort(last.sequence_id)
    run(engine, [])  # three decodes: in a step of four, a row is left over
    assert torch.equal(pool.kv[:, :, blocks], left)


def test_a_checkpoint_on_the_device_continues_as_in_plain_torch(tmp_path: Path) -> None:
    shapes = expected_tensors(CONFIG)
    generator = torch.Generator().manual_seed(3)
    made = {
        name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }
    made |= {name: torch.ones(shape) for name, shape in shapes.items() if "norm" in name}
    rounded = {name: each.bfloat16() for name, each in made.items()}
    save_file(rounded, tmp_path / "model.safetensors")
    tensors = read_safetensors(tmp_path)
    checkpoint = SimpleNamespace(config=CONFIG, tensors=tensors, num_parameters=10**5)
    options = EngineConfig(max_num_seqs=3, max_num_batched_tokens=24, device="cuda")
    if DEVICE == "cuda":
        free, _ = torch.cuda.mem_get_info()
        assert free / 2 < cuda.plan(checkpoint, options, Trace()).default_kv_bytes
    manager = BlockManager(BlockAllocator(40), None, options.block_size, 3, 8, Trace())
    plan = cuda.CudaPlan(checkpoint, options, default_kv_bytes=0, device=DEVICE, dtype=DTYPE)
    runner, _ = plan.build(manager, 40, num_threads=1, trace=Trace())
    scheduler = ContinuousScheduler(manager, 3, options.max_num_batched_tokens)
    engine = Engine(scheduler, runner, BatchSampler(plan.chooser(num_threads=1)), Trace())
    sequences = [greedy(i, [3 + i] * length, 5) for i, length in enumerate((1, 19, 30))]
    run(engine, sequences)
    plain = build_transformer(CONFIG, tensors, torch.float32, dense_linear(torch.float32))
    margin = below_likeliest(plain, sequences, CONFIG.sliding_windows)
    assert float(margin.max()) < MOST_MARGIN
