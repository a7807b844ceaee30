"""Builds the runner that computes layer by layer in torch, on a device that is passed in."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from minigen.checkpoint.checkpoint import Checkpoint
from minigen.config import EngineConfig
from minigen.engine.model_runner import BlockPool, PagedRunner
from minigen.engine.placement import moved_to
from minigen.errors import OptionError
from minigen.kv_cache.block_manager import BlockManager
from minigen.model.layers import DenseLinear
from minigen.model.transformer import MakeLinear, Transformer, build_transformer
from minigen.protocols import Linear, Runner


def build_runner(
    checkpoint: Checkpoint,
    options: EngineConfig,
    manager: BlockManager,
    num_threads: int,
    pool: BlockPool,
    attention: Any,
    dtype: torch.dtype,
    device: torch.device,
    linears: tuple[MakeLinear, Callable[[DenseLinear], Linear]],
    form: str,
) -> Runner:
    """Read the weights in `dtype` onto `device`, where `pool` is, and return the runner.

    `linears` makes the linear layers there, in `form`, and converts an output head tied to the
    embedding. Runners of one checkpoint share the weights of a form.
    """
    config = checkpoint.config

    def build() -> Transformer:
        with one_thread(), ThreadPoolExecutor(num_threads) as threads:
            model = build_transformer(config, checkpoint.tensors, dtype, *linears, threads.map)
        return moved_to(model, device)

    model = checkpoint.shared.get((form, device, num_threads), build)
    windows, most = config.sliding_windows, options.max_num_batched_tokens
    parts = (model, pool, manager, windows, most, num_threads)
    return PagedRunner(*parts, attention, device)


@contextmanager
def memory_for(num_blocks: int, block_size: int) -> Iterator[None]:
    """Raise `OptionError` if the system, or torch for its device, refuses the KV cache's memory."""
    try:
        yield
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise OptionError(
            f"num_blocks {num_blocks} of {block_size} tokens each need more memory than "
            f"this machine can allocate: {error}."
        ) from error


@contextmanager
def one_thread() -> Iterator[None]:
    """Unpack weights with one torch thread; several layers may be unpacked at the same time.

    Threads within an operation gain little on many small ones. If another program keeps a core
    busy, their synchronisation makes the unpacking take twenty times as long.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
