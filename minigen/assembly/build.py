"""Builds an engine from a checkpoint and options; all implementations are chosen here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from minigen.assembly import cpu
from minigen.assembly.processor_parts import describe_processors
from minigen.assembly.speculative_parts import build_speculator, describe_speculation
from minigen.checkpoint.checkpoint import Checkpoint
from minigen.checkpoint.model_config import ModelConfig
from minigen.config import EngineConfig
from minigen.engine.engine import Engine
from minigen.engine.scheduler import ContinuousScheduler
from minigen.errors import OptionError
from minigen.hardware import set_torch_threads, torch_threads
from minigen.kv_cache.block_allocator import BlockAllocator, blocks_needed
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.radix_cache import RadixPrefixCache
from minigen.protocols import BlockAllocator as AnyAllocator
from minigen.protocols import PrefixCache, Runner, Sampler, Scheduler
from minigen.sampling.sampler import BatchSampler, Choose
from minigen.sockets.resolve import build_part, find_part, name_of
from minigen.trace.events import Trace

if TYPE_CHECKING:
    from minigen.hub import Progress


def _static(manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int) -> Scheduler:
    from minigen.engine.static_batching import StaticScheduler

    return StaticScheduler(manager, max_num_seqs, max_num_batched_tokens)


def _dynamic(manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int) -> Scheduler:
    from minigen.engine.static_batching import DynamicScheduler

    return DynamicScheduler(manager, max_num_seqs, max_num_batched_tokens)


SCHEDULERS: dict[str, Callable[..., Scheduler]] = {
    "continuous": ContinuousScheduler,
    "static": _static,
    "dynamic": _dynamic,
}
ALLOCATORS: dict[str, type] = {"free-list": BlockAllocator}
PREFIX_CACHES = {"radix": RadixPrefixCache}
SAMPLERS: dict[str, type] = {"batch": BatchSampler}


class Plan(Protocol):
    """How a model runs on one device: what was chosen for it, and how to build that."""

    @property
    def kv_dtype(self) -> str:
        """The data type of keys and values."""

    @property
    def kv_bytes(self) -> int:
        """The bytes of one token's key and value in one layer."""

    @property
    def kv_fixed_bytes(self) -> int:
        """The bytes of the KV cache that no block has, such as tokens in full precision."""

    @property
    def default_kv_bytes(self) -> int:
        """The bytes of the KV cache if no option sets them."""

    @property
    def tokens_by(self) -> str:
        """What chooses the tokens, in a word."""

    def describe(self) -> dict[str, str]:
        """Return what was chosen for each part, and why."""

    def chooser(self, num_threads: int) -> Choose:
        """Return the function that chooses tokens from logits."""

    def build(
        self, manager: BlockManager, num_blocks: int, num_threads: int, trace: Trace
    ) -> tuple[Runner, Callable[[], Any]]:
        """Build the runner, with memory for `num_blocks` blocks, and what ends its processes."""

    def close(self) -> None:
        """End the processes that planning or building has started."""


def make_plan(
    checkpoint: Checkpoint,
    options: EngineConfig,
    trace: Trace | None = None,
    progress: "Progress | None" = None,
) -> Plan:
    """Choose how the model runs. Only this function asks for the device."""
    if options.device == "cuda":
        from minigen.assembly import cuda

        return cuda.plan(checkpoint, options, trace or Trace())
    if options.device == "mps":
        from minigen.assembly import mps

        return mps.plan(checkpoint, options)
    return cpu.plan(checkpoint, options, progress)


@dataclass(frozen=True)
class Assembly:
    """An engine, its capacity, and the implementation chosen for each part, with the reason."""

    engine: Engine
    choices: dict[str, str]
    manager: BlockManager
    num_blocks: int
    pool_tokens: int
    max_num_seqs: int
    kv_bytes: int  # bytes of one token's key and value in one layer
    stored_bytes: int  # bytes of the model's tensors on disk
    num_parameters: int
    close: Callable[[], Any]  # ends the worker processes, if there are any


