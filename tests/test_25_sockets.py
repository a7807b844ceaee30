"""Sockets: a learner's part replaces minigen's own, or the error names its mistake.

The good parts are in `tests/foreign_parts.py`, which does not import minigen.
"""

import functools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from minigen import LLM, SamplingParams
from minigen.config import EngineConfig, parse_bytes
from minigen.engine.engine import Engine
from minigen.engine.scheduler import ContinuousScheduler
from minigen.engine.static_batching import DynamicScheduler, StaticScheduler
from minigen.errors import OptionError, PartError
from minigen.kv_cache.block_allocator import BlockAllocator
from minigen.kv_cache.paged import KVPool
from minigen.kv_cache.radix_cache import RadixPrefixCache
from minigen.model.attention import attention
from minigen.sequence import SampledToken
from minigen.sockets.checks_scheduler import CheckedScheduler
from tests import foreign_parts
from tests.foreign_parts import (
    HashChain,
    Likeliest,
    LowestFirst,
    PlainAttention,
    QueueScheduler,
    likeliest,
    likeliest_tensor,
    plain_attention,
)

SHARED = "a beginning that they have in common, "
PROMPTS = [SHARED + "first", "b", SHARED + "second", "something else", SHARED + "first, and more"]
GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
SIZES: dict[str, Any] = {"max_num_seqs": 3, "block_size": 4, "num_blocks": 64}
ALL = {
    "scheduler": QueueScheduler,
    "allocator": LowestFirst,
    "prefix_cache": HashChain,
    "sampler": likeliest,
    "attention_backend": plain_attention,
}


def load(directory: Path, **options: Any) -> LLM:
    return LLM.load(directory, weights="float32", **{**SIZES, **options})


def answers(llm: LLM) -> list[list[int]]:
    """Return greedy answers, twice to use cached prefixes, then three at once to one prompt."""
    outputs = [*llm.generate(PROMPTS, GREEDY), *llm.generate(PROMPTS[:2], GREEDY)]
    three = llm.generate(PROMPTS[0], SamplingParams(**{**vars(GREEDY), "n": 3}))
    return [output.token_ids for output in outputs] + [each.token_ids for each in three.choices]


@pytest.fixture(scope="module")
def expected(tiny_directory: Path) -> list[list[int]]:
    return answers(load(tiny_directory))


def manager_of(llm: LLM) -> Any:
    return llm.engine.runner.manager  # type: ignore[attr-defined]


def is_whole(llm: LLM) -> bool:
    manager = manager_of(llm)
    seats = sorted(manager._free_rows) == list(range(SIZES["max_num_seqs"]))
    return seats and not llm.engine.live and manager.num_available == SIZES["num_blocks"]


GOOD: dict[str, dict[str, Any]] = {
    "scheduler class": {"scheduler": QueueScheduler},
    "scheduler function": {"scheduler": lambda *parts: QueueScheduler(*parts)},
    "scheduler partial": {"scheduler": functools.partial(ContinuousScheduler)},
    "scheduler by name": {"scheduler": "static"},
    "another scheduler by name": {"scheduler": "dynamic"},
    "allocator class": {"allocator": LowestFirst},
    "allocator instance": {"allocator": LowestFirst(64)},  # false as a condition: it has a length
    "minigen's own as an instance": {"allocator": BlockAllocator(64)},
    "allocator function": {"allocator": lambda num_blocks: LowestFirst(num_blocks)},
    "prefix cache class": {"prefix_cache": HashChain},
    "prefix cache function": {"prefix_cache": lambda *parts: RadixPrefixCache(*parts)},
    "prefix cache by name": {"prefix_cache": "radix"},
    "no prefix cache": {"enable_prefix_caching": False},
    "the usual one": {"prefix_cache": None},
    "sampler function": {"sampler": likeliest},
    "sampler of tensors": {"sampler": likeliest_tensor},
    "sampler class": {"sampler": Likeliest},
    "sampler instance": {"sampler": Likeliest()},
    "attention function": {"attention_backend": plain_attention},
    "attention class": {"attention_backend": PlainAttention},
    "attention by name": {"attention_backend": "torch"},
    "all together": ALL,
    "all but the prefix cache": {**ALL, "prefix_cache": None, "enable_prefix_caching": False},
    "short of blocks": {"prefix_cache": HashChain, "allocator": LowestFirst, "num_blocks": 40},
}


@pytest.mark.parametrize("parts", GOOD)
def test_a_foreign_part_gives_the_tokens_of_minigens_own(
    tiny_directory: Path, expected: list[list[int]], parts: str
) -> None:
    llm = load(tiny_directory, **GOOD[parts])
    assert answers(llm) == expected
    assert not manager_of(llm).rows
    assert manager_of(llm).num_available == GOOD[parts].get("num_blocks", SIZES["num_blocks"])


