"""Replace a part of the package by the learner's own, so that the running engine calls it.

An attention backend can be made from a function that computes the attention of one sequence.
"""

import sys
from collections.abc import Callable, Generator
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

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
from minigen_course.grading.exercise import exercises
from minigen_course.lab.inspect_model import share_no_more

RUN_PARTS = {
    "automaton",
    "figures",
    "flash",
    "kernels",
    "reference",
}  # modules of the course that use parts


@contextmanager
def using(chapter: int | str, **parts: Any) -> Generator[None, None, None]:
    """Let the whole package use your parts in a block: `with using(16, keep_top_p=mine):`.

    Every module that holds the package's own object gets yours, and its own again at the end, when
    a line says what ran and how many calls it had (for a class: how many objects were created).
    Raises `ValueError` for a name that the chapter does not have.
    """
    known = exercises(f"{int(chapter):02}")
    for name in parts:
        if name not in known:
            raise ValueError(f"Chapter {chapter} has no {name}; it has {', '.join(known)}.")
    calls = dict.fromkeys(parts, 0)
    changed: list[tuple[Any, str, Any]] = []
    with ExitStack() as counting:
        for name, part in parts.items():
            own, count = known[name].solution, partial(_count, calls, name)
            if isinstance(part, type):
                counting.enter_context(_counted_objects(part, count))
                yours: Any = part
            else:
                yours = _counted(part, count)
            for module in [each for key, each in sys.modules.items() if _runs_parts(key)]:
                if vars(module).get(name) is own:
                    changed.append((module, name, own))
                    setattr(module, name, yours)
        share_no_more()  # what your parts build is theirs alone
        try:
            yield
        finally:
            for module, name, own in changed:
                setattr(module, name, own)
            share_no_more()
    for name, part in parts.items():
        print(_what_ran(name, part, known[name].solution, calls[name]))


def _count(calls: dict[str, int], name: str) -> None:
    calls[name] += 1


def _counted(part: Callable[..., Any], count: Callable[[], None]) -> Callable[..., Any]:
    @wraps(part)
    def call(*args: Any, **kwargs: Any) -> Any:
        count()
        return part(*args, **kwargs)

    return call


@contextmanager
def _counted_objects(part: type, count: Callable[[], None]) -> Generator[None, None, None]:
    """Call `count` for each object of this class that is created while the block runs."""
    own = part.__init__  # type: ignore[misc]

    def create(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is part:
            count()
        own(self, *args, **kwargs)

    with patch.object(part, "__init__", wraps(own)(create)):
        yield


def _what_ran(name: str, part: Any, solution: Any, count: int) -> str:
    """Return a sentence that calls a part yours only if it is, and else says whose it is."""
    did = "created" if isinstance(part, type) else "called"
    own_name = getattr(part, "__name__", name)
    if part is solution:
        owner = "package" if solution.__module__.startswith("minigen.") else "course"
        whose = f"the {owner}'s own {name}"
    elif own_name == name:
        whose = f"your {name}"
    else:
        whose = f"{own_name}, in place of {name},"
    return f"{whose} was {did} {count} {'time' if count == 1 else 'times'}"


def _runs_parts(module: str) -> bool:
    """Return whether a module of this name uses parts as the engine does."""
    package, _, rest = module.partition(".")
    in_course = package == "minigen_course" and not RUN_PARTS.isdisjoint(rest.split("."))
    return package == "minigen" or in_course


Attention = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]


@contextmanager
def attending(llm: LLM, attend: AttentionBackend) -> Generator[None, None, None]:
    """Use another attention backend in a loaded engine while the block runs.

    `attend` is what `LLM.load(attention_backend=...)` takes; the weights are not loaded again. Load
    the engine with `enable_prefix_caching=False`, because a cached prefix is not recomputed. Raises
    `OptionError` for what is no attention backend, and for an engine whose runner has its own.
    """
    runner = llm.engine.runner
    if not isinstance(runner, PagedRunner) or not isinstance(runner.pool, KVPool):
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