def assemble(
    checkpoint: Checkpoint, options: EngineConfig, progress: "Progress | None" = None
) -> Assembly:
    """Choose an implementation for each part, and build the engine from them.

    `progress` gets lines of text if kernels must be compiled; without it they go to stderr.
    """
    num_threads = max((options.threads or torch_threads()) // _num_local_ranks(options), 1)
    set_torch_threads(num_threads)
    trace = Trace()
    plan = make_plan(checkpoint, options, trace, progress)
    try:
        return _assemble(checkpoint, options, plan, num_threads, trace, progress)
    except BaseException:
        plan.close()
        raise


def _num_local_ranks(options: EngineConfig) -> int:
    """Return how many processes of the model share this machine's cores."""
    if options.num_ranks == 1:
        return 1
    from minigen.parallel.launch import num_local_ranks

    return num_local_ranks(options.num_ranks)


def _assemble(
    checkpoint: Checkpoint,
    options: EngineConfig,
    plan: Plan,
    num_threads: int,
    trace: Trace,
    progress: "Progress | None",
) -> Assembly:
    num_blocks = _num_blocks(checkpoint.config, options, plan)
    manager = _manager(checkpoint.config, options, num_blocks, trace)
    if manager.num_tokens < 2:
        raise OptionError(
            f"A KV cache of {manager.num_tokens} token holds no request: the shortest has a prompt "
            "of one token and an output of one; raise num_blocks, kv_cache_memory or block_size."
        )
    scheduler = _scheduler(options, manager)
    sampler = _sampler(options, plan.chooser(num_threads))
    own = options.sampler in (None, "batch", BatchSampler)
    by = f", tokens chosen by {plan.tokens_by}" if own else ""
    plan_draft = partial(make_plan, progress=progress)
    speculator = build_speculator(
        checkpoint, options, scheduler, manager.num_tokens, plan_draft, num_threads
    )
    # Last, because it may start processes: errors of the other parts have been raised by now.
    runner, close = plan.build(manager, num_blocks, num_threads, trace)
    choices = {
        "model": f"{checkpoint.config.family}, {checkpoint.form}, from {checkpoint.path}",
        **plan.describe(),
        "kv cache": f"{num_blocks} blocks of {options.block_size} tokens, in {plan.kv_dtype}",
        "allocator": name_of(manager.allocator),
        "prefix cache": "none" if manager.prefix_cache is None else name_of(manager.prefix_cache),
        "scheduler": name_of(scheduler),
        "sampler": name_of(sampler) + by,
        **describe_processors(options),
        **describe_speculation(options),
        "threads": str(num_threads),
    }
    return Assembly(
        Engine(scheduler, runner, sampler, trace, speculator),
        choices,
        manager,
        num_blocks,
        manager.num_tokens,
        options.max_num_seqs,
        plan.kv_bytes,
        checkpoint.num_bytes,
        checkpoint.num_parameters,
        close,
    )


def _manager(
    config: ModelConfig, options: EngineConfig, num_blocks: int, trace: Trace
) -> BlockManager:
    allocator = _allocator(options, num_blocks)
    return BlockManager(
        allocator,
        _prefix_cache(options, allocator),
        options.block_size,
        options.max_num_seqs,
        min(num_blocks, blocks_needed(config.max_positions, options.block_size)),
        trace,
    )


def _allocator(options: EngineConfig, num_blocks: int) -> AnyAllocator:
    wanted = "free-list" if options.allocator is None else options.allocator
    part = find_part("allocator", wanted, ALLOCATORS)
    instance: AnyAllocator = build_part("allocator", part, num_blocks=num_blocks)
    if instance.num_free != num_blocks:
        raise OptionError(
            f"allocator {name_of(instance)} starts with {instance.num_free} free blocks, but all "
            f"{num_blocks} blocks of this engine must be free at the start (num_blocks is their "
            "number)."
        )
    if _is_builtin(part, ALLOCATORS):
        return instance
    from minigen.sockets.checks_cache import CheckedAllocator

    return CheckedAllocator(instance, num_blocks)


def _prefix_cache(options: EngineConfig, allocator: AnyAllocator) -> PrefixCache | None:
    if not options.enable_prefix_caching:
        return None
    wanted = "radix" if options.prefix_cache is None else options.prefix_cache
    part = find_part("prefix_cache", wanted, PREFIX_CACHES)
    if _is_builtin(part, PREFIX_CACHES):
        return RadixPrefixCache(allocator, options.block_size)
    from minigen.sockets.checks_cache import CheckedPrefixCache, TrackedAllocator

    tracked = TrackedAllocator(allocator, part)
    instance: PrefixCache = build_part(
        "prefix_cache", part, allocator=tracked, block_size=options.block_size
    )
    return CheckedPrefixCache(instance, tracked, options.block_size)


def _scheduler(options: EngineConfig, manager: BlockManager) -> Scheduler:
    part = find_part("scheduler", options.scheduler, SCHEDULERS)
    instance: Scheduler = build_part(
        "scheduler",
        part,
        manager=manager,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
    if _is_builtin(part, SCHEDULERS):
        return instance
    from minigen.sockets.checks_scheduler import CheckedScheduler

    return CheckedScheduler(instance, manager, options.max_num_batched_tokens)


def _sampler(options: EngineConfig, choose: Choose) -> Sampler:
    wanted = "batch" if options.sampler is None else options.sampler
    part = find_part("sampler", wanted, SAMPLERS)
    if _is_builtin(part, SAMPLERS):
        return BatchSampler(choose)
    from minigen.sockets.checks_model import CheckedSampler

    instance: Sampler = build_part("sampler", part)
    return CheckedSampler(instance)


def _is_builtin(part: Any, known: Mapping[str, Any]) -> bool:
    """Return whether the part is one of minigen's own, which need no checking wrapper."""
    return any(part is each for each in known.values())


def _num_blocks(config: ModelConfig, options: EngineConfig, plan: Plan) -> int:
    """Return `num_blocks`, or as many blocks as fit into `kv_cache_memory` and can be used.

    Each stage of a pipeline has the same part of the memory, and all have the same blocks, so the
    stage with the most layers sets their number.
    """
    if options.num_blocks is not None:
        return options.num_blocks
    num_stages = options.pipeline_parallel_size
    most = -(-config.num_layers // num_stages)
    num_layers = num_stages * max(options.num_layers_of_stages or [most])
    block_bytes = num_layers * options.block_size * plan.kv_bytes
    usable = options.max_num_seqs * blocks_needed(config.max_positions, options.block_size)
    kv_bytes = options.kv_bytes or plan.default_kv_bytes
    left = kv_bytes - plan.kv_fixed_bytes
    if left < block_bytes:
        fixed = f", and all blocks that are not full {plan.kv_fixed_bytes} bytes"
        given = f"kv_cache_memory {kv_bytes} bytes"
        if options.kv_bytes is None:
            step = f"a step of max_num_batched_tokens {options.max_num_batched_tokens}"
            left_by = f"what the weights and {step} leave free"
            default = "the default" if options.device == "cpu" else left_by
            given = f"A KV cache of {kv_bytes} bytes, {default},"
        raise OptionError(
            f"{given} holds no block: a block of {options.block_size} "
            f"tokens takes {block_bytes} bytes{fixed if plan.kv_fixed_bytes else ''}."
        )
    return min(left // block_bytes, usable)