def test_parts_come_from_a_learners_file(
    tiny_directory: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    file = tmp_path / "random.py"  # a name that must not hide the standard library's module
    shutil.copy(foreign_parts.__file__, file)
    named = {socket: f"{file}:{part.__name__}" for socket, part in ALL.items()}
    llm = load(tiny_directory, **named)
    assert answers(llm) == expected
    described = llm.describe()
    assert described["scheduler"] == "QueueScheduler"
    assert described["allocator"] == "LowestFirst"
    assert described["prefix cache"] == "HashChain"
    assert described["sampler"] == "likeliest"
    assert described["attention"] == "plain_attention"


def test_the_documents_scheduler_gives_the_tokens_of_minigens_own(
    tiny_directory: Path, tmp_path: Path
) -> None:
    page = (Path(__file__).parent.parent / "docs" / "engine.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(class OneAtATime:.*?)```", page, re.DOTALL)
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    llm = LLM.load(
        tiny_directory, weights="float32", scheduler=f"{tmp_path / 'mine.py'}:OneAtATime"
    )
    own = LLM.load(tiny_directory, weights="float32")
    expected = [each.token_ids for each in own.generate(PROMPTS, GREEDY)]
    assert [each.token_ids for each in llm.generate(PROMPTS, GREEDY)] == expected


def test_minigens_own_parts_are_described_too(tiny_directory: Path) -> None:
    described = load(tiny_directory, enable_prefix_caching=False, scheduler="static").describe()
    assert described["scheduler"] == "StaticScheduler"
    assert described["allocator"] == "BlockAllocator"
    assert described["prefix cache"] == "none"
    assert described["kv cache"] == "64 blocks of 4 tokens, in float32"


def test_a_learners_file_may_define_dataclasses_with_postponed_annotations(
    tiny_directory: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Mine:\n"
        "    wish: int = 7\n"
        "    def __call__(self, logits, sequences):\n"
        "        return [self.wish for _ in sequences]\n",
        encoding="utf-8",
    )
    llm = load(tiny_directory, sampler=f"{file}:Mine")
    assert llm.generate("a", GREEDY).token_ids == [7] * 7


def test_a_sampler_may_return_its_own_logprobs(tiny_directory: Path) -> None:
    def sure(logits: torch.Tensor, sequences: list[Any]) -> list[SampledToken]:
        return [SampledToken(5, {}) for _ in sequences]

    params = SamplingParams(max_tokens=2, logprobs=0, ignore_eos=True)
    assert load(tiny_directory, sampler=sure).generate("a", params).logprobs == [{}, {}]


def test_an_attention_may_round_what_it_stores(tiny_directory: Path) -> None:
    def rounded(pool: Any, batch: Any, windows: Any) -> Any:
        def attend(layer_id: int, q: Any, k: Any, v: Any) -> Any:
            pool.store(layer_id, k.bfloat16().float(), v.bfloat16().float(), batch.slots)
            return torch.zeros_like(q)

        return attend

    assert len(load(tiny_directory, attention_backend=rounded).generate("a", GREEDY).token_ids) == 7


# --- parts that do not fit are refused at the start -----------------------------------------------


class NoCommit:
    def __init__(self, manager: Any, max_num_seqs: int, max_num_batched_tokens: int):
        pass

    add = schedule = abort = lambda self, *sequence: None


class ForgetsTokens(QueueScheduler):
    def commit(self, chunks: Any) -> None:  # type: ignore[override]
        pass


class OnlyManager(QueueScheduler):
    def __init__(self, manager: Any):
        pass


class CountsByCall(LowestFirst):
    def num_free(self) -> int:  # type: ignore[override]
        return 64


class NoCount(LowestFirst):
    num_free = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if name == "num_free":
            raise AttributeError(name)
        return super().__getattribute__(name)


class NeedsMore:
    def __init__(self, temperature: float):
        pass

    def __call__(self, logits: Any, sequences: Any) -> list[int]:
        return []


class PromisesText(HashChain):
    num_evictable = "many"


MISFITS: list[tuple[dict[str, Any], list[str]]] = [
    ({"scheduler": "fifo"}, ["scheduler", "continuous, static, dynamic", "file.py:Name", "'fifo'"]),
    ({"scheduler": "mine.txt:Mine"}, ["file.py:Name", "mine.txt:Mine"]),
    ({"scheduler": "mine.py:"}, ["file.py:Name"]),
    ({"scheduler": "nowhere/mine.py:Mine"}, ["scheduler", "no file", "mine.py"]),
    ({"prefix_cache": "~nosuchuser/a.py:A"}, ["prefix_cache: '~nosuchuser/a.py'", "home folder"]),
    ({"allocator": "buddy"}, ["allocator", "free-list", "'buddy'"]),
    ({"allocator": ""}, ["allocator", "free-list", "''"]),
    ({"allocator": 0}, ["allocator int", "no allocate, share, release, num_owners, num_free"]),
    ({"prefix_cache": "yes"}, ["prefix_cache", "radix", "'yes'"]),
    ({"enable_prefix_caching": 1}, ["enable_prefix_caching must be True or False, not 1"]),
    ({"prefix_cache": HashChain, "enable_prefix_caching": False}, ["prefix_cache", "of no use"]),
    ({"sampler": "greedy"}, ["sampler", "batch"]),
    ({"attention_backend": "flash"}, ["attention_backend", "torch"]),
    (
        {"attention_backend": None},
        ["attention_backend NoneType", "called with (pool, batch, windows)"],
    ),
    ({"scheduler": NoCommit}, ["scheduler NoCommit has no commit", "add, schedule, commit"]),
    ({"scheduler": ForgetsTokens}, ["ForgetsTokens", "commit", "(chunks, tokens)"]),
    (
        {"scheduler": OnlyManager},
        ["made by OnlyManager(manager, max_num_seqs, max_num_batched_tokens)"],
    ),
    ({"scheduler": lambda *parts: None}, ["scheduler NoneType has no add"]),
    ({"scheduler": QueueScheduler(None, 1, 1)}, ["QueueScheduler", "class", "(manager, max_"]),
    ({"allocator": object()}, ["allocator object has no allocate"]),
    ({"allocator": CountsByCall}, ["CountsByCall", "num_free", "property"]),
    ({"allocator": NoCount}, ["NoCount has no num_free"]),
    ({"allocator": LowestFirst(10)}, ["LowestFirst", "10 free blocks", "64", "num_blocks"]),
    ({"prefix_cache": HashChain(LowestFirst(64), 4)}, ["HashChain", "class", "(allocator, block"]),
    ({"prefix_cache": PromisesText}, ["PromisesText", "num_evictable as a whole number"]),
    ({"prefix_cache": LowestFirst}, ["must be made by LowestFirst(allocator, block_size)"]),
    ({"sampler": NeedsMore}, ["sampler NeedsMore must be made by NeedsMore()"]),
    ({"sampler": lambda logits: []}, ["sampler <lambda>", "called with (logits, sequences)"]),
    ({"sampler": 0.7}, ["sampler float", "called with (logits, sequences)"]),
    (
        {"attention_backend": lambda q, k, v, mask: q},
        ["attention_backend <lambda>", "(pool, batch, windows)"],
    ),
    *(
        ({"attention_backend": wrong}, ["attention_backend", "attend(layer_id, q, k, v)", words])
        for wrong, words in (
            (attention, "attention must be called with (pool, batch, windows)"),
            (lambda pool, batch, windows: batch.token_ids, "not tensor"),
            (lambda pool, batch, windows: lambda q, k, v: q, "not <function"),
            (lambda pool, batch, windows: 1 / 0, "ZeroDivisionError"),
            (NamedTuple("Three", [("pool", Any), ("batch", Any), ("windows", Any)]), "not Three"),
        )
    ),
    ({"attention_backend": KVPool}, ["made by KVPool()"]),
]


@pytest.mark.parametrize(("options", "words"), MISFITS)
def test_a_part_that_does_not_fit_is_refused_at_the_start(
    tiny_directory: Path, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(OptionError) as caught:
        load(tiny_directory, **options)
    assert_one_sentence(str(caught.value), words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", ["defines no Mine"]),
        ("1 / 0\n", ["could not be imported", "ZeroDivisionError"]),
        ("def broken(:\n", ["could not be imported", "SyntaxError"]),
        ("import sys; sys.exit(3)\n", ["could not be imported", "SystemExit"]),
        ("import no_such_package\n", ["could not be imported", "no_such_package"]),
    ],
)
def test_a_file_without_the_part_is_refused(
    tiny_directory: Path, tmp_path: Path, text: str, words: list[str]
) -> None:
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    with pytest.raises(OptionError) as caught:
        load(tiny_directory, sampler=f"{tmp_path}/mine.py:Mine")
    assert_one_sentence(str(caught.value), ["sampler", "mine.py", *words])


def assert_one_sentence(message: str, words: list[str]) -> None:
    for word in words:
        assert word in message
    assert message.endswith((".", ")"))
    assert len(message) < 400, "the message is short"


# --- parts that break their contract --------------------------------------------------------------


class Names(QueueScheduler):
    """A scheduler whose batch is changed by `wrong` before it is returned."""

    def __init_subclass__(cls, wrong: Callable[[Any], Any]):
        cls.wrong = staticmethod(wrong)  # type: ignore[attr-defined]

    def schedule(self) -> Any:
        return type(self).wrong(super().schedule())  # type: ignore[attr-defined]


class ReturnsNone(Names, wrong=lambda batch: None):
    pass


class NamesTwice(Names, wrong=lambda batch: batch + batch):
    pass


class NamesSequencesOnly(Names, wrong=lambda batch: [sequence for sequence, _ in batch]):
    pass


class NamesThemSwapped(Names, wrong=lambda batch: [(n, sequence) for sequence, n in batch]):
    pass


class NamesTooMany(Names, wrong=lambda batch: [(sequence, n + 9) for sequence, n in batch]):
    pass


class NamesNone(Names, wrong=lambda batch: [(sequence, 0) for sequence, _ in batch]):
    pass


class NamesIds(Names, wrong=lambda batch: [(each.sequence_id, n) for each, n in batch]):
    pass


class NamesLists(Names, wrong=lambda batch: [([each], n) for each, n in batch]):
    pass


class NamesStrangers(Names, wrong=lambda batch: [(make_stranger(), 1)]):
    pass


def make_stranger() -> Any:
    from minigen.sequence import Sequence

    return Sequence(99, (1, 2), GREEDY, 0, 4, frozenset())


class NeverAllocates(QueueScheduler):
    def schedule(self):
        return [(sequence, len(sequence)) for sequence in self.waiting]


class AllocatesEachStep(QueueScheduler):
    def schedule(self):
        for sequence in self.running:
            self.manager.allocate(sequence, 1)
        return super().schedule()


class AllocatesSlotsFirst(QueueScheduler):
    def schedule(self):
        for sequence in self.waiting:
            self.manager.allocate_slots(sequence, len(sequence))
        return super().schedule()


class NeverAllocatesSlots(QueueScheduler):
    def schedule(self):
        if not self.running:
            return super().schedule()
        return [(sequence, 1) for sequence in self.running]


class IgnoresTheBudget(QueueScheduler):
    def __init__(self, manager, max_num_seqs, max_num_batched_tokens):
        super().__init__(manager, max_num_seqs, 10**6)


class NeverMarksComputed(QueueScheduler):
    def commit(self, chunks, tokens):
        for chunk, token in zip(chunks, tokens, strict=True):
            chunk.sequence.append(token.token_id)


class MarksComputedTwice(QueueScheduler):
    def commit(self, chunks, tokens):
        for chunk in chunks:
            self.manager.mark_computed(chunk.sequence, chunk.num_tokens)
        super().commit(chunks, tokens)


class NeverAppends(QueueScheduler):
    def commit(self, chunks, tokens):
        for chunk in chunks:
            self.manager.mark_computed(chunk.sequence, chunk.num_tokens)


class AppendsTwice(NeverAppends):
    def commit(self, chunks, tokens):
        super().commit(chunks, tokens)
        for chunk, token in zip(chunks, tokens, strict=True):
            chunk.sequence.append(token.token_id)
            chunk.sequence.append(token.token_id)


class AppendsByItself(NeverAppends):
    def commit(self, chunks, tokens):
        super().commit(chunks, tokens)
        for chunk, token in zip(chunks, tokens, strict=True):
            chunk.sequence.output_ids.append(token.token_id)


class NeverFrees(QueueScheduler):
    def abort(self, sequence):
        self.running.remove(sequence)


class SchedulesTheFinished(QueueScheduler):
    """Schedules finished sequences; and its `abort` fails for sequences that have left."""

    def abort(self, sequence):
        self.manager.free(sequence)

    def schedule(self):
        gone = [(each, 1) for each in self.running if each.finish_reason is not None]
        return gone or super().schedule()


class HandsOutTwice(LowestFirst):
    def allocate(self, count):
        return (super().allocate(1) * count)[:count]


class HandsOutTheSame(LowestFirst):
    def allocate(self, count):
        super().allocate(count)
        return list(range(1, count + 1))


class HandsOutTooFew(LowestFirst):
    def allocate(self, count):
        return super().allocate(count)[1:]


class HandsOutFromZero(LowestFirst):
    def allocate(self, count):
        return [block_id - 1 for block_id in super().allocate(count)]


class HandsOutNothing(LowestFirst):
    def allocate(self, count):
        super().allocate(count)


class HandsOutText(LowestFirst):
    def allocate(self, count):
        return [str(block_id) for block_id in super().allocate(count)]


class CountsWrong(LowestFirst):
    @property
    def num_free(self):
        return 64


class ForgetsWhatIsFree(LowestFirst):
    def release(self, block_ids):
        super().release(block_ids)


class OwnersAreTrue(LowestFirst):
    def num_owners(self, block_id):
        return self.owners[block_id] + 1


class MatchesUnshared(HashChain):
    def match(self, token_ids, salt):
        found = super().match(token_ids, salt)
        self.allocator.release(found)
        return found


class MatchesAll(HashChain):
    def match(self, token_ids, salt):
        return super().match([*token_ids, 0], salt)


class MatchesAnything(HashChain):
    def path(self, token_ids, index, salt):
        return (salt, index)


class MatchesOtherSalts(HashChain):
    def path(self, token_ids, index, salt):
        return super().path(token_ids, index, None)


class MatchesNothing(HashChain):
    def match(self, token_ids, salt):
        return None


class CachesUnshared(HashChain):
    def insert(self, token_ids, block_ids, first, salt):
        for index in range(first, len(token_ids) // self.block_size):
            self.known[self.path(token_ids, index, salt)] = block_ids[index]


class SharesTwice(HashChain):
    def insert(self, token_ids, block_ids, first, salt):
        super().insert(token_ids, block_ids, first, salt)
        self.allocator.share(block_ids[first : len(token_ids) // self.block_size])


class ExchangesOutOfReach(HashChain):
    def insert(self, token_ids, block_ids, first, salt):
        return [(len(token_ids) // self.block_size, 1)]


class ExchangesForUnknown(HashChain):
    def insert(self, token_ids, block_ids, first, salt):
        return [(first, 60)]


class ExchangesText(HashChain):
    def insert(self, token_ids, block_ids, first, salt):
        return ["changed"]


class ExchangesSilently(HashChain):
    """Reports blocks that it knows already, but leaves their owners unchanged."""

    def insert(self, token_ids, block_ids, first, salt):
        super().insert(token_ids, block_ids, first, salt)
        numbers = range(first, len(token_ids) // self.block_size)
        known = [self.known[self.path(token_ids, index, salt)] for index in numbers]
        pairs = list(zip(numbers, known, strict=True))
        return [(index, known) for index, known in pairs if known != block_ids[index]]


class AcquiresTwice(HashChain):
    def acquire(self, block_ids):
        self.allocator.share(block_ids)


class ReleasesTwice(HashChain):
    def release(self, block_ids):
        self.allocator.release(block_ids)


class Allocates(HashChain):
    def match(self, token_ids, salt):
        return self.allocator.allocate(1)


class SharesTheFree(HashChain):
    def match(self, token_ids, salt):
        self.allocator.share([50])
        return [50]


class ReleasesTheFree(HashChain):
    def release(self, block_ids):
        self.allocator.release([50])


class EvictsTooMany(HashChain):
    def evict(self, count):
        return super().evict(count + 1)


class EvictsTooFew(HashChain):
    def evict(self, count):
        return super().evict(count - 1)


class EvictsSilently(HashChain):
    def evict(self, count):
        super().evict(count)
        return []


class EvictsUnreleased(HashChain):
    def evict(self, count):
        return [self.known.pop(path) for path in self.unused()[:count]]


class EvictsTheUsed(HashChain):
    def evict(self, count):
        self.unused = lambda: list(self.known)
        evicted = super().evict(count)
        del self.unused
        return evicted


class PromisesTooMuch(HashChain):
    @property
    def num_evictable(self):
        return len(self.known) + 1 if self.known else 0


def returning(value: Any) -> Callable[..., Any]:
    def wrong_sampler(logits: Any, sequences: Any) -> Any:
        return value(logits, sequences)

    return wrong_sampler


def appending(logits: Any, sequences: Any) -> Any:
    for sequence in sequences:
        sequence.append(3)
    return likeliest(logits, sequences)


def attending(change: Callable[[Any], Any], store: bool = True) -> Callable[..., Any]:
    def wrong_attention(pool: Any, batch: Any, windows: Any) -> Any:
        def attend(layer_id: int, q: Any, k: Any, v: Any) -> Any:
            if store:
                pool.store(layer_id, k, v, batch.slots)
            return change(q)

        return attend

    return wrong_attention


def no_function(pool: Any, batch: Any, windows: Any) -> Any:
    """Return attention for one token only, as for the batch with which a backend is tried."""
    return batch.token_ids if len(batch.token_ids) > 1 else plain_attention(pool, batch, windows)


BATCHES = "list of (sequence, number of tokens)"
BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"scheduler": ReturnsNone}, ["ReturnsNone.schedule", BATCHES, "None"]),
    ({"scheduler": NamesTwice}, ["NamesTwice.schedule", "twice"]),
    ({"scheduler": NamesSequencesOnly}, ["NamesSequencesOnly.schedule", BATCHES]),
    ({"scheduler": NamesThemSwapped}, ["NamesThemSwapped.schedule", BATCHES]),
    ({"scheduler": NamesIds}, ["NamesIds.schedule", BATCHES]),
    ({"scheduler": NamesLists}, ["NamesLists.schedule", BATCHES]),
    ({"scheduler": NamesTooMany}, ["NamesTooMany.schedule", "to compute"]),
    ({"scheduler": NamesNone}, ["NamesNone.schedule", "chose 0 tokens"]),
    ({"scheduler": NamesStrangers}, ["NamesStrangers.schedule", "sequence 99", "never added"]),
    (
        {"scheduler": NeverAllocates},
        ["NeverAllocates.schedule", "manager.allocate", "manager.allocate_slots"],
    ),
    ({"scheduler": AllocatesEachStep}, ["AllocatesEachStep.schedule", "already has", "once"]),
    ({"scheduler": AllocatesSlotsFirst}, ["AllocatesSlotsFirst.schedule", "call allocate first"]),
    (
        {"scheduler": NeverAllocatesSlots},
        ["NeverAllocatesSlots.schedule", "without slots", "allocate_slots"],
    ),
    (
        {"scheduler": IgnoresTheBudget, "max_num_batched_tokens": 50},
        ["IgnoresTheBudget.schedule", "max_num_batched_tokens allows 50"],
    ),
    (
        {"scheduler": NeverMarksComputed},
        ["NeverMarksComputed.commit", "0 computed", "manager.mark_computed"],
    ),
    (
        {"scheduler": MarksComputedTwice},
        ["MarksComputedTwice.commit", "cannot be marked as computed"],
    ),
    ({"scheduler": NeverAppends}, ["NeverAppends.commit", "sequence.append(token.token_id)"]),
    ({"scheduler": AppendsTwice}, ["AppendsTwice.commit", "once"]),
    ({"scheduler": AppendsByItself}, ["AppendsByItself.commit", "sequence.append(token."]),
    ({"scheduler": NeverFrees}, ["NeverFrees.commit", "manager.free(sequence)"]),
    ({"scheduler": SchedulesTheFinished}, ["SchedulesTheFinished.schedule", "has finished"]),
    ({"allocator": HandsOutTwice}, ["HandsOutTwice.allocate", "different blocks"]),
    ({"allocator": HandsOutTheSame}, ["HandsOutTheSame.allocate", "block 1", "not free"]),
    ({"allocator": HandsOutTooFew}, ["HandsOutTooFew.allocate", "different blocks"]),
    ({"allocator": HandsOutFromZero}, ["HandsOutFromZero.allocate", "blocks are 1 to 64"]),
    ({"allocator": HandsOutNothing}, ["HandsOutNothing.allocate", "list of block ids", "None"]),
    ({"allocator": HandsOutText}, ["HandsOutText.allocate", "list of block ids", "'1'"]),
    ({"allocator": CountsWrong}, ["CountsWrong.num_free is 64", "have no owner"]),
    ({"allocator": ForgetsWhatIsFree}, ["ForgetsWhatIsFree.release", "list of block ids"]),
    ({"allocator": OwnersAreTrue}, ["OwnersAreTrue.num_owners", "which has"]),
    ({"prefix_cache": MatchesUnshared}, ["MatchesUnshared.match", "by 0, not by 1", "share what"]),
    ({"prefix_cache": MatchesAll}, ["MatchesAll.match", "at least one token"]),
    ({"prefix_cache": MatchesAnything}, ["MatchesAnything.match", "holds the tokens"]),
    ({"prefix_cache": MatchesOtherSalts}, ["MatchesOtherSalts.match", "another salt"]),
    ({"prefix_cache": MatchesNothing}, ["MatchesNothing.match", "list of block ids", "None"]),
    ({"prefix_cache": CachesUnshared}, ["CachesUnshared shared block", "share in insert"]),
    ({"prefix_cache": SharesTwice}, ["SharesTwice.insert", "by 2, not by 0"]),
    ({"prefix_cache": ExchangesOutOfReach}, ["ExchangesOutOfReach.insert", "it was given"]),
    ({"prefix_cache": ExchangesForUnknown}, ["ExchangesForUnknown.insert", "never inserted"]),
    ({"prefix_cache": ExchangesText}, ["ExchangesText.insert", "(index, known block)"]),
    ({"prefix_cache": ExchangesSilently}, ["ExchangesSilently.insert", "release the sequence's"]),
    ({"prefix_cache": AcquiresTwice}, ["AcquiresTwice.acquire", "leave that to the engine"]),
    ({"prefix_cache": ReleasesTwice}, ["ReleasesTwice.release", "leave that to the engine"]),
    ({"prefix_cache": Allocates}, ["Allocates allocated 1 blocks", "only share"]),
    ({"prefix_cache": SharesTheFree}, ["SharesTheFree shared block 50", "has no owner"]),
    ({"prefix_cache": ReleasesTheFree}, ["ReleasesTheFree released block 50", "has no owner"]),
    ({"prefix_cache": EvictsTooMany, "num_blocks": 34}, ["EvictsTooMany.evict", "were requested"]),
    ({"prefix_cache": EvictsTooFew, "num_blocks": 34}, ["EvictsTooFew.evict", "possible"]),
    ({"prefix_cache": EvictsSilently, "num_blocks": 34}, ["EvictsSilently.evict", "released"]),
    ({"prefix_cache": EvictsUnreleased, "num_blocks": 34}, ["EvictsUnreleased.evict", "released"]),
    ({"prefix_cache": EvictsTheUsed, "num_blocks": 34}, ["EvictsTheUsed.evict", "sequence uses"]),
    ({"prefix_cache": PromisesTooMuch}, ["PromisesTooMuch.num_evictable is", "not used by"]),
    ({"sampler": returning(lambda *_: None)}, ["wrong_sampler", "list of tokens", "None"]),
    ({"sampler": returning(lambda *_: 3)}, ["wrong_sampler", "list of tokens"]),
    ({"sampler": returning(lambda x, s: [1] * (len(s) + 1))}, ["chose 4 tokens for 3 rows"]),
    ({"sampler": returning(lambda x, s: ["a"] * len(s))}, ["wrong_sampler", "token id", "'a'"]),
    ({"sampler": returning(lambda x, s: x.amax(-1))}, ["wrong_sampler", "token id for each row"]),
    ({"sampler": returning(lambda x, s: x.topk(1).indices)}, ["token id for each row"]),
    ({"sampler": returning(lambda x, s: [300] * len(s))}, ["chose token 300", "has 0 to 299"]),
    ({"sampler": returning(lambda x, s: [-1] * len(s))}, ["chose token -1", "has 0 to 299"]),
    ({"sampler": appending}, ["appending", "only return a token"]),
    (
        {"attention_backend": attending(lambda q: None)},
        ["wrong_attention", "NoneType in layer 0", "queries"],
    ),
    (
        {"attention_backend": attending(lambda q: q.flatten(-2))},
        ["wrong_attention", "in layer 0", "queries"],
    ),
    ({"attention_backend": attending(lambda q: q.half())}, ["torch.float16", "torch.float32"]),
    (
        {"attention_backend": attending(lambda q: q / 0)},
        ["wrong_attention", "not finite in layer 0"],
    ),
    ({"attention_backend": attending(lambda q: q, store=False)}, ["wrong_attention", "pool.store"]),
    ({"attention_backend": no_function}, ["no_function", "attend(layer_id, q, k, v)"]),
]

# After these errors the state is lost: counts are wrong, or blocks of others were freed.
BEYOND_REPAIR = ("allocator", "prefix_cache")


@pytest.mark.parametrize(
    ("options", "words"), BAD, ids=[f"{'-'.join(words)[:40]}" for _, words in BAD]
)
def test_a_part_that_breaks_its_contract_is_named(
    tiny_directory: Path, options: dict[str, Any], words: list[str]
) -> None:
    llm = load(tiny_directory, **options)
    with pytest.raises(PartError) as caught:
        provoke(llm)
    assert_one_sentence(str(caught.value), words)
    assert not llm.engine.live
    assert not llm._steps.dispatcher._subscriptions
    assert not manager_of(llm).rows
    if not any(name in options for name in BEYOND_REPAIR):
        assert is_whole(llm)


def provoke(llm: LLM) -> None:
    """Send enough requests to reveal a mistake of any kind."""
    llm.generate(PROMPTS, GREEDY, cache_salt="mine")
    llm.generate(PROMPTS, GREEDY)
    for _ in range(2):  # full blocks, and no tokens after them
        llm.generate([7] * 16, GREEDY)
    llm.generate("d" * 50, SamplingParams(**{**vars(GREEDY), "n": 3}))
    for letter in "efghijk":
        llm.generate(letter * 60, SamplingParams(temperature=0, max_tokens=8))


def test_tokens_without_logprobs_get_the_models(tiny_directory: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, ignore_eos=True)
    llm = load(tiny_directory, sampler=likeliest)
    assert llm.generate("a", params) == load(tiny_directory).generate("a", params)


def test_a_scheduler_that_schedules_nothing_is_stopped(tiny_directory: Path) -> None:
    llm = load(tiny_directory)
    manager = manager_of(llm)

    class Asleep(QueueScheduler):
        def schedule(self) -> list[Any]:
            return []

    scheduler = CheckedScheduler(Asleep(manager, 3, 100), manager, 100, patience=0.05)
    engine = Engine(scheduler, llm.engine.runner, llm.engine.sampler, llm.engine.trace)
    for _ in range(2):
        assert engine.step() == []  # the queue is empty, so it may schedule nothing
    engine.add(llm._requests.process(["a"], GREEDY)[0].sequence)
    with pytest.raises(PartError, match=r"Asleep.schedule has scheduled nothing for 0.05 seconds"):
        run_dry(engine)
    assert manager.num_available == SIZES["num_blocks"]


def run_dry(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


def test_an_exception_of_a_part_itself_is_raised_unchanged(tiny_directory: Path) -> None:
    class Clumsy(QueueScheduler):
        def commit(self, chunks: Any, tokens: Any) -> None:
            raise ZeroDivisionError("mine")

        def abort(self, sequence: Any) -> None:
            raise KeyError("mine, too")

    llm = load(tiny_directory, scheduler=Clumsy)
    with pytest.raises(ZeroDivisionError) as caught:
        llm.generate(["a", "b"], GREEDY)
    assert any("KeyError" in note for note in caught.value.__notes__)
    assert is_whole(llm)


def test_a_scheduler_that_refuses_a_request_leaves_nothing_behind(tiny_directory: Path) -> None:
    class Picky(QueueScheduler):
        def add(self, sequence: Any) -> None:
            if len(sequence) > 20:
                raise ValueError("too long for me")
            super().add(sequence)

    llm = load(tiny_directory, scheduler=Picky)
    before = llm.generate("a", GREEDY).token_ids
    with pytest.raises(ValueError, match="too long for me"):
        llm.generate(["a", "b" * 30, "c"], GREEDY)
    assert is_whole(llm)
    assert not llm._steps.dispatcher._subscriptions
    assert llm.generate("a", GREEDY).token_ids == before


@pytest.mark.parametrize("kind", [ContinuousScheduler, StaticScheduler, DynamicScheduler])
def test_a_scheduler_derived_from_one_of_minigens_runs_siblings_once(
    tiny_directory: Path, kind: type
) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=9, ignore_eos=True)
    expected = [each.token_ids for each in load(tiny_directory).generate("abcdef", params).choices]
    llm = load(tiny_directory, scheduler=type("Mine", (kind,), {}))
    for _ in range(2):
        choices = llm.generate("abcdef", params).choices
        assert [each.token_ids for each in choices] == expected
        assert is_whole(llm)


def test_an_error_reaches_the_stepping_stream_though_another_streams_error_is_pending(
    tiny_directory: Path,
) -> None:
    class Moody(QueueScheduler):
        mood = ""

        def schedule(self) -> Any:
            if self.mood == "raises":
                raise ZeroDivisionError
            return super().schedule()[: 1 if self.mood == "one" else 9]

        def commit(self, chunks: Any, tokens: Any) -> None:
            if self.mood == "one":
                raise ValueError("the first only")
            super().commit(chunks, tokens)

    llm = load(tiny_directory, scheduler=Moody)
    scheduler: Any = llm.engine.scheduler
    first, second = (llm.stream_deltas([prompt], GREEDY) for prompt in ("a", "b"))
    next(first), next(second)
    scheduler.scheduler.mood = "one"
    llm._steps.dispatcher.step()
    scheduler.scheduler.mood = "raises"
    with pytest.raises(ZeroDivisionError):
        list(second)
    with pytest.raises(ValueError, match="the first only"):
        list(first)
    assert is_whole(llm)


def test_a_part_that_does_not_fit_is_refused_before_processes_are_started(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "minigen.parallel.launch.start_driver", lambda *_: pytest.fail("they were started")
    )
    for part in ({"sampler": "no-such"}, {"scheduler": "no-such"}, {"allocator": "no-such"}):
        with pytest.raises(OptionError, match=r"must be one of .* not 'no-such'"):
            load(tiny_directory, tensor_parallel_size=2, **part)


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (1, 1),
        (10**12, 10**12),
        ("1000000", 10**6),
        ("512M", 512 * 10**6),
        ("512 MB", 512 * 10**6),
        ("1.5GiB", 3 * 2**29),
        (" 2gi ", 2**31),
        ("64k", 64_000),
        ("9007199254740993", 2**53 + 1),  # not a float
        ("0.5K", 500),
        ("999999999999999999G", 999999999999999999 * 10**9),
    ],
)
def test_bytes_are_read_with_their_units(text: object, number: int) -> None:
    assert parse_bytes("kv_cache_memory", text) == number


@pytest.mark.parametrize(
    "text",
    ["", "M", "-5M", "5T", "1e9", "1,5G", "5 5", "0", "0.5", "nan", "1.G", "9" * 5000, "9" * 400],
)
def test_text_that_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(
        OptionError,
        match=r"kv_cache_memory must be a number of bytes, such as 1000000, 512M or 1.5Gi",
    ):
        parse_bytes("kv_cache_memory", text)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, [5], 2**63])
