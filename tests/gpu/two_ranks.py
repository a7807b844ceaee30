"""A model over two ranks with a GPU each: `torchrun --nproc-per-node 2 -m tests.gpu.two_ranks DIR`.

Without a GPU, in Triton's interpreter, the ranks are processes with a CPU each.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.engines import greedy, run
from minigen.assembly import cuda
from minigen.checkpoint.checkpoint import Checkpoint, open_checkpoint
from minigen.config import EngineConfig
from minigen.engine.engine import Engine
from minigen.engine.scheduler import ContinuousScheduler
from minigen.kv_cache.block_allocator import BlockAllocator
from minigen.kv_cache.block_manager import BlockManager
from minigen.sampling.sampler import BatchSampler
from minigen.sequence import Sequence
from minigen.trace.events import Trace
from tests.gpu.contexts import DEVICE
from tests.gpu.shares import CONFIG, PROMPTS, random_tensors, saved

NUM_RANKS, NUM_BLOCKS = 2, 40
OPTIONS = EngineConfig(
    max_num_seqs=3, max_num_batched_tokens=8, device="cuda", tensor_parallel_size=NUM_RANKS
)
QWEN3 = replace(CONFIG, family="qwen3", qkv_bias=False, sliding_windows=(None, None))


def save_model(directory: Path) -> Checkpoint:
    """Save a random model in a form that other processes can open."""
    saved(QWEN3, random_tensors(QWEN3), directory)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": QWEN3.vocab_size,
        "hidden_size": QWEN3.hidden,
        "num_hidden_layers": QWEN3.num_layers,
        "num_attention_heads": QWEN3.q_heads,
        "num_key_value_heads": QWEN3.kv_heads,
        "head_dim": QWEN3.head_dim,
        "intermediate_size": QWEN3.ffn,
        "max_position_embeddings": QWEN3.max_positions,
        "rms_norm_eps": QWEN3.norm_eps,
        "rope_theta": QWEN3.rope_theta,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return open_checkpoint(directory)


@contextmanager
def split_engine(checkpoint: Checkpoint) -> Iterator[tuple[Engine, cuda.CudaPlan]]:
    """Load a model over two ranks, which end with the block."""
    trace = Trace()
    make_plan = cuda.plan if DEVICE == "cuda" else cuda.interpreted_plan
    plan = make_plan(checkpoint, OPTIONS, trace)
    try:
        allocator = BlockAllocator(NUM_BLOCKS)
        manager = BlockManager(allocator, None, OPTIONS.block_size, 3, 8, trace)
        runner, _ = plan.build(manager, NUM_BLOCKS, num_threads=1, trace=trace)
        scheduler = ContinuousScheduler(manager, 3, OPTIONS.max_num_batched_tokens)
        yield Engine(scheduler, runner, BatchSampler(plan.chooser(num_threads=1)), trace), plan
    finally:
        plan.close()


def answers(engine: Engine, num_tokens: int) -> list[Sequence]:
    """Return greedy answers to three prompts."""
    sequences = [greedy(i, prompt, num_tokens) for i, prompt in enumerate(PROMPTS)]
    run(engine, sequences)
    return sequences


if __name__ == "__main__":
    with split_engine(open_checkpoint(Path(sys.argv[1]))) as (started, _):
        print([each.output_ids for each in answers(started, 3)], flush=True)
