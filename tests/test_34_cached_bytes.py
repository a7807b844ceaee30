"""The int8 KV cache: attention over it equals that of a plain twin, in half the memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

pytest.importorskip("numba")

from minigen import LLM, SamplingParams
from minigen.assembly import cpu
from minigen.cli.compile import compile_forms
from minigen.engine.model_runner import Packed
from minigen.errors import MinigenError, OptionError
from minigen.kernels.cpu.attention import attend, rotate_and_store
from minigen.kernels.cpu.kv.int8 import ABOVE
from minigen.kernels.cpu.kv.layout import (
    CHUNK,
    TILE,
    ByteCache,
    Heads,
    PackedKVPool,
    Shape,
    make_scratch,
    words_of_tile,
)
from minigen.kernels.cpu.runner import EVERYTHING
from minigen.kernels.cpu.team import pool_of_one
from minigen.kernels.jit import code_cache
from minigen.kv_cache.paged import Batch, KVPool, attend_paged
from minigen.kv_cache.quantized import QuantizedKVPool
from tests.tiny import save_model, save_tokenizer

Numbers = np.ndarray[Any, np.dtype[Any]]
MOST_POSITIONS = 2 * CHUNK


class Case(NamedTuple):
    """A layer of attention: its sizes, and cached and new tokens per sequence."""

    head_dim: int = 64
    kv_heads: int = 2
    group: int = 3
    block_size: int = 16
    window: int | None = None
    lengths: tuple[tuple[int, int], ...] = ((0, 5), (17, 1), (70, 20))


def shape_of(case: Case, num_blocks: int) -> Shape:
    sizes = case.kv_heads * case.group, case.kv_heads, case.head_dim
    words = words_of_tile(case.head_dim, "int8")
    return Shape(1, 32, *sizes, 32, 32, case.block_size, num_blocks, words, np.float32(1e-5))


def angles(head_dim: int) -> tuple[Numbers, Numbers]:
    pair, position = np.arange(head_dim // 2), np.arange(MOST_POSITIONS)
    turns = position[:, None] / 1e4 ** (2 * pair / head_dim)
    return np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)


def numbers_of(case: Case, seed: int = 0) -> list[Numbers]:
    """Return [tokens, q_heads + 2 kv_heads, head_dim] per sequence; keys have one large channel."""
    rng = np.random.default_rng(seed)
    heads = case.kv_heads * (case.group + 2)
    found = []
    for before, new in case.lengths:
        qkv = rng.standard_normal((before + new, heads, case.head_dim), np.float32)
        qkv[:, case.kv_heads * case.group : -case.kv_heads, 3] += 20
        found.append(qkv)
    return found


class Kernels:
    """A pool and its blocks, in any order; the kernels store tokens and attend to them."""

    def __init__(self, case: Case):
        self.case = case
        longest = max(before + new for before, new in case.lengths)
        per_sequence = -(-longest // case.block_size)
        ids = np.random.default_rng(1).permutation(per_sequence * len(case.lengths)) + 1
        self.tables = ids.reshape(len(case.lengths), -1)
        self.shape = shape_of(case, len(ids) + 1)
        self.pool = PackedKVPool(self.shape, "int8")
        self.pool.blocks[:] = 0x7FC07FC0  # left by an earlier owner of the blocks: scales are NaN
        cos, sin = (each.reshape(-1) for each in angles(case.head_dim))
        none = np.zeros((1, 0), np.float32)
        self.heads = Heads(none, none, none, cos, sin)
        most = sum(before + new for before, new in case.lengths)
        self.scratch = make_scratch(self.shape, most, 2, "int8")

    def store(self, qkv: list[Numbers], ranges: list[tuple[int, int]]) -> Packed:
        """Store the tokens of those ranges in the cache, and their queries in the scratch."""
        size, tables = self.case.block_size, self.tables
        positions = [np.arange(*each) for each in ranges]
        slots = [
            table[each // size] * size + each % size
            for table, each in zip(tables, positions, strict=True)
        ]
        counts, ends = [len(each) for each in positions], np.array([end for _, end in ranges])
        every = np.concatenate(positions)
        starts = np.cumsum([0, *counts])
        packed = Packed(every, every, np.concatenate(slots), starts, ends, tables, every[:0])
        rows = np.concatenate([each[a:b] for each, (a, b) in zip(qkv, ranges, strict=True)])
        flat, cache = rows.reshape(-1).copy(), self.pool.cache
        rotate_and_store(
            pool_of_one(), self.shape, 0, self.heads, packed, len(every), flat, cache, self.scratch
        )
        return packed

    def attend(self, packed: Packed) -> Numbers:
        q_heads, head_dim = self.shape.q_heads, self.shape.head_dim
        out = np.zeros(len(packed.slots) * q_heads * head_dim, np.float32)
        window = self.case.window or EVERYTHING
        attend(pool_of_one(), self.shape, 0, window, packed, self.pool.cache, self.scratch, out)
        return out.reshape(-1, q_heads, head_dim)

    def run(self, qkv: list[Numbers]) -> Numbers:
        """Return attention of the new tokens; earlier ones were stored in a separate step."""
        lengths = self.case.lengths
        self.store(qkv, [(0, before) for before, _ in lengths])
        return self.attend(self.store(qkv, [(before, before + new) for before, new in lengths]))


def hadamard(x: Numbers) -> Numbers:
    """Return the Walsh-Hadamard transform of each 32 numbers, its sums in the kernels' order."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    for distance in (16, 1, 2, 4, 8):
        pairs = groups.reshape(*groups.shape[:-1], -1, 2, distance)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        groups = np.stack([low + high, low - high], axis=-2).reshape(groups.shape)
    return (groups * np.float32(1 / np.sqrt(32))).reshape(x.shape)


