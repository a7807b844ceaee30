"""Builds an engine from a checkpoint and options; all implementations are chosen here."""

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
from minigen.parallel.launch import Settings, start_driver
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
PREFIX_CACHES = {"radix": RadixPrefixCache}
SAMPLERS: dict[str, type] = {"batch": BatchSampler}
ATTENTIONS: dict[str, AttentionBackend] = {
    "auto": attend_paged,  # on a CPU
    "torch": attend_paged,
    "triton": attend_by_kernels,
}


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
    close: Callable[[], Any]  # ends the worker processes, if there are any


def assemble(checkpoint: Checkpoint, options: EngineConfig) -> Assembly:
    """Choose an implementation for each part, and build the engine from them."""
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
            "of one token and an output of one; raise num_blocks, kv_cache_memory or block_size."
        )
    scheduler = _scheduler(options, manager)
    if isinstance(chosen, GpuPlan):
        choose = gpu_chooser()
    else:
        choose = make_chooser(chosen, config.vocab_size, num_threads)
    sampler = _sampler(options, choose)
    # Last, because it may start processes: errors of the other parts have been raised by now.
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
        "sampler": _describe_sampler(sampler, chosen.kernels),
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
    """Return the runner (of rank 0 if there are several ranks), and what ends the other ranks."""
    if isinstance(chosen, GpuPlan):
        return gpu_runner(checkpoint, options, manager, num_blocks), _nothing_to_close
    if options.tensor_parallel_size == 1:
        runner = make_runner(checkpoint, options, manager, chosen, num_blocks, attend, num_threads)
        return runner, _nothing_to_close
    path = str(checkpoint.path.resolve())
    settings = Settings(path, chosen.form, options.block_size, num_blocks, num_threads)
    driver = start_driver(
        checkpoint,
        settings,
        options.tensor_parallel_size,
        manager,
        options.max_num_batched_tokens,
        trace,
    )
    return driver, driver.close


def _nothing_to_close() -> None:
    """Do nothing: the engine runs in this process only."""


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
    return instance if _is_builtin(part, ALLOCATORS) else CheckedAllocator(instance, num_blocks)


def _prefix_cache(options: EngineConfig, allocator: AnyAllocator) -> PrefixCache | None:
    if not options.enable_prefix_caching:
        return None
    wanted = "radix" if options.prefix_cache is None else options.prefix_cache
    part = find_part("prefix_cache", wanted, PREFIX_CACHES)
    if _is_builtin(part, PREFIX_CACHES):
        return RadixPrefixCache(allocator, options.block_size)
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
    own = _is_builtin(part, SCHEDULERS)
    return instance if own else CheckedScheduler(instance, manager, options.max_num_batched_tokens)


def _sampler(options: EngineConfig, choose: Choose) -> Sampler:
    wanted = "batch" if options.sampler is None else options.sampler
    part = find_part("sampler", wanted, SAMPLERS)
    if _is_builtin(part, SAMPLERS):
        return BatchSampler(choose)
    instance: Sampler = build_part("sampler", part)
    return CheckedSampler(instance)


def _describe_sampler(sampler: Sampler, sampler_kernels: str) -> str:
    if not isinstance(sampler, BatchSampler):
        return name_of(sampler)
    by = "torch" if sampler.choose is choose_tokens else sampler_kernels
    return f"{name_of(sampler)}, tokens chosen by {by}"


def _attend(options: EngineConfig) -> AttentionBackend:
    part = find_part("attention_backend", options.attention_backend, ATTENTIONS)
    if part is attend_by_kernels or options.device == "cuda":
        return kernel_attention(options)
    instance: AttentionBackend = build_part("attention_backend", part)
    return instance if _is_builtin(part, ATTENTIONS) else checked_attend(instance)


def _is_builtin(part: Any, known: Mapping[str, Any]) -> bool:
    """Return whether the part is one of minigen's own, which need no checking wrapper."""
    return any(part is each for each in known.values())


def _num_blocks(
    config: ModelConfig, options: EngineConfig, token_bytes: int, default_kv_bytes: int
) -> int:
    """Return `num_blocks`, or as many blocks as fit into `kv_cache_memory` and can be used.

    `token_bytes` is the size of one token's key and value in one layer.
    """
    if options.num_blocks is not None:
        return options.num_blocks
    block_bytes = config.num_layers * options.block_size * token_bytes
    usable = options.max_num_seqs * blocks_needed(config.max_positions, options.block_size)
    kv_bytes = options.kv_bytes or default_kv_bytes
    if kv_bytes < block_bytes:
        raise OptionError(
            f"kv_cache_memory {kv_bytes} bytes holds no block: a block of {options.block_size} "
            f"tokens takes {block_bytes} bytes."
        )
    return min(kv_bytes // block_bytes, usable)
