"""Models of five layers for stages, over real processes and over threads, and what they must equal.

Cutting a batch changes the sizes of matrix products, and with them the order of their sums. So the
twin of a pipeline is one process that computes the same micro-batches with all layers (`in_turn`):
their logits must be equal in every bit.
"""

import contextlib
from collections.abc import Generator, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigen import LLM, SamplingParams
from minigen.checkpoint.checkpoint import Checkpoint
from minigen.engine.model_runner import PagedRunner, batch_of
from minigen.kv_cache.paged import Batch, KVPool, attend_paged
from minigen.parallel.comm import Comm, MessageCounters, TracedComm, run_ranks
from minigen.parallel.launch import Settings, load_stage
from minigen.parallel.pipeline import micro_batches
from minigen.parallel.runner import Step
from minigen.protocols import Attend
from minigen.sequence import ScheduledChunk
from minigen.trace.events import Trace
from minigen.trace.timeline import Timeline
from tests.tiny import TINY_VOCAB, save_model, save_tokenizer

NUM_LAYERS = 5
CROWDED: dict[str, Any] = {"num_blocks": 11, "block_size": 4, "max_num_seqs": 6}


def save_five_layers(directory: Path, variant: str = "llama", **changes: Any) -> Path:
    """Save a model of 5 layers, 8 query heads and 2 KV heads; context 128."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
    sizes = {"vocab_size": TINY_VOCAB, "num_hidden_layers": NUM_LAYERS, **heads}
    save_model(directory, variant, **(sizes | changes))
    save_tokenizer(directory)
    return directory


@contextlib.contextmanager
def staged(
    model: Path, num_stages: int, per_stage: int = 1, **options: Any
) -> Generator[LLM, None, None]:
    """Load a model over stages of `per_stage` processes each, which end with the block."""
    options = {**{"weights": "float32", "threads": num_stages * per_stage}, **options}
    llm = LLM.load(
        model, pipeline_parallel_size=num_stages, tensor_parallel_size=per_stage, **options
    )
    try:
        yield llm
    finally:
        llm.close()


def by_layers(pool: KVPool, batch: Batch, windows: Any) -> Attend:
    """Attention passed as a custom function, so that the layers run one by one, as on a rank."""
    return attend_paged(pool, batch, windows)


class InTurn:
    """One process that computes a step's micro-batches one after another, each in all layers.

    `steps` are the steps so far, with their logits, if `keeps` is set.
    """

    def __init__(self, runner: PagedRunner, most: int, keeps: bool = False):
        self.runner, self.most, self.keeps = runner, most, keeps
        self.manager = runner.manager
        self.steps: list[tuple[Step, Tensor]] = []

    @torch.inference_mode()
    def logits(self, chunks: SequenceOf[ScheduledChunk]) -> Tensor:
        torch.set_num_threads(self.runner.num_threads)
        copies = self.runner.manager.pop_pending_copies()
        decodes = takewhile(lambda chunk: chunk.num_tokens == 1, chunks)
        batch = batch_of(self.runner.packer.pack(chunks), sum(1 for _ in decodes))
        self.runner.pool.copy_blocks(copies)
        logits = torch.cat([self._compute(part) for part in micro_batches(batch, self.most)])
        if self.keeps:
            self.steps.append((Step(copies, kept(batch)), logits.clone()))
        return logits

    def _compute(self, part: Batch) -> Tensor:
        attend = self.runner.attend(self.runner.pool, part, self.runner.windows)
        model = self.runner.model
        return model.logits(model(part.token_ids, part.positions, attend)[part.logits_rows])


def kept(batch: Batch) -> Batch:
    """Return a copy that the next step does not overwrite."""
    tensors: dict[str, Any] = {
        name: each for name, each in vars(batch).items() if isinstance(each, Tensor)
    }
    return replace(batch, **{name: each.clone() for name, each in tensors.items()})


def in_turn(model: Path, most: int, *, keeps: bool = False, **options: Any) -> LLM:
    """Load a model in one process that computes up to `most` micro-batches one after another."""
    options = {**{"weights": "float32", "threads": 1}, **options}
    if options["weights"] != "float32":
        options["attention_backend"] = by_layers
    llm = LLM.load(model, **options)
    runner = llm.engine.runner
    assert isinstance(runner, PagedRunner)
    llm.engine.runner = InTurn(runner, most, keeps)
    return llm


@dataclass
class Replay:
    """What one rank computed, and the messages that it sent and received."""

    logits: list[Tensor]
    counters: MessageCounters
    kv_bytes: int
    held: Any  # its `Stage`


def replay(
    checkpoint: Checkpoint,
    steps: list[Step],
    num_stages: int,
    most: int,
    per_stage: int = 1,
    block_size: int = 4,
    num_blocks: int = 11,
    dealt: SequenceOf[int] | None = None,
) -> list[Replay]:
    """Run the same steps on ranks that are threads, and return what each has done."""
    path = str(checkpoint.path)
    sizes = (block_size, num_blocks, 1, num_stages, most)
    settings = Settings(path, "float32", *sizes, dealt=dealt)

    def work(comm: Comm) -> Replay:
        trace, counters = Trace(), MessageCounters()
        trace.subscribe(Timeline(on_message=counters))
        runner = load_stage(checkpoint, settings, TracedComm(comm, trace), None)
        logits = [runner.run(step) for step in steps]
        return Replay(logits, counters, runner.pool.kv.nbytes, runner.stage)

    return run_ranks(num_stages * per_stage, work)


def exact_answers(llm: LLM, prompts: list[Any], params: SamplingParams) -> Iterator[Any]:
    """Yield tokens and their log-probabilities, which are equal only if the logits are."""
    for output in llm.generate(prompts, params, progress=False):
        yield [(choice.token_ids, choice.logprobs) for choice in output.choices]