def test_a_number_that_is_not_a_count_of_bytes_is_refused(value: object) -> None:
    with pytest.raises(OptionError, match="kv_cache_memory must be a whole number"):
        parse_bytes("kv_cache_memory", value)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("weights", ["int3", "", None, 16]),
        ("kv_cache_dtype", ["int3", "fp4", "", None, 8]),
        ("threads", [0, -1, 1.5, "2", True, 10**6]),
        ("max_num_seqs", [0, -4, 2.0, "all", None, False, 10**9]),
        ("max_num_batched_tokens", [0, None, "1K", 10**12]),
        ("block_size", [0, -16, 0.5, None, 10**9]),
        ("num_blocks", [0, -1, 3.5, "9", True, 10**12]),
        ("kv_cache_memory", [0, -1, "lots", 1.5, True]),
    ],
)
def test_an_invalid_option_names_its_allowed_values(option: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(OptionError) as caught:
            EngineConfig(**{option: value})
        assert str(caught.value).startswith(f"{option} must be ")
        assert repr(value) in str(caught.value)
        assert str(caught.value).count(".") <= 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_blocks": 1, "block_size": 1}, "holds no request"),
        ({"kv_cache_memory": 500, "block_size": 1, "num_blocks": None}, "holds no request"),
        ({"num_blocks": 2**24, "block_size": 2**16}, "more memory than this machine can"),
        ({"num_blocks": 5, "kv_cache_memory": "1M"}, "give only one"),
        ({"max_num_seqs": 65, "max_num_batched_tokens": 64}, "at least max_num_seqs"),
    ],
)
def test_a_pool_that_cannot_work_is_refused_at_the_start(
    tiny_directory: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        load(tiny_directory, **options)


def test_the_smallest_pool_holds_a_prompt_of_one_token_and_an_answer_of_one(
    tiny_directory: Path,
) -> None:
    llm = LLM.load(tiny_directory, weights="float32", num_blocks=2, block_size=1)
    params = SamplingParams(temperature=0, max_tokens=1)
    assert len(llm.generate([5], params).token_ids) == 1
