"""A KV cache in codes: closed forms, its memory, and texts that do not depend on the batch."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minigen import LLM, SamplingParams
from minigen.assembly.coded_cache import CODED
from minigen.errors import OptionError
from minigen.kv_cache.fp8 import Fp8KVPool, to_fp8
from minigen.kv_cache.paged import Batch
from minigen.kv_cache.quantized import (
    BITS,
    QuantizedKVPool,
    attend_coded,
    block_bytes,
    dequantize,
    group_size,
    pack,
    quantize,
    tails_needed,
    unpack,
)
from minigen.model.attention import attention_naive
from tests.tiny import TINY_VOCAB, save_model, save_tokenizer

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 2, 6, 2, 8
PROMPTS = ["ab", "a prompt that fills several blocks of the cache", "one of middling length"]
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=14, ignore_eos=True)

# Closed forms


@given(st.sampled_from([8, 4, 2]), st.integers(0, 10**6), st.floats(1e-3, 1e3), st.floats(-50, 50))
def test_a_number_is_wrong_by_half_a_step_at_most(
    bits: int, seed: int, scale: float, shift: float
) -> None:
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(seed)) * scale + shift * scale
    codes, low, step = quantize(x, -1, bits)
    assert int(codes.max()) <= 2**bits - 1
    wrong = (dequantize(codes, low, step) - x).abs().amax(-1)
    ends = x.abs().amax(-1) * 2**-11 + step.squeeze(-1).float() * 2**bits * 2**-11
    assert (wrong <= step.squeeze(-1).float() / 2 + 2 * ends + 1e-6).all()


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_numbers_on_the_grid_and_equal_numbers_are_exact(bits: int) -> None:
    grid = torch.arange(2**bits).float() / 4 - 3
    codes, low, step = quantize(grid, 0, bits)
    assert codes.tolist() == list(range(2**bits))
    assert torch.equal(dequantize(codes, low, step), grid)
    same = torch.full((3, 7), -1.5)
    assert torch.equal(dequantize(*quantize(same, 0, bits)), same)


def test_what_is_no_number_stays_none() -> None:
    x = torch.tensor([[1.0, 2.0, math.nan], [1.0, 2.0, math.inf], [1.0, 2.0, 3.0]])
    found = dequantize(*quantize(x, -1, 4))
    assert not found[:2].isfinite().all(-1).any()
    assert found[2].isfinite().all()


@given(st.sampled_from([8, 4, 2]), st.integers(1, 5), st.integers(0, 10**6))
def test_packed_codes_come_back(bits: int, num_bytes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (3, num_bytes * 8 // bits)
    codes = torch.randint(2**bits, shape, dtype=torch.uint8, generator=generator)
    packed = pack(codes, bits)
    assert packed.shape == (3, num_bytes)
    assert torch.equal(unpack(packed, bits), codes)


def test_each_number_in_fp8_is_near_and_the_largest_is_exact() -> None:
    x = torch.randn(100, 3, 16) * torch.logspace(-4, 4, 100)[:, None, None]
    codes, scales = to_fp8(x)
    found = codes.float() * scales.unsqueeze(-1)
    wrong = (found - x).abs()
    assert (wrong <= torch.maximum(x.abs() / 16, scales.unsqueeze(-1) * 2**-10) * 1.0001).all()
    at = x.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(found.gather(-1, at), x.gather(-1, at), rtol=1e-6, atol=0)
    assert torch.equal(to_fp8(torch.zeros(1, 1, 4))[0].float(), torch.zeros(1, 1, 4))


# Attention over pages, beside a twin that works token by token


def naive_codes(x: torch.Tensor, bits: int, *, per_channel: bool) -> torch.Tensor:
    """Return a block [tokens, kv_heads, head_dim] as its codes give it back, group by group."""
    out = x.numpy().astype(np.float64)
    axis = 0 if per_channel else 2
    size = group_size(x.shape[axis])
    for begin in range(0, x.shape[axis], size):
        place = [slice(None)] * 3
        place[axis] = slice(begin, begin + size)
        group = out[tuple(place)]
        low = group.min(axis, keepdims=True).astype(np.float16).astype(np.float64)
        step = ((group.max(axis, keepdims=True) - low) / (2**bits - 1)).astype(np.float16)
        step = step.astype(np.float64)
        codes = np.rint((group - low) / np.where(step > 0, step, 1)).clip(0, 2**bits - 1)
        out[tuple(place)] = low + codes * step
    return torch.tensor(out, dtype=torch.float32)


def twin(q: Any, k: Any, v: Any, size: int, bits: int, window: int | None) -> torch.Tensor:
    """Attend token by token: earlier blocks by their codes, a token's own block as it is."""
    blocks = range(0, len(k) - size + 1, size)
    coded = [
        [naive_codes(x[at : at + size], bits, per_channel=x is k) for at in blocks] for x in (k, v)
    ]
    outs = []
    for position in range(len(q)):
        begin, end = position // size * size, position + 1
        keys, values = (
            torch.cat([*of[: begin // size], x[begin:end]])
            for of, x in zip(coded, (k, v), strict=True)
        )
        outs.append(attention_naive(q[position:end], keys, values, window))
    return torch.cat(outs)


class Pages:
    """A pool, and sequences whose tokens are stored and attended to by steps."""

    def __init__(self, bits: int, size: int, lengths: list[int], num_kept: int = 2):
        self.size, self.computed = size, [0] * len(lengths)
        per_sequence = -(-max(lengths) // size)
        ids = np.random.default_rng(1).permutation(per_sequence * len(lengths)) + 1
        self.tables = ids.reshape(len(lengths), -1)
        num_tails = tails_needed(len(lengths), num_kept)
        sizes = (LAYERS, len(ids), KV_HEADS, size, HEAD_DIM, torch.float32)
        self.pool = QuantizedKVPool(*sizes, bits, num_tails, num_kept, self.filling)
        self.pool.tails.fill_(math.nan)  # left by earlier owners
        self.pool.key_grids.fill_(math.nan)
        self.pool.value_grids.fill_(math.nan)
        generator = torch.Generator().manual_seed(7)
        shapes = [(length, heads) for length in lengths for heads in (Q_HEADS, KV_HEADS, KV_HEADS)]
        made = [torch.randn(*shape, HEAD_DIM, generator=generator) for shape in shapes]
        self.qkv = [made[at : at + 3] for at in range(0, len(made), 3)]
        for _, k, _ in self.qkv:
            k[..., 3] += 20  # a channel that is large in all tokens

    def filling(self) -> list[int]:
        pairs = zip(self.tables, self.computed, strict=True)
        return [int(table[at // self.size]) for table, at in pairs if at % self.size]

    def batch(self, new: dict[int, int]) -> Batch:
        """Return the next tokens of these sequences, `new` many of each."""
        starts = np.cumsum([0, *new.values()]).tolist()
        stops = torch.tensor([self.computed[row] + count for row, count in new.items()])
        none = torch.zeros(starts[-1], dtype=torch.int64)
        tables = torch.tensor(self.tables[list(new)])
        return Batch(none, none, none, starts, stops, tables, none[:0], 0)

    def step(self, new: dict[int, int], window: int | None = None, wrong: int = 0) -> Any:
        """Run a step; the last `wrong` tokens are drafts, of other numbers, and roll back."""
        attend = attend_coded(self.pool, self.batch(new), [window] * LAYERS)
        q, k, v = (
            torch.cat([self.part(row, count, each, wrong) for row, count in new.items()])
            for each in range(3)
        )
        outs = [attend(layer_id, q, k * (1 + layer_id), v) for layer_id in range(LAYERS)]
        for row, count in new.items():
            self.computed[row] += count - wrong
        return outs[0].split(list(new.values()))

    def part(self, row: int, count: int, each: int, wrong: int) -> torch.Tensor:
        at = self.computed[row]
        found = self.qkv[row][each][at : at + count].clone()
        found[count - wrong :] = 33.0
        return found

    def expected(self, row: int, window: int | None = None) -> torch.Tensor:
        return twin(*self.qkv[row], self.size, self.pool.bits, window)


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("size", [1, 4, 16, 64])
@pytest.mark.parametrize("bits", [8, 2])
def test_attention_is_that_of_a_twin_whatever_the_steps(
    bits: int, size: int, window: int | None
) -> None:
    lengths = [70, 17, 33]
    expected = [Pages(bits, size, lengths).expected(row, window) for row in range(3)]
    for cuts in ([70], [1] * 70, [7] * 10, [16, 1, 1, 30, 22]):
        pages, found = Pages(bits, size, lengths), [[] for _ in lengths]
        for count in cuts:
            left = {row: lengths[row] - pages.computed[row] for row in range(len(lengths))}
            new = {row: min(count, each) for row, each in left.items() if each}
            for row, out in zip(new, pages.step(new, window), strict=True):
                found[row].append(out)
        for outs, own in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.cat(outs), own, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("bits", [8, 2])
def test_no_bit_depends_on_what_else_is_in_the_batch(bits: int) -> None:
    lengths = [50, 21, 40]
    together, alone = Pages(bits, 4, lengths), Pages(bits, 4, lengths)
    for new in ({0: 30, 1: 20, 2: 39}, {0: 1, 1: 1, 2: 1}, {0: 19}):
        outs = together.step(new)
        for (row, count), out in zip(new.items(), outs, strict=True):
            assert torch.equal(alone.step({row: count})[0], out)
    assert torch.equal(together.pool.codes, alone.pool.codes)


@pytest.mark.parametrize("size", [1, 2, 4, 16])
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_tokens_that_roll_back_leave_nothing_behind(size: int, drafts: int) -> None:
    lengths = [40, 30]
    kept = 1 + -(-drafts // size)
    plain, guessed = Pages(4, size, lengths), Pages(4, size, lengths, kept)
    for pages in (plain, guessed):
        pages.step({0: 13, 1: 6})
    for number in range(30 - 13 - drafts):
        expected = plain.step({0: 1, 1: 1})
        wrong = drafts if number % 3 else 0
        found = guessed.step({0: 1 + wrong, 1: 1 + wrong}, wrong=wrong)
        for out, own in zip(found, expected, strict=True):
            assert torch.equal(out[:1], own) or wrong  # torch may add up in another order
            torch.testing.assert_close(out[:1], own, atol=1e-5, rtol=1e-5)
    full = [table[: at // size] for table, at in zip(plain.tables, plain.computed, strict=True)]
    ids = np.concatenate(full)
    assert torch.equal(plain.pool.codes[:, :, ids], guessed.pool.codes[:, :, ids])
    assert guessed.pool.num_tails <= tails_needed(2, kept)


def test_a_step_that_was_interrupted_runs_again() -> None:
    whole, broken = Pages(4, 4, [40]), Pages(4, 4, [40])
    for pages in (whole, broken):
        pages.step({0: 6})
    attend = attend_coded(broken.pool, broken.batch({0: 30}), [None] * LAYERS)
    q, k, v = (broken.part(0, 30, each, 0) for each in range(3))
    attend(0, q, k, v)  # and no further layer
    assert torch.equal(broken.step({0: 30})[0], whole.step({0: 30})[0])
    assert torch.equal(broken.step({0: 4})[0], whole.step({0: 4})[0])


def test_a_copied_block_has_its_own_tail() -> None:
    pages = Pages(4, 4, [16, 16])
    pages.step({0: 6})
    parent, child = int(pages.tables[0, 1]), int(pages.tables[1, 1])
    pages.tables[1, 0], pages.computed[1] = pages.tables[0, 0], 6
    pages.pool.copy_blocks([(parent, child)])
    for each in range(3):
        pages.qkv[1][each][:6] = pages.qkv[0][each][:6]
    outs = pages.step({0: 10, 1: 10})
    for row in range(2):
        torch.testing.assert_close(outs[row], pages.expected(row)[6:], atol=1e-5, rtol=1e-5)
    assert not torch.equal(*outs)


def test_a_large_channel_of_keys_does_not_spoil_the_others() -> None:
    """Per token it would: the step of a group is as wide as its largest number needs."""
    k = torch.randn(32, 1, 32, generator=torch.Generator().manual_seed(0))
    k[..., 5] += 50
    small = [channel for channel in range(32) if channel != 5]
    wrong = [
        (dequantize(*quantize(k, axis, 4)) - k)[..., small].square().mean().sqrt()
        for axis in (0, -1)
    ]
    assert wrong[0] < 0.12
    assert wrong[1] > 5 * wrong[0]


# Memory


@pytest.mark.parametrize("kv_dtype", CODED)
@pytest.mark.parametrize(
    ("size", "changes", "memory"),
    [(16, {}, 400_000), (32, {"head_dim": 64}, 6_000_000), (12, {}, 320_000)],
)
def test_the_memory_is_what_was_counted(
    kv_dtype: str, size: int, changes: dict[str, int], memory: int, tmp_path: Path
) -> None:
    save_model(tmp_path, "llama", vocab_size=TINY_VOCAB, **changes)
    save_tokenizer(tmp_path)
    llm = LLM.load(
        tmp_path,
        weights="float32",
        kv_cache_dtype=kv_dtype,
        kv_cache_memory=memory,
        block_size=size,
        max_num_seqs=20,
    )
    pool: Any = llm.engine.runner.pool  # type: ignore[attr-defined]
    num_blocks = llm.manager.allocator.num_free
    fixed, stored = 0, [pool.codes]
    if kv_dtype == "fp8":
        stored.append(pool.scales)
    else:
        stored += [pool.key_grids, pool.value_grids]
        fixed = pool.tails.nbytes
    per_block = sum(each.nbytes for each in stored) / (num_blocks + 1)
    usable = 20 * math.ceil(128 / size)
    assert num_blocks * per_block + fixed <= memory
    counted = 3 * size * math.ceil(per_block / 3 / size)  # whole bytes per token and layer
    assert num_blocks == usable or (num_blocks + 1) * counted + fixed > memory
    head_dim = changes.get("head_dim", 8)
    if kv_dtype != "fp8":
        assert per_block == 3 * block_bytes(BITS[kv_dtype], size, KV_HEADS, head_dim)
    described = llm.describe()
    assert described["kv cache"] == f"{num_blocks} blocks of {size} tokens, in {kv_dtype}"
    per_token = 3 * math.ceil(per_block / 3 / size)
    assert described["kv memory"].startswith(f"{per_token:,} bytes per token")
    assert (f"{fixed:,} bytes for blocks that are not full" in described["kv memory"]) == bool(
        fixed
    )
    assert described["attention"] == "attend_coded"


def test_bits_per_number_of_the_default_models_sizes() -> None:
    """Heads of 64 numbers: codes, and 4 bytes per group."""

    def bits_of(bits: int, size: int) -> float:
        return 8 * block_bytes(bits, size, 3, 64) / (2 * size * 3 * 64)

    assert bits_of(2, 32) == 3.0  # as KIVI's groups of 32
    assert bits_of(4, 32) == 5.0
    assert bits_of(8, 64) == 9.0
    assert bits_of(2, 16) == 3.5


def test_a_memory_without_room_for_a_block_is_refused(tiny_directory: Path) -> None:
    with pytest.raises(OptionError, match=r"holds no block: .* and all blocks that are not full"):
        LLM.load(tiny_directory, weights="float32", kv_cache_dtype="int4", kv_cache_memory=100_000)


# Texts


def texts(directory: Path, kv_dtype: str, prompts: list[str] = PROMPTS, **options: Any) -> Any:
    options = {"block_size": 4, "num_blocks": 60, **options}
    llm = LLM.load(directory, weights="float32", kv_cache_dtype=kv_dtype, **options)
    found = [each.token_ids for each in llm.generate(prompts, SAMPLED)]
    assert llm.kv_usage == 0
    if len(prompts) > 1 and options.get("enable_prefix_caching", True):
        with llm.count_work() as work:
            again = [each.token_ids for each in llm.generate(prompts[1:2], SAMPLED)]
        assert again == found[1:2]
        assert work.tokens_cached > 0
    return found


class WrongDrafts:
    """Proposes the alphabet: some letters are right, by chance."""

    def propose(self, sequences: Any, counts: Any) -> Any:
        return [
            [3 + (len(sequence) * 7 + each) % 250 for each in range(count)]
            for sequence, count in zip(sequences, counts, strict=True)
        ]

    def end(self, sequence: Any) -> None:
        pass


WAYS: dict[str, dict[str, Any]] = {
    "no prefix cache": {"enable_prefix_caching": False},
    "one at a time": {"max_num_seqs": 1},
    "small steps": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "preempted": {"num_blocks": 22, "max_num_seqs": 4},
    "wrong drafts": {"proposer": WrongDrafts, "speculative_config": {"adaptive": False}},
}


@pytest.mark.parametrize("kv_dtype", CODED)
def test_a_text_does_not_depend_on_what_runs_beside_it(tiny_directory: Path, kv_dtype: str) -> None:
    together = texts(tiny_directory, kv_dtype)
    alone = [texts(tiny_directory, kv_dtype, [prompt])[0] for prompt in PROMPTS]
    assert alone == together
    for name, options in WAYS.items():
        assert texts(tiny_directory, kv_dtype, **options) == together, name


@pytest.mark.parametrize("kv_dtype", CODED)
def test_answers_that_fork_from_a_prompt_are_those_that_do_not(
    tiny_directory: Path, kv_dtype: str
) -> None:
    params = SamplingParams(n=4, temperature=0.9, seed=5, max_tokens=12, ignore_eos=True)
    found = []
    for options in ({"max_num_seqs": 4}, {"max_num_seqs": 1, "enable_prefix_caching": False}):
        llm = LLM.load(
            tiny_directory,
            weights="float32",
            kv_cache_dtype=kv_dtype,
            block_size=8,
            **options,
        )
        found.append([each.token_ids for each in llm.generate("a fork", params).choices])
    assert found[0] == found[1]
    assert len({tuple(each) for each in found[0]}) == 4


def test_more_bits_are_nearer_to_full_precision(tiny_directory: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=TINY_VOCAB)
    prompt = PROMPTS[1] * 2

    def logprobs(**options: Any) -> Any:
        llm = LLM.load(tiny_directory, weights="float32", block_size=8, **options)
        (found,) = llm.generate(prompt, params).logprobs  # type: ignore[misc]
        return np.array([found[token].logprob for token in range(TINY_VOCAB)])

    exact = logprobs()
    wrong = {
        kv_dtype: np.abs(logprobs(kv_cache_dtype=kv_dtype) - exact).mean() for kv_dtype in CODED
    }
    assert wrong["int8"] < wrong["fp8"] < wrong["int2"]
    assert wrong["int8"] < wrong["int4"] < wrong["int2"]


def test_a_layer_with_a_window_reads_codes_too(tmp_path: Path) -> None:
    save_model(tmp_path, "mistral-window", vocab_size=TINY_VOCAB)
    save_tokenizer(tmp_path)
    together = texts(tmp_path, "int4")
    assert texts(tmp_path, "int4", max_num_batched_tokens=5, max_num_seqs=4) == together


# Refused


def test_what_cannot_store_codes_gets_one_sentence(tiny_directory: Path, tmp_path: Path) -> None:
    from minigen.kv_cache.paged import attend_paged

    def own(pool: Any, batch: Any, windows: Any) -> Any:
        return attend_paged(pool, batch, windows)

    save_model(tmp_path, "llama-head-dim", vocab_size=TINY_VOCAB, head_dim=10)
    save_tokenizer(tmp_path)
    for directory, options, words in (
        (tiny_directory, {"attention_backend": own}, "an attention_backend was passed in"),
        (tiny_directory, {"tensor_parallel_size": 2}, "the model is split over 2 processes"),
        (tmp_path, {}, "packs 4 numbers into a byte, but the model's heads have 10"),
    ):
        with pytest.raises(OptionError, match=words):
            LLM.load(directory, weights="float32", kv_cache_dtype="int2", **options)


def test_a_pool_in_fp8_copies_blocks_with_their_scales() -> None:
    pool = Fp8KVPool(LAYERS, 5, KV_HEADS, 4, HEAD_DIM)
    pool.codes[:, :, 2], pool.scales[:, :, 2] = 7, 0.5
    pool.copy_blocks([(2, 4)])
    assert (pool.codes[:, :, 4] == 7).all()
    assert (pool.scales[:, :, 4] == 0.5).all()
    pool.copy_blocks([])