def in_bytes(x: Numbers) -> tuple[Numbers, Numbers]:
    """Return integers from -127 to 127, and a scale per last axis."""
    scales = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    steps = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    return np.rint(x * steps), scales


def rounded(x: Numbers) -> Numbers:
    codes, scales = in_bytes(x)
    return codes.astype(np.float64) * scales


def rotated(x: Numbers, first_position: int = 0) -> Numbers:
    cos, sin = (
        each[first_position : first_position + len(x), None] for each in angles(x.shape[-1])
    )
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def parts(case: Case, qkv: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Queries and keys, rotated and spread out, and values."""
    q_heads = case.kv_heads * case.group
    turned = hadamard(rotated(qkv[:, : q_heads + case.kv_heads]))
    return turned[:, :q_heads], turned[:, q_heads:], qkv[:, q_heads + case.kv_heads :]


def plain(case: Case, qkv: Numbers, before: int) -> Numbers:
    """Return attention of the tokens from `before` on, with numbers rounded as the kernels do."""
    q, k, v = (rounded(each) for each in parts(case, qkv))
    k, v = (np.repeat(each, case.group, axis=1) for each in (k, v))
    scores = np.einsum("qhd,khd->hqk", q[before:], k) / np.sqrt(case.head_dim)
    query, key = np.arange(before, len(qkv))[:, None], np.arange(len(qkv))
    seen = (key <= query) & (key > query - (case.window or EVERYTHING))
    shares = np.where(seen, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
    return np.einsum("hqk,khd->qhd", shares / shares.sum(axis=-1, keepdims=True), v)


CASES = [
    Case(),
    Case(head_dim=32, group=1, kv_heads=1),
    Case(head_dim=128, group=8, block_size=32),
    Case(head_dim=96, group=1, kv_heads=3, block_size=48, window=9),
    Case(group=8, window=33, block_size=48),
    Case(head_dim=32, kv_heads=3, window=1),
    Case(head_dim=128, group=1, lengths=((CHUNK - 1, 1), (CHUNK, 1), (CHUNK + 3, 2))),
    Case(block_size=32, window=CHUNK - 70, lengths=((CHUNK + 300, 37), (0, 1))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:5])))
def test_attention_over_bytes_is_that_of_the_same_numbers_in_numpy(case: Case) -> None:
    qkv = numbers_of(case)
    found = Kernels(case).run(qkv)
    expected = np.concatenate(
        [plain(case, each, before) for each, (before, _) in zip(qkv, case.lengths, strict=True)]
    )
    np.testing.assert_allclose(found, expected, atol=5e-4)


def cached(kernels: Kernels, half: int, num_tokens: int) -> tuple[Numbers, Numbers]:
    """Return codes [tokens, kv_heads, head_dim] and scales of the first sequence, from the pool."""
    case, table = kernels.case, kernels.tables[0]
    words = kernels.pool.blocks[table, 0, half].reshape(
        len(table), case.kv_heads, -1, kernels.shape.tile_words
    )
    words = words.transpose(0, 2, 1, 3).reshape(-1, case.kv_heads, kernels.shape.tile_words)
    scales = words[..., -TILE:].copy().view(np.float32)
    codes = words[..., :-TILE].copy().view(np.uint8)
    if half == 0:
        codes = codes.reshape(-1, case.kv_heads, case.head_dim // 4, TILE, 4)
        codes = codes.transpose(0, 3, 1, 2, 4)
    else:
        codes = codes.reshape(-1, case.kv_heads, 4, case.head_dim, 4).transpose(0, 2, 4, 1, 3)
    codes = codes.reshape(-1, case.kv_heads, case.head_dim).astype(np.int64) - ABOVE
    return codes[:num_tokens], scales.transpose(0, 2, 1).reshape(-1, case.kv_heads)[:num_tokens]


@pytest.mark.parametrize("block_size", [16, 32, 48])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_a_block_holds_bytes_and_scales_where_the_layout_says(
    head_dim: int, block_size: int
) -> None:
    case = Case(head_dim, block_size=block_size, lengths=((0, 53),))
    kernels, (qkv,) = Kernels(case), numbers_of(case)
    kernels.store([qkv], [(0, 53)])
    _, k, v = parts(case, qkv)
    for half, numbers in enumerate((k, v)):
        for found, expected in zip(cached(kernels, half, 53), in_bytes(numbers), strict=True):
            np.testing.assert_array_equal(found, expected.reshape(found.shape))


ONE = Case(32, 1, 1, lengths=((0, 4),))
TOKENS = arrays.arrays(
    np.float32,
    (4, 3, 32),
    elements=st.floats(-(2.0**90), 2.0**90, width=32) | st.floats(-1, 1, width=32) | st.just(0.0),
)


@settings(max_examples=60, deadline=None)
@given(qkv=TOKENS)
def test_keys_and_values_are_rounded_by_at_most_half_a_step(qkv: Numbers) -> None:
    kernels = Kernels(ONE)
    kernels.store([qkv], [(0, 4)])
    _, k, v = parts(ONE, qkv)
    for half, numbers in enumerate((k, v)):
        codes, scales = cached(kernels, half, 4)
        largest = np.abs(numbers).max(axis=-1)
        assert (scales <= largest / 127 * (1 + 1e-6)).all()
        wrong = np.abs(codes * scales[..., None].astype(np.float64) - numbers)
        # Numbers below the smallest scale are zeros.
        assert (wrong <= 0.5001 * scales[..., None] + 127 * 1e-30).all()


@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["key", "value", "query"])
def test_nan_reaches_all_queries_that_see_it_and_no_other(part: str, damage: float) -> None:
    case = Case(kv_heads=2, group=3, lengths=((0, 40), (0, 7)))
    qkv = numbers_of(case)
    head = {"query": 4, "key": 7, "value": 9}[part]  # of KV head 1
    qkv[0][11, head, 37] = damage
    found = np.isfinite(Kernels(case).run(qkv)).all(axis=-1)
    if part == "query":
        assert found.sum() == found.size - 1
        assert not found[11, 4]
    else:
        assert found[:11].all()
        assert found[40:].all()
        assert found[11:40, :3].all()
        assert not found[11:40, 3:].any()


def test_a_probability_far_below_the_largest_still_counts() -> None:
    """A thousand keys, each with a thousandth of the first one's probability."""
    case = Case(32, 1, 1, lengths=((1000, 1),))
    (qkv,) = numbers_of(case)
    qkv[:, :2], qkv[:, 2] = 0, 1
    qkv[-1, 0, 31] = 40.0  # the slowest angle: nearly the same at all positions
    qkv[0, 1, 31] = np.log(1000) / 40 * np.sqrt(32)
    qkv[0, 2] = -1
    found = Kernels(case).run([qkv])
    half_a_step = 0.5 * 0.5 / (127 * 256)  # the largest probability is a half
    np.testing.assert_allclose(found, plain(case, qkv, 1000), atol=1000 * half_a_step)
    assert abs(found).max() < 0.1


SIZES: dict[str, Any] = {
    "vocab_size": 304,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
IN_BYTES: dict[str, Any] = {"kv_cache_dtype": "int8"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose sizes the compiled step supports."""
    made = tmp_path_factory.mktemp("bytes")
    save_model(made, "llama", **SIZES)
    save_tokenizer(made)
    return made


def pool_of(llm: LLM) -> PackedKVPool:
    pool: PackedKVPool = llm.engine.runner.pool  # type: ignore[attr-defined]
    return pool


def twin(pool: KVPool, batch: Batch, windows: Any) -> Callable[..., torch.Tensor]:
    """Return minigen's own attention, with numbers rounded as the kernels do."""
    plain_attend = attend_paged(pool, batch, windows)

    def attend_rounded(layer_id: int, q: Any, k: Any, v: Any) -> torch.Tensor:
        made = (rounded(hadamard(each.numpy())) for each in (q, k))
        made_q, made_k = (torch.from_numpy(each).float() for each in made)
        return plain_attend(layer_id, made_q, made_k, torch.from_numpy(rounded(v.numpy())).float())

    return attend_rounded


@pytest.mark.parametrize(
    "variant", ["llama", "llama-mqa", "qwen2", "qwen3", "qwen2-window", "mistral-window"]
)
def test_the_compiled_step_equals_layers_whose_attention_rounds_alike(
    variant: str, tmp_path: Path
) -> None:
    save_model(tmp_path, variant, **SIZES)
    save_tokenizer(tmp_path)
    prompt = [3 + 7 * each % 290 for each in range(75)]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=SIZES["vocab_size"])

    def logprobs(**options: Any) -> Numbers:
        llm = LLM.load(tmp_path, weights="int8", max_num_batched_tokens=32, **options)
        found = llm.generate(prompt, params).logprobs[0]  # type: ignore[index]
        return np.array([found[token].logprob for token in range(SIZES["vocab_size"])])

    found, expected = logprobs(**IN_BYTES), logprobs(attention_backend=twin)
    assert np.corrcoef(found, expected)[0, 1] > 0.995
    assert np.abs(found - expected).mean() < 0.1 * expected.std()


def test_a_pool_in_bytes_takes_little_more_than_half_the_memory(directory: Path) -> None:
    half, whole = (
        LLM.load(directory, weights="int8", num_blocks=20, kv_cache_dtype=each)
        for each in ("int8", "bfloat16")
    )
    assert isinstance(pool_of(half).cache, ByteCache)
    numbers = 2 * 3 * 2 * 21 * 16 * 32  # two halves, three layers, two KV heads, 21 blocks
    assert pool_of(whole).blocks.nbytes == 2 * numbers
    assert pool_of(half).blocks.nbytes == numbers + 4 * numbers // 32
    assert half.describe()["kv cache"] == "20 blocks of 16 tokens, in int8"


def test_the_same_memory_holds_nearly_twice_the_tokens(directory: Path) -> None:
    loaded = [
        LLM.load(directory, weights="int8", kv_cache_memory=300_000, **options)
        for options in (IN_BYTES, {})
    ]
    blocks = [len(pool_of(llm).blocks) - 1 for llm in loaded]
    for llm, count in zip(loaded, blocks, strict=True):
        block_bytes = pool_of(llm).blocks.nbytes // (count + 1)
        assert count == 300_000 // block_bytes
    assert blocks[0] / blocks[1] == pytest.approx(64 / 36, rel=0.1)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    read = []
    for llm in loaded:
        with llm.count_work() as work:
            llm.generate("some prompt", params)
        read.append(work.kv_bytes_read)
    assert read[0] / read[1] == 36 / 64


@pytest.mark.parametrize("options", [{"weights": "int8"}, {}])
def test_an_attention_of_the_users_own_reads_no_codes(
    options: dict[str, Any], directory: Path
) -> None:
    with pytest.raises(OptionError, match="but an attention_backend was passed in") as caught:
        LLM.load(directory, attention_backend=twin, **options, **IN_BYTES)
    assert str(caught.value).startswith("kv_cache_dtype='int8' needs minigen's own attention")
    assert str(caught.value).count(". ") == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": "float32"}, "no float32 weights"),
        ({"block_size": 8}, "blocks of 8 tokens are not a multiple of 16"),
    ],
)
def test_where_no_step_is_compiled_the_layers_store_bytes_one_by_one(
    options: dict[str, Any], words: str, directory: Path
) -> None:
    llm = LLM.load(directory, **options, **IN_BYTES)
    assert words in llm.describe()["runner"]
    assert isinstance(llm.engine.runner.pool, QuantizedKVPool)  # type: ignore[attr-defined]


