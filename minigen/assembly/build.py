"""From a checkpoint and options to an engine: the one place that chooses implementations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from minigen.assembly.cpu import Plan, make_chooser, make_runner, plan
from minigen.assembly.cuda import (
    GpuPlan,
    attend_by_kernels,
    gpu_chooser,
    gpu_plan,
    gpu_runner,
    kernel_attention,
)
from minigen.checkpoint.checkpoint import Checkpoint
from minigen.checkpoint.model_config import ModelConfig
from minigen.config import EngineConfig
from minigen.engine.engine import Engine
from minigen.engine.model_runner import AttentionBackend
from minigen.engine.scheduler import ContinuousScheduler
from minigen.engine.static_batching import DynamicScheduler, StaticScheduler
from minigen.errors import OptionError
from minigen.hardware import torch_threads
from minigen.kv_cache.block_allocator import BlockAllocator, blocks_needed
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.paged import attend_paged
from minigen.kv_cache.radix_cache import RadixPrefixCache
from minigen.parallel.launch import Settings, lead
from minigen.parallel.sharding import check_ranks
from minigen.protocols import BlockAllocator as AnyAllocator
from minigen.protocols import PrefixCache, Runner, Sampler, Scheduler
from minigen.sampling.sampler import BatchSampler, Choose, choose_tokens
from minigen.sockets.checks_cache import CheckedAllocator, CheckedPrefixCache, TrackedAllocator
from minigen.sockets.checks_model import CheckedSampler, checked_attend
from minigen.sockets.checks_scheduler import CheckedScheduler
from minigen.sockets.resolve import build_part, find_part, name_of
from minigen.trace.events import Trace

SCHEDULERS: dict[str, type] = {
    "continuous": ContinuousScheduler,
    "static": StaticScheduler,
    "dynamic": DynamicScheduler,
}
ALLOCATORS: dict[str, type] = {"free-list": BlockAllocator}
PREFIX_CACHES: dict[str, type | None] = {"on": RadixPrefixCache, "off": None}
SAMPLERS: dict[str, type] = {"batch": BatchSampler}
ATTENTIONS: dict[str, AttentionBackend] = {
    "auto": attend_paged,  # on a CPU
    "torch": attend_paged,
    "triton": attend_by_kernels,
}


@dataclass(frozen=True)
class Assembly:
    """An engine, what it can hold, and for each part which implementation was chosen, and why."""

    engine: Engine
    choices: dict[str, str]
    manager: BlockManager
    num_blocks: int
    pool_tokens: int
    max_num_seqs: int
    kv_bytes: int  # of one token's key and value in one layer
    stored_bytes: int  # of the model's tensors, as they are on disk
    close: Callable[[], Any]  # ends other processes, if there are any


def assemble(checkpoint: Checkpoint, options: EngineConfig) -> Assembly:
    """Choose an implementation for each part, and put them together."""
    config = checkpoint.config
    ranks = options.tensor_parallel_size
    num_threads = max((options.threads or torch_threads()) // ranks, 1)
    torch.set_num_threads(num_threads)
    attend = _attend(options)
    chosen: Plan | GpuPlan
    if options.device == "cuda":
        chosen = gpu_plan(checkpoint, options)
    else:
        chosen = plan(checkpoint, options, own_attention=attend is attend_paged)
    if ranks > 1:
        check_ranks(config, checkpoint.tensors, chosen.form, ranks)
    kv_bytes = chosen.kv_bytes(replace(config, kv_heads=max(config.kv_heads, ranks)))
    num_blocks = _num_blocks(config, options, kv_bytes, chosen.default_kv_bytes)
    trace = Trace()
    manager = _manager(config, options, num_blocks, trace)
    if manager.num_tokens < 2:
        raise OptionError(
            f"A KV cache of {manager.num_tokens} token holds no request: the shortest has a prompt "
            "of one token and an answer of one; raise num_blocks, kv_cache_memory or block_size."
        )
    scheduler = _scheduler(options, manager)
    if isinstance(chosen, GpuPlan):
        choose = gpu_chooser()
    else:
        choose = make_chooser(chosen, config.vocab_size, num_threads)
    sampler = _sampler(options, choose)
    # Last, since it may start processes: whatever is wrong with another part is known by now.
    runner, close = _runner(
        checkpoint, options, manager, chosen, num_blocks, attend, num_threads, trace
    )
    choices = {
        "model": f"{config.family}, {checkpoint.form}, from {checkpoint.path}",
        "weights": f"{chosen.form} ({chosen.form_reason})",
        "runner": chosen.runner,
        **({"ranks": f"{ranks} processes, over gloo"} if ranks > 1 else {}),
        "linear": chosen.linear,
        "attention": "paged, in the compiled step" if chosen.compiled else name_of(attend),
        "kv cache": f"{num_blocks} blocks of {options.block_size} tokens, in {chosen.kv_dtype}",
        "allocator": name_of(manager.allocator),
        "prefix cache": "none" if manager.prefix_cache is None else name_of(manager.prefix_cache),
        "scheduler": name_of(scheduler),
        "sampler": _in_words(sampler, chosen.kernels),
        "threads": str(num_threads),
    }
    engine = Engine(scheduler, runner, sampler, trace)
    return Assembly(
        engine,
        choices,
        manager,
        num_blocks,
        manager.num_tokens,
        options.max_num_seqs,
        kv_bytes,
        checkpoint.num_bytes,
        close,
    )


def _runner(
    checkpoint: Checkpoint,
    options: EngineConfig,
    manager: BlockManager,
    chosen: Plan | GpuPlan,
    num_blocks: int,
    attend: AttentionBackend,
    num_threads: int,
    trace: Trace,
) -> tuple[Runner, Callable[[], Any]]:
    """What runs the model, as rank 0 if there are several, and what ends the others."""
    if isinstance(chosen, GpuPlan):
        return gpu_runner(checkpoint, options, manager, num_blocks), _nothing_to_close
    if options.tensor_parallel_size == 1:
        made = make_runner(checkpoint, options, manager, chosen, num_blocks, attend, num_threads)
        return made, _nothing_to_close
    path = str(checkpoint.path.resolve())
    settings = Settings(path, chosen.form, options.block_size, num_blocks, num_threads)
    leading = lead(
        checkpoint,
        settings,
        options.tensor_parallel_size,
        manager,
        options.max_num_batched_tokens,
        trace,
    )
    return leading, leading.close


def _nothing_to_close() -> None:
    """All is in this process."""


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
    made: AnyAllocator = build_part("allocator", part, num_blocks=num_blocks)
    if made.num_free != num_blocks:
        raise OptionError(
            f"allocator {name_of(made)} begins with {made.num_free} free blocks, not with all "
            f"{num_blocks} of this engine (num_blocks says how many there are)."
        )
    return made if _is_own(part, ALLOCATORS) else CheckedAllocator(made, num_blocks)


def _prefix_cache(options: EngineConfig, allocator: AnyAllocator) -> PrefixCache | None:
    wanted = options.prefix_cache
    if isinstance(wanted, bool):
        wanted = "on" if wanted else "off"
    part = find_part("prefix_cache", wanted, PREFIX_CACHES)
    if part is None:
        return None
    if _is_own(part, PREFIX_CACHES):
        return RadixPrefixCache(allocator, options.block_size)
    lent = TrackedAllocator(allocator, part)
    made: PrefixCache = build_part(
        "prefix_cache", part, allocator=lent, block_size=options.block_size
    )
    return CheckedPrefixCache(made, lent, options.block_size)


def _scheduler(options: EngineConfig, manager: BlockManager) -> Scheduler:
    part = find_part("scheduler", options.scheduler, SCHEDULERS)
    made: Scheduler = build_part(
        "scheduler",
        part,
        manager=manager,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
    own = _is_own(part, SCHEDULERS)
    return made if own else CheckedScheduler(made, manager, options.max_num_batched_tokens)


def _sampler(options: EngineConfig, choose: Choose) -> Sampler:
    wanted = "batch" if options.sampler is None else options.sampler
    part = find_part("sampler", wanted, SAMPLERS)
    if _is_own(part, SAMPLERS):
        return BatchSampler(choose)
    made: Sampler = build_part("sampler", part)
    return CheckedSampler(made)


def _in_words(sampler: Sampler, sampler_kernels: str) -> str:
    if not isinstance(sampler, BatchSampler):
        return name_of(sampler)
    by = "torch" if sampler.choose is choose_tokens else sampler_kernels
    return f"{name_of(sampler)}, tokens chosen by {by}"


def _attend(options: EngineConfig) -> AttentionBackend:
    part = find_part("attention_backend", options.attention_backend, ATTENTIONS)
    if part is attend_by_kernels or options.device == "cuda":
        return kernel_attention(options)
    made: AttentionBackend = build_part("attention_backend", part)
    return made if _is_own(part, ATTENTIONS) else checked_attend(made)


def _is_own(part: Any, known: Mapping[str, Any]) -> bool:
    """Whether minigen's own classes make the part, so that it needs no watching."""
    return any(part is each for each in known.values())


def _num_blocks(
    config: ModelConfig, options: EngineConfig, token_bytes: int, default_kv_bytes: int
) -> int:
    """As many as asked for, or as fit into `kv_cache_memory`; never more than could be used.

    `token_bytes` are those of a token in one layer.
    """
    if options.num_blocks is not None:
        return options.num_blocks
    block_bytes = config.num_layers * options.block_size * token_bytes
    usable = options.max_num_seqs * blocks_needed(config.max_positions, options.block_size)
    kv_bytes = options.kv_bytes or default_kv_bytes
    if kv_bytes < block_bytes:
        raise OptionError(
            f"kv_cache_memory {kv_bytes} bytes holds no block: one of {options.block_size} tokens takes "
            f"{block_bytes} bytes."
        )
    return min(kv_bytes // block_bytes, usable)
