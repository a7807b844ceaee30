"""Attention backends made from a function that computes the attention of one sequence."""

from collections.abc import Callable, Generator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager

import torch
from torch import Tensor

from minigen.engine.model_runner import AttentionBackend, PagedRunner
from minigen.errors import OptionError
from minigen.kv_cache.paged import Batch, KVPool
from minigen.llm import LLM
from minigen.model.attention import attention
from minigen.protocols import Attend
from minigen.sockets.checks_model import CheckedAttention
from minigen.sockets.resolve import build_part

Attention = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]


@contextmanager
def attending(llm: LLM, attend: AttentionBackend) -> Generator[None, None, None]:
    """Use another attention backend in a loaded engine while the block runs.

    `attend` is what `LLM.load(attention_backend=...)` takes; the weights are not loaded again. Load
    the engine with `enable_prefix_caching=False`, because a cached prefix is not recomputed. Raises
    `OptionError` for what is no attention backend, and for an engine whose runner has its own.
    """
    runner = llm.engine.runner
    if not isinstance(runner, PagedRunner):
        runs = llm.describe()["runner"]
        raise OptionError(
            f"This engine's step is {runs}, and its attention cannot be exchanged: load the model "
            "with weights='float32'."
        )
    checked = CheckedAttention(build_part("attention_backend", attend), runner.pool, runner.windows)
    own, runner.attend = runner.attend, checked
    try:
        yield
    finally:
        runner.attend = own


def attend_by(prefill: Attention, decode: Attention = attention) -> AttentionBackend:
    """Return an attention backend that computes every prompt with `prefill`.

    `prefill` is called with (q, k, v, window), as chapter 14's `attention` is, for each sequence
    with more than one new token, and `decode` for each sequence with one. Keys and values are those
    of the whole context, gathered from the pool.
    """

    def make(pool: KVPool, batch: Batch, windows: SequenceOf[int | None]) -> Attend:
        lengths, starts = batch.context_lens.tolist(), batch.query_starts

        def attend(layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pool.store(layer_id, k, v, batch.slots)
            mixed = []
            for row, length in enumerate(lengths):
                own = q[starts[row] : starts[row + 1]]
                table = batch.block_tables[row, : -(-length // pool.block_size)]
                keys, values = (each[:length] for each in pool.gather(layer_id, table))
                part = prefill if len(own) > 1 else decode
                mixed.append(part(own, keys, values, windows[layer_id]))
            return torch.cat(mixed)

        return attend

    make.__name__ = getattr(prefill, "__name__", "attend_by")
    return make