def test_without_numba_the_layers_store_bytes(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "has_numba", lambda: False)
    for weights in ("auto", "bfloat16"):
        described = LLM.load(directory, weights=weights, **IN_BYTES).describe()
        assert "pip install 'minigen[cpu]'" in described["runner"]
        assert described["attention"] == "attend_coded"
    with pytest.raises(OptionError, match=r"pip install 'minigen\[cpu\]'"):
        LLM.load(directory, weights="int8", **IN_BYTES)


def test_bfloat16_is_refused_where_keys_and_values_are_float32(directory: Path) -> None:
    with pytest.raises(OptionError, match=r"stores keys and values in float32"):
        LLM.load(directory, weights="float32", kv_cache_dtype="bfloat16")
    llm = LLM.load(directory, weights="int8", kv_cache_dtype="bfloat16")
    assert llm.describe()["kv cache"].endswith("in bfloat16")


def test_auto_weights_are_the_stored_ones_and_missing_kernels_are_compiled(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        "minigen.kernels.cpu.compile.compile_step", lambda *forms: asked.append(forms)
    )
    described = LLM.load(directory, **IN_BYTES).describe()
    assert asked == [("int8", "int8")]
    assert described["weights"] == "int8 (auto: 21 matrices rounded to int8)"
    assert described["runner"] == "a whole step compiled by Numba"


def test_damaged_keys_are_an_error_and_give_no_answer(directory: Path) -> None:
    llm = LLM.load(directory, weights="int8", **IN_BYTES)
    heads = llm.engine.runner.weights.heads  # type: ignore[attr-defined]
    heads.cos[40 * 16 + 3] = np.nan  # the angle of position 40
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    assert llm.generate("a" * 30, params).token_ids
    with pytest.raises(MinigenError, match="logits are not finite"):
        llm.generate("a" * 60, params)


def test_only_cache_types_with_kernels_are_compiled() -> None:
    with pytest.raises(OptionError, match="a KV cache in bfloat16 or int8, but not in 'fp8'"):
        compile_forms(["int4"], "fp8")


def test_each_cache_type_has_its_own_machine_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(code_cache, "FOLDER", tmp_path)
    code_cache.report_compiled("int4", "int8", {"compiled": 1.0})
    assert code_cache.is_compiled("int4", "int8")
    assert not code_cache.is_compiled("int4")
    assert not code_cache.is_compiled("int8", "int8")
    assert code_cache.speeds("int4") == {}
