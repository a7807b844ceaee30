"""A model over the ranks of context parallelism, in threads, behind an ordinary `LLM`."""

import threading
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigen import LLM
from minigen.checkpoint.checkpoint import Checkpoint, open_checkpoint
from minigen.engine.model_runner import Packer, batch_of
from minigen.errors import WorkerError
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.paged import KVPool
from minigen.model.transformer import build_transformer, dense_linear
from minigen.parallel.comm import MessageCounters, TracedComm, thread_comms
from minigen.parallel.context_runner import ContextRunner
from minigen.parallel.runner import Step
from minigen.sequence import ScheduledChunk
from minigen.trace.events import Trace
from minigen.trace.timeline import Timeline


class ThreadedRanks:
    """A `Runner` whose ranks are threads; `counters[r]` counts the messages of rank r."""

    def __init__(
        self, checkpoint: Checkpoint, manager: BlockManager, num_blocks: int, num_ranks: int
    ):
        config, size = checkpoint.config, manager.block_size // num_ranks
        model = build_transformer(
            config, checkpoint.tensors, torch.float32, dense_linear(torch.float32)
        )
        self.manager = manager
        self.packer = Packer(manager, manager.block_size, 2048)
        self.counters = [MessageCounters() for _ in range(num_ranks)]
        self.runners = []
        self.steps: list[Step] = []
        for comm, counter in zip(thread_comms(num_ranks), self.counters, strict=True):
            trace = Trace()
            trace.subscribe(Timeline(on_message=counter))
            sizes = (config.kv_heads, size, config.head_dim)
            pool = KVPool(config.num_layers, num_blocks, *sizes, torch.float32)
            traced = TracedComm(comm, trace)
            self.runners.append(ContextRunner(model, pool, config.sliding_windows, traced, 1))

    def logits(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        num_decodes = sum(1 for _ in takewhile(lambda chunk: chunk.num_tokens == 1, chunks))
        batch = batch_of(self.packer.pack(chunks), num_decodes)
        step = Step(self.manager.pop_pending_copies(), batch)
        self.steps.append(step)
        found: list[Any] = [None] * len(self.runners)

        def work(rank: int) -> None:
            try:
                found[rank] = self.runners[rank].run(step)
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(found))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [each for each in found if isinstance(each, Exception)]
        if errors:  # that of the rank that failed, not of those that waited for it
            raise min(errors, key=lambda error: isinstance(error, WorkerError))
        return found[0]


def over_threads(directory: Path, num_ranks: int, **options: Any) -> tuple[LLM, ThreadedRanks]:
    """Load a model in float32 whose ranks are threads."""
    llm = LLM.load(directory, weights="float32", **options)
    num_blocks = llm.manager.allocator.num_free
    ranks = ThreadedRanks(open_checkpoint(directory), llm.manager, num_blocks, num_ranks)
    llm.engine.runner = ranks
    return llm, ranks
