"""From a checkpoint and options to an engine: the one place that chooses implementations."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from minigen.cache.blocks import BlockAllocator, blocks_needed
from minigen.cache.manager import BlockManager
from minigen.cache.paged import KVPool
from minigen.cache.prefix import RadixPrefixCache
from minigen.checkpoint import Checkpoint
from minigen.config import ModelConfig
from minigen.engine.engine import Engine
from minigen.engine.runner import PagedRunner
from minigen.engine.scheduler import ContinuousScheduler
from minigen.errors import OptionError
from minigen.machine import multiplies_bfloat16
from minigen.model.transformer import build_transformer, dense_linear
from minigen.sampling import BatchSampler
from minigen.trace import Trace

WEIGHTS: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEFAULT_KV_BYTES = 2**30


@dataclass(frozen=True)
class EngineOptions:
    """The knobs of an engine, checked when built; `LLM.load` says what each is."""

    weights: str = "auto"
    threads: int | None = None
    max_sequences: int = 16
    max_batch_tokens: int = 2048
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory: int | None = None
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        if self.weights not in ("auto", *WEIGHTS):
            known = ", ".join(WEIGHTS)
            raise OptionError(f"weights must be auto or one of {known}, not {self.weights!r}.")
        for name in ("max_sequences", "max_batch_tokens", "block_size"):
            _whole(name, getattr(self, name))
        for name in ("threads", "num_blocks", "kv_memory"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name))
        if self.num_blocks is not None and self.kv_memory is not None:
            raise OptionError("num_blocks and kv_memory say the same thing; give one of them.")
        if self.max_batch_tokens < self.max_sequences:
            raise OptionError(
                f"max_batch_tokens {self.max_batch_tokens} must be at least max_sequences "
                f"{self.max_sequences}, so that each running sequence gets its token in a step."
            )
        if not isinstance(self.prefix_cache, bool):
            raise OptionError(f"prefix_cache must be True or False, not {self.prefix_cache!r}.")


@dataclass(frozen=True)
class Assembly:
    """An engine, what it can hold, and for each part which implementation was chosen, and why."""

    engine: Engine
    choices: dict[str, str]
    pool_tokens: int
    max_sequences: int


def assemble(checkpoint: Checkpoint, options: EngineOptions) -> Assembly:
    """Choose an implementation for each part, and put them together."""
    config = checkpoint.config
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    form, reason = _choose_weights(options.weights)
    dtype = WEIGHTS[form]
    num_blocks = _num_blocks(config, options, dtype)
    with _one_thread():
        model = build_transformer(config, checkpoint.tensors, dtype, dense_linear(dtype))
    allocator = BlockAllocator(num_blocks)
    prefix_cache = RadixPrefixCache(allocator, options.block_size) if options.prefix_cache else None
    trace = Trace()
    manager = BlockManager(
        allocator,
        prefix_cache,
        options.block_size,
        options.max_sequences,
        min(num_blocks, blocks_needed(config.max_positions, options.block_size)),
        trace,
    )
    scheduler = ContinuousScheduler(manager, options.max_sequences, options.max_batch_tokens, trace)
    pool = KVPool(
        config.num_layers, num_blocks, config.kv_heads, options.block_size, config.head_dim, dtype
    )
    runner = PagedRunner(model, pool, manager, config.sliding_windows)
    choices = {
        "model": f"{config.family}, {checkpoint.form}, from {checkpoint.path}",
        "weights": f"{form} ({reason})",
        "linear": "torch",
        "attention": "torch scaled_dot_product_attention over gathered blocks",
        "kv cache": f"{num_blocks} blocks of {options.block_size} tokens",
        "prefix cache": "radix tree" if prefix_cache is not None else "none",
        "scheduler": "ContinuousScheduler",
        "sampler": "BatchSampler",
        "threads": str(torch.get_num_threads()),
    }
    engine = Engine(scheduler, runner, BatchSampler(), trace)
    return Assembly(engine, choices, manager.num_tokens, options.max_sequences)


def _num_blocks(config: ModelConfig, options: EngineOptions, dtype: torch.dtype) -> int:
    """As many as asked for, or as fit into `kv_memory`; never more than could be used."""
    if options.num_blocks is not None:
        return options.num_blocks
    numbers = 2 * config.num_layers * config.kv_heads * options.block_size * config.head_dim
    block_bytes = numbers * dtype.itemsize
    usable = options.max_sequences * blocks_needed(config.max_positions, options.block_size)
    affordable = (options.kv_memory or DEFAULT_KV_BYTES) // block_bytes
    if affordable == 0:
        raise OptionError(
            f"kv_memory {options.kv_memory or DEFAULT_KV_BYTES} bytes holds no block: one of "
            f"{options.block_size} tokens takes {block_bytes} bytes."
        )
    return min(affordable, usable)


def _whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name} must be a whole number above 0, not {value!r}.")


def _choose_weights(weights: str) -> tuple[str, str]:
    """The form of the weights, and the reason for it."""
    if weights != "auto":
        return weights, "as asked"
    if multiplies_bfloat16():
        return "bfloat16", "auto: this processor multiplies bfloat16"
    return "float32", "auto: this processor has no instructions for bfloat16"


@contextmanager
def _one_thread() -> Iterator[None]:
    """Unpack weights without torch's threads: they gain little by many small products, and where
    another program keeps a core busy their waiting for each other takes twenty times as long."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
