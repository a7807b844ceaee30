"""Ranks of a split model on this machine: threads in the interpreter, a group of one on a GPU.

Every rank runs an engine of its own over its share. All ranks see the same logits, so they choose
the same tokens and schedule the same steps, and no steps have to be sent.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gpu.engines import Shape, greedy, make_engine, run
from minigen.checkpoint.model_config import ModelConfig
from minigen.checkpoint.safetensors import read_safetensors
from minigen.kernels.triton.kernel_model import KernelModel, kernel_model
from minigen.model.attention import attend_packed
from minigen.model.layers import rms_norm
from minigen.model.transformer import build_transformer, dense_linear, expected_tensors
from minigen.parallel.comm import Comm, TracedComm, run_ranks
from minigen.parallel.gpu import GpuRank, share_model
from minigen.parallel.sharding import local_config
from minigen.trace.events import Trace
from tests.gpu import small_llama
from tests.gpu.contexts import DEVICE

HERE = torch.device(DEVICE)
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
PROMPTS = ([3], [4, 9, 8, 7, 6], [5, 9, 2, 1])
BUDGET = 8  # tokens of a step: the last prompt is computed in two, beside decodes
NUM_TOKENS = 3  # of an answer
# Its vocabulary of 97 tokens has a narrower last share, of 2 ranks as of 3.
CONFIG = replace(small_llama.CONFIG, qk_norm=True, sliding_windows=(None, 3))


@dataclass(frozen=True)
class TakingTurns:
    """A comm whose thread computes alone, because Triton's interpreter runs one kernel at a time.

    The thread holds `turn` except while it waits for the other ranks.
    """

    comm: Comm
    turn: Any  # a lock

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def num_ranks(self) -> int:
        return self.comm.num_ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._let_others(self.comm.all_reduce, x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._let_others(self.comm.all_gather, x)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._let_others(self.comm.broadcast, x)

    def _let_others(self, message: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        self.turn.release()
        try:
            return message(x)
        finally:
            self.turn.acquire()


def random_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Return random tensors whose activations keep their size."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.ones(shape)
        if "norm" in name
        else torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        for name, shape in expected_tensors(config).items()
    }


def sums_without_an_order(config: ModelConfig) -> dict[str, Tensor]:
    """Return random tensors with one power of two in each row of a matrix.

    Every product is then exact, and every sum has one number that is not zero, so ranks and kernels
    may add in any order.
    """
    generator = torch.Generator().manual_seed(4)
    made = random_tensors(config)
    for name, tensor in made.items():
        if tensor.dim() == 2 and "embed" not in name:
            columns = torch.randint(tensor.shape[1], (len(tensor), 1), generator=generator)
            powers = 2.0 ** torch.randint(-1, 2, columns.shape, generator=generator)
            signs = 2.0 * torch.randint(2, columns.shape, generator=generator) - 1
            made[name] = torch.zeros_like(tensor).scatter_(1, columns, powers * signs)
    return made


def saved(config: ModelConfig, tensors: dict[str, Tensor], directory: Path) -> Any:
    """Save tensors in bfloat16, and return what a share is loaded from, like a checkpoint."""
    directory.mkdir(exist_ok=True)
    save_file(
        {name: each.bfloat16() for name, each in tensors.items()}, directory / "m.safetensors"
    )
    return SimpleNamespace(config=config, tensors=read_safetensors(directory), path=directory)


def whole_model(checkpoint: Any) -> KernelModel:
    """Return the model of one device, without ranks."""
    config = checkpoint.config
    model = build_transformer(config, checkpoint.tensors, DTYPE, dense_linear(DTYPE, HERE))
    return kernel_model(model, config.max_positions, HERE)


@dataclass(frozen=True)
class Found:
    """What an engine computed: its tokens, the logits that chose each, and its KV cache.

    `logits` has a row for each token of each answer, by sequence. `steps` has the number of tokens
    and of rows of logits of each step.
    """

    tokens: list[list[int]]
    logits: Tensor
    kv: Tensor
    steps: list[tuple[int, int]]


def run_engine(model: KernelModel, config: ModelConfig) -> Found:
    """Generate in an engine with this model or share of one."""
    shape = Shape(
        config.vocab_size,
        config.hidden,
        config.num_layers,
        config.q_heads,
        config.kv_heads,
        config.head_dim,
        config.ffn,
        tied=config.tied_embeddings,
        head_norms=config.qk_norm,
    )
    engine = make_engine(model, shape, 64, 3, 12, BUDGET, config.sliding_windows)
    compute, steps = engine.runner.logits, []
    rows: dict[tuple[int, int], Tensor] = {}

    def recorded(chunks: Any) -> Tensor:
        logits = compute(chunks)
        chosen = [chunk.sequence for chunk in chunks if chunk.samples]
        steps.append((sum(chunk.num_tokens for chunk in chunks), len(logits)))
        for sequence, row in zip(chosen, logits.cpu(), strict=True):
            rows[sequence.sequence_id, len(sequence.output_ids)] = row
        return logits

    engine.runner.logits = recorded
    sequences = [greedy(i, prompt, NUM_TOKENS) for i, prompt in enumerate(PROMPTS)]
    run(engine, sequences)
    engine.runner.steps.release()  # before the group ends
    logits = torch.stack([rows[place] for place in sorted(rows)])
    tokens = [each.output_ids for each in sequences]
    return Found(tokens, logits, engine.runner.pool.kv.cpu(), steps)


@torch.inference_mode()
def exact_logits(checkpoint: Any, tokens: list[list[int]]) -> Tensor:
    """Return the logits of these answers in float64, from one plain pass for each sequence."""
    config, double = checkpoint.config, torch.float64
    model = build_transformer(config, checkpoint.tensors, double, dense_linear(double))
    found = []
    for prompt, answer in zip(PROMPTS, tokens, strict=True):
        ids = torch.tensor([*prompt, *answer[:-1]])
        attend = attend_packed([len(ids)], config.sliding_windows)
        hidden = model(ids, torch.arange(len(ids)), attend)[-len(answer) :]
        normed = rms_norm(hidden, model.norm, model.norm_eps)
        found.append(model.head(normed))
    return torch.cat(found)


def run_whole(checkpoint: Any) -> Found:
    """Run the model of one device."""
    return run_engine(whole_model(checkpoint), checkpoint.config)


def run_share(checkpoint: Any, comm: Comm, trace: Trace | None = None) -> Found:
    """Run one rank's share."""
    data = comm if trace is None else TracedComm(comm, trace)
    rank = GpuRank(comm, data, HERE, DTYPE, obstacle=None)
    smaller = local_config(checkpoint.config, comm.rank, comm.num_ranks)
    return run_engine(share_model(rank, checkpoint), smaller)


def run_shares(checkpoint: Any, num_ranks: int, traces: list[Trace] | None = None) -> list[Found]:
    """Run all shares in threads, which take turns."""
    turn = threading.Lock()

    def work(comm: Comm) -> Found:
        with turn:
            trace = None if traces is None else traces[comm.rank]
            return run_share(checkpoint, TakingTurns(comm, turn), trace)

    return run_ranks(num_ranks, work, timeout=600)
