"""The compiled step: products in the stored format, attention in place, batch invariance."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("numba")

from numba import njit

from minigen import LLM, SamplingParams
from minigen.assembly import cpu
from minigen.checkpoint.checkpoint import open_checkpoint
from minigen.checkpoint.safetensors import StoredTensor
from minigen.engine.model_runner import PagedRunner
from minigen.errors import MinigenError, OptionError
from minigen.kernels.cpu.arrays.aligned import CACHE_LINE
from minigen.kernels.cpu.arrays.inputs import Quantized, quantized, rounded
from minigen.kernels.cpu.arrays.step_arrays import refusal
from minigen.kernels.cpu.compile import compile_step
from minigen.kernels.cpu.elementwise import exponential, prepare, silu
from minigen.kernels.cpu.kv.layout import CHUNK
from minigen.kernels.cpu.packed_weights import pack_rows
from minigen.kernels.cpu.runner import CompiledRunner
from minigen.kernels.cpu.simd import load, store, store_bfloat16, store_bytes
from minigen.kernels.cpu.step import embed_row
from minigen.kernels.cpu.team import pool_of_one
from minigen.kernels.jit import code_cache
from minigen.kernels.jit.code_cache import speeds
from minigen.kernels.panel_linear import PanelLinear, panel_linear
from minigen.kv_cache.paged import Batch, KVPool, attend_paged
from minigen_course.ch34_cpu_kernels.reference import ByteRows, CodeRows, byte_rows, multiply_codes
from tests.tiny import save_model, save_tokenizer

SIZES: dict[str, Any] = {  # what the vectors need: widths of 32, a vocabulary of 16
    "vocab_size": 304,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
VARIANTS = [
    "llama",
    "llama-tied",
    "llama-mha",
    "llama-mqa",
    "llama-rope-llama3",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "mistral-window",
]


@njit
def _exponentials(x, out):  # type: ignore[no-untyped-def]
    store(out, 0, exponential(load(x, 0)))


@njit
def _silus(x, out):  # type: ignore[no-untyped-def]
    store(out, 0, silu(load(x, 0)))


@njit
def _rounded(x, numbers, halves):  # type: ignore[no-untyped-def]
    store_bytes(numbers, 0, load(x, 0))
    store_bfloat16(halves, 0, load(x, 0))


def test_exponentials_are_those_of_numpy_to_a_float32s_last_digits() -> None:
    for first in range(-80, 80, 16):
        x = np.linspace(first, first + 16, 16, dtype=np.float32)
        found = np.zeros(16, np.float32)
        _exponentials(x, found)
        np.testing.assert_allclose(found, np.exp(x.astype(np.float64)), rtol=3e-7)


def test_exponentials_stay_finite_beyond_a_float32s_reach_and_nan_stays_nan() -> None:
    x = np.array([-1e30, -500, -88, 88, 89, 200, 1e30, np.nan] * 2, np.float32)
    found = np.zeros(16, np.float32)
    _exponentials(x, found)
    expected = np.exp(np.clip(x.astype(np.float64), -87, 88))
    np.testing.assert_allclose(found, expected, rtol=3e-7)


def test_silu_is_torchs_for_numbers_of_any_size() -> None:
    for x in (np.linspace(-12, 12, 16), np.geomspace(-1e-3, -1e30, 16), np.geomspace(1, 1e30, 16)):
        x, found = x.astype(np.float32), np.zeros(16, np.float32)
        _silus(x, found)
        expected = torch.nn.functional.silu(torch.from_numpy(x).double()).numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_numbers_are_rounded_to_the_nearest_byte_and_to_the_nearest_bfloat16() -> None:
    x = np.array([0, 0.5, 1.5, -0.5, -1.49, 126.6, -127.4, 3.14159] * 2, np.float32)
    numbers, halves = np.zeros(16, np.int8), np.zeros(16, np.uint16)
    _rounded(x, numbers, halves)
    assert numbers.tolist() == np.rint(x).astype(np.int8).tolist()
    expected = torch.from_numpy(x).bfloat16()
    assert torch.equal(torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16), expected)


def stored(kind: str, weight: np.ndarray, order: torch.Tensor | None = None) -> StoredTensor:
    data = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])
    raw = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8).reshape(len(weight), -1))
    return StoredTensor("weight", kind, weight.shape, raw.clone(), order)


def of_offsets(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Return the minima that kernels multiply with: a whole number of 256ths of a step."""
    scales, minima = scales.astype(np.float32), minima.astype(np.float32)
    found = np.rint(minima / scales * 256) / 256 * scales
    assert (np.abs(found - minima) <= np.abs(scales) / 511).all()
    return found


def kept(weight: StoredTensor) -> torch.Tensor:
    """Return the weights that kernels multiply with."""
    numbers = weight.dequantize()
    if weight.kind != "Q4_1":
        return numbers
    blocks = weight.data[slice(None) if weight.row_order is None else weight.row_order]
    steps = blocks.numpy().reshape(len(blocks), -1, 20)[..., :4].copy().view(np.float16)
    scales, minima = steps[..., 0], steps[..., 1]
    more = of_offsets(scales, minima) - minima.astype(np.float32)
    return numbers + torch.from_numpy(more.repeat(32, axis=1))


def zeros_of(inputs: Quantized) -> np.ndarray:
    return inputs.pairs8.view(np.int16)[::2].astype(np.int64)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 8, 13])
@pytest.mark.parametrize(("form", "kind"), [("int4", "Q4_1"), ("int4", "Q4_0"), ("int8", "Q8_0")])
def test_stored_weights_are_multiplied_without_conversion(
    form: str, kind: str, num_tokens: int
) -> None:
    rng = np.random.default_rng(num_tokens)
    order = torch.from_numpy(rng.permutation(48))
    weight = stored(kind, rng.standard_normal((48, 96)).astype(np.float32), order)
    x = torch.from_numpy(rng.standard_normal((num_tokens, 96)).astype(np.float32))
    found = panel_linear(form, 2)([weight], [])(x)
    inputs = quantized(num_tokens, 96)
    prepare(pool_of_one(), x.numpy().reshape(-1), num_tokens, 96, inputs)
    steps = inputs.numbers.reshape(num_tokens, -1, 32) + zeros_of(inputs).reshape(num_tokens, -1, 1)
    groups = (steps * inputs.scales.reshape(num_tokens, -1, 1)).astype(np.float32)
    expected = torch.from_numpy(groups.reshape(num_tokens, 96)) @ kept(weight).T
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


def test_the_machine_code_of_a_product_outside_a_step_is_stored() -> None:
    """Else each process that runs layer by layer would compile for some seconds at its start."""
    weight = stored("Q4_1", np.ones((48, 96), np.float32))
    panel_linear("int4", 1)([weight], [])(torch.ones(1, 96))
    assert code_cache.FOLDER is not None, "it is compiled in each process"
    assert list(code_cache.FOLDER.glob("linear.prepare_and_multiply-*.code"))


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 8, 13])
@pytest.mark.parametrize(("form", "kind"), [("int4", "Q4_1"), ("int8", "Q8_0")])
def test_kernels_multiply_as_the_plain_reference_does(
    form: str, kind: str, num_tokens: int
) -> None:
    rng = np.random.default_rng(num_tokens)
    weight = stored(kind, rng.standard_normal((48, 96)).astype(np.float32))
    blocks = weight.data.numpy().reshape(48, 3, -1)
    scales, rest = blocks[..., :2].copy().view(np.float16)[..., 0], blocks[..., 2:]
    codes, minima = rest.view(np.int8), np.zeros_like(scales)
    if kind == "Q4_1":
        minima, packed = rest[..., :2].copy().view(np.float16)[..., 0], rest[..., 2:]
        minima = of_offsets(scales, minima)
        codes = np.concatenate([packed & 15, packed >> 4], axis=-1)
    rows = CodeRows(codes, scales.astype(np.float32), minima.astype(np.float32))
    x = rng.standard_normal((num_tokens, 96)).astype(np.float32)
    found = panel_linear(form, 2)([weight], [])(torch.from_numpy(x))
    np.testing.assert_allclose(
        found.numpy(), multiply_codes(rows, byte_rows(x)), atol=2e-5, rtol=1e-5
    )


def test_the_plain_reference_gives_the_kernels_bytes() -> None:
    x = np.random.default_rng(0).standard_normal((40, 96)).astype(np.float32)
    x[::2, 5] *= 50
    x[1::3] = np.abs(x[1::3]) + 1
    x[7, 32:64] = 0
    inputs, plain = quantized(40, 96), byte_rows(x)
    prepare(pool_of_one(), x.reshape(-1), 40, 96, inputs)
    zeros = zeros_of(inputs).reshape(40, 3).astype(np.int32)
    expected = ByteRows(inputs.numbers.reshape(40, 3, 32), inputs.scales.reshape(40, 3), zeros)
    for mine, kernels in zip(plain, expected, strict=True):
        assert mine.dtype == kernels.dtype
        np.testing.assert_array_equal(mine, kernels)


@pytest.mark.parametrize(
    ("form", "bound"), [("int4", 1 / 30), ("int8", 1 / 254)], ids=["int4", "int8"]
)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q5_1", "Q6_K"])
def test_other_formats_are_rounded_within_half_a_step(form: str, bound: float, kind: str) -> None:
    rng = np.random.default_rng(1)
    numbers = rng.standard_normal((16, 256)).astype(np.float32)
    if kind == "Q6_K":  # the gguf library can only read it
        raw = rng.integers(0, 255, (16, 210), np.uint8)
        raw[:, 208:] = np.full((16, 1), 0.01, np.float16).view(np.uint8)
        weight = StoredTensor("weight", kind, (16, 256), torch.from_numpy(raw))
    else:
        weight = stored(kind, numbers)
    exact = weight.dequantize()
    linear = panel_linear(form, 1)([weight], [])
    assert isinstance(linear, PanelLinear)
    units = torch.eye(256) * 254  # exact bytes, so the outputs are the weights
    found = (linear(units) / 254).T
    groups = exact.unflatten(1, (-1, 32))
    span = groups.amax(-1) - groups.amin(-1) if form == "int4" else 2 * groups.abs().amax(-1)
    wrong = (found - exact).unflatten(1, (-1, 32)).abs().amax(-1)
    assert (wrong <= span * bound * 1.02 + 2e-3 * groups.abs().amax(-1)).all()


@pytest.mark.parametrize("spread", [0.0, 1e-6, 1e-3, 0.02, 0.06, 0.2])
@pytest.mark.parametrize("size", [1.0, -30.0, 1e-4])
def test_4_bit_weights_of_nearly_one_size_keep_it(size: float, spread: float) -> None:
    """Their minima are more steps from 0 than 16 bits hold, so the steps become wider."""
    rng = np.random.default_rng(3)
    numbers = (size + size * spread * rng.standard_normal((16, 64))).astype(np.float32)
    weight = stored("Q4_1", numbers)
    inputs = torch.eye(64) * 254
    groups = numbers.reshape(16, 2, 32)
    half_a_step = np.ptp(groups, axis=-1, keepdims=True) / 30
    farthest = np.abs(groups).max(axis=-1, keepdims=True)
    for each in (weight, stored("F32", numbers)):
        found = (panel_linear("int4", 1)([each], [])(inputs) / 254).T.numpy()
        wrong = np.abs(found - each.dequantize().numpy()).reshape(16, 2, 32)
        assert (wrong <= 1.1 * half_a_step + farthest / 250 + 2.0**-23).all()


def test_a_minimum_or_scale_that_is_nan_or_infinite_shows_in_every_product() -> None:
    numbers = np.random.default_rng(3).standard_normal((16, 64)).astype(np.float32)
    for row, (place, bad) in enumerate((p, b) for p in (0, 1) for b in (np.nan, np.inf, -np.inf)):
        weight = stored("Q4_1", numbers)
        steps = weight.data.numpy().reshape(16, 2, 20)[..., :4].view(np.float16)
        steps[row, 1, place] = bad
        found = panel_linear("int4", 1)([weight], [])(torch.ones(2, 64))
        assert not found[:, row].isfinite().any()
        assert np.delete(found.isfinite().numpy(), row, axis=1).all()


@pytest.mark.parametrize(("form", "bound"), [("int4", 0.12), ("int8", 0.01)])
@pytest.mark.parametrize("size", [0.02, 0.002, 2e-4, 5e-5])
def test_small_weights_are_rounded_as_well_as_large_ones(
    form: str, bound: float, size: float
) -> None:
    numbers = np.random.default_rng(2).standard_normal((32, 64)).astype(np.float32) * size
    weight = stored("F32", numbers)
    linear = panel_linear(form, 1)([weight], [])
    found = (linear(torch.eye(64) * 254) / 254).T
    assert (found - weight.dequantize()).norm() < bound * weight.dequantize().norm()


def test_bytes_have_a_scale_for_every_32_numbers_and_zeros_stay_zeros() -> None:
    x = np.zeros((2, 64), np.float32)
    x[1, 3], x[1, 40] = -2.0, 1000.0
    inputs = quantized(2, 64)
    prepare(pool_of_one(), x.reshape(-1), 2, 64, inputs)
    assert inputs.scales.tolist() == pytest.approx([0, 0, 2 / 254, 1000 / 254])
    assert zeros_of(inputs).tolist() == [128, 128, -126, 128]
    assert inputs.numbers[64:72].tolist() == [126, 126, 126, -128, 126, 126, 126, 126]
    assert inputs.numbers[64 + 40] == 126
    assert (inputs.pairs8 >> 16).tolist() == [0, 0, -254, 254]


def test_bytes_are_within_half_a_step_of_their_numbers() -> None:
    x = np.random.default_rng(0).standard_normal((40, 32)).astype(np.float32)
    x[::2, 5] *= 50
    x[1::3] = np.abs(x[1::3]) + 1
    inputs = quantized(40, 32)
    prepare(pool_of_one(), x.reshape(-1), 40, 32, inputs)
    steps = inputs.numbers.reshape(40, 32).astype(np.float64) + zeros_of(inputs)[:, None]
    wrong = np.abs(steps * inputs.scales[:, None] - x)
    assert (wrong <= 0.501 * inputs.scales[:, None]).all()


@pytest.mark.parametrize("form", ["int4", "int8"])
@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_propagate_through_every_product(form: str, damage: float) -> None:
    rng = np.random.default_rng(0)
    weight = stored("F32", rng.standard_normal((16, 64)).astype(np.float32))
    for column in (0, 17, 63):
        x = torch.from_numpy(rng.standard_normal((3, 64)).astype(np.float32))
        x[1, column] = damage
        found = panel_linear(form, 1)([weight], [])(x)
        assert not found[1].isfinite().any()
        assert found[[0, 2]].isfinite().all()


def test_numbers_too_small_for_a_scale_are_zeros() -> None:
    x = np.full(64, 1e-39, np.float32)
    x[32:] = -3e-45
    inputs = quantized(1, 64)
    prepare(pool_of_one(), x, 1, 64, inputs)
    assert np.isfinite(inputs.scales).all()
    assert (inputs.numbers == -zeros_of(inputs).repeat(32)).all()


def test_bfloat16_inputs_are_rounded_to_the_nearest() -> None:
    x = np.linspace(-3, 3, 64, dtype=np.float32)
    inputs = rounded(1, 64)
    prepare(pool_of_one(), x, 1, 64, inputs)
    numbers = inputs.numbers.reshape(2, -1)[:, :32].reshape(-1)  # tiles have other rows between
    if numbers.dtype != np.float32:  # a processor that multiplies pairs
        numbers = torch.from_numpy(numbers.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(numbers, torch.from_numpy(x).bfloat16().float().numpy())


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compile the step for bfloat16, too; bytes are compiled when they are first requested."""
    compile_step("bfloat16")


def test_machine_code_counts_no_references_to_arrays_and_allocates_nothing() -> None:
    """Numba's counting is an atomic instruction per array and task, on which workers wait.

    What counts or allocates calls functions of Numba's, which a process without Numba lacks.
    """
    assert code_cache.FOLDER is not None
    stored = list(code_cache.FOLDER.glob("*.code"))
    assert {each.name.split("-")[0] for each in stored} >= {"step.run_step", "sampling.choose_rows"}
    assert not [each.name for each in stored if b"NRT_" in each.read_bytes()]


@njit
def _embed_one(embedding: Any, width: Any, out: np.ndarray) -> Any:
    embed_row(embedding, 0, width, out, 0)
    return embedding.words[0].view(np.uint16), out.view(np.int32)


def test_a_caller_that_counts_references_does_not_make_a_steps_parts_count() -> None:
    """Machine code of a part is shared within a process: the first caller is not to decide."""
    embedding = pack_rows(stored("F32", np.ones((16, 32), np.float32)), "bfloat16")
    out = np.zeros(32, np.float32)
    _embed_one(embedding, np.int8(32), out)  # an int8, so that no step has compiled it before
    assert (out == 1).all()
    (code,) = _embed_one.inspect_llvm().values()
    counting = {
        re.search(r"@(\w+)", part)[1]  # type: ignore[index]
        for part in code.split("\ndefine ")[1:]
        if "call void @NRT_incref" in part.partition("\n}")[0]
    }
    assert not [name for name in counting if "_embed_pairs" in name]
    assert [name for name in counting if "_embed_one" in name], "the caller itself counts"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose sizes the compiled step supports."""
    made = tmp_path_factory.mktemp("vectors")
    save_model(made, "llama", **SIZES)
    save_tokenizer(made)
    return made


def runner_of(llm: LLM) -> Any:
    return llm.engine.runner


class Watched:
    """A model that records torch's number of threads whenever it is run."""

    def __init__(self, model: Any, seen: list[int]):
        self.model, self.seen, self.logits = model, seen, model.logits

    def __call__(self, *args: Any) -> torch.Tensor:
        self.seen.append(torch.get_num_threads())
        return self.model(*args)


SAMPLED = SamplingParams(seed=3, max_tokens=9, ignore_eos=True, logprobs=3)
BEGINNING = "one long beginning that many of the prompts share, "
PROMPTS = ["a", BEGINNING + "first", BEGINNING + "second", "x" * 70, BEGINNING, "zz", "b" * 33]


def answers(directory: Path, form: str, **options: Any) -> list[tuple[list[int], Any]]:
    llm = LLM.load(directory, weights=form, **options)
    assert isinstance(runner_of(llm), CompiledRunner)
    return [(each.token_ids, each.logprobs) for each in llm.generate(PROMPTS, SAMPLED)]


def plain_attention(pool: KVPool, batch: Batch, windows: Any) -> Any:
    """minigen's own attention; as a custom function it makes the layers run one by one."""
    return attend_paged(pool, batch, windows)


def first_logprobs(llm: LLM, prompt: list[int]) -> np.ndarray:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=SIZES["vocab_size"])
    found = llm.generate(prompt, params).logprobs[0]
    return np.array([found[token].logprob for token in range(SIZES["vocab_size"])])


@pytest.mark.parametrize(("form", "kv_dtype"), [("int4", "bfloat16"), ("bfloat16", "int8")])
def test_all_arrays_that_a_step_accesses_by_vectors_start_at_a_cache_line(
    directory: Path, form: str, kv_dtype: str
) -> None:
    runner = runner_of(LLM.load(directory, weights=form, kv_cache_dtype=kv_dtype))
    work, scratch = runner._work, runner._scratch
    of_step = {**work._asdict(), **work.inputs._asdict(), **work.ffn_inputs._asdict()}
    of_attention = {**scratch._asdict(), **runner.pool.cache._asdict(), "logits": runner._logits}
    arrays = {
        name: each
        for name, each in {**of_step, **of_attention}.items()
        if isinstance(each, np.ndarray)
    }
    names = {"x", "qkv", "attention_out", "words", "scores", "probs", "queries", "logits"}
    assert arrays.keys() > names
    assert {name for name, each in arrays.items() if each.ctypes.data % CACHE_LINE} == set()


@pytest.mark.parametrize(
    ("variant", "form"),
    [*((each, "int8") for each in VARIANTS), ("llama", "int4"), ("llama", "bfloat16")],
)
def test_the_compiled_step_and_the_layers_one_by_one_differ_by_rounding_only(
    variant: str, form: str, tmp_path: Path
) -> None:
    heads = {"num_key_value_heads": 4} if variant == "llama-mha" else {}
    save_model(tmp_path, variant, **SIZES, **heads)
    save_tokenizer(tmp_path)
    prompt = [3 + 7 * each % 290 for each in range(75)]
    compiled = LLM.load(tmp_path, weights=form, max_num_batched_tokens=32)
    assert isinstance(runner_of(compiled), CompiledRunner)
    layers = LLM.load(tmp_path, weights=form, attention_backend=plain_attention)
    assert isinstance(runner_of(layers), PagedRunner)
    expected = first_logprobs(layers, prompt)
    found = first_logprobs(compiled, prompt)
    assert np.corrcoef(found, expected)[0, 1] > 0.995
    assert np.abs(found - expected).mean() < 0.1 * expected.std()
    exact = first_logprobs(LLM.load(tmp_path, weights="float32"), prompt)
    assert np.corrcoef(exact, expected)[0, 1] > (0.7 if form == "int4" else 0.995)


@pytest.mark.parametrize("cache", ["bfloat16", "int8"])
@pytest.mark.parametrize(
    ("variant", "changes"), [("llama", {}), ("mistral-window", {"sliding_window": CHUNK + 300})]
)
def test_contexts_of_several_chunks_of_keys(
    variant: str, changes: dict[str, Any], cache: str, tmp_path: Path
) -> None:
    """Equal to the layers one by one, with the same bits however the prompt was chunked."""
    sizes = {**SIZES, "max_position_embeddings": 4 * CHUNK}
    save_model(tmp_path, variant, **sizes, **changes)
    save_tokenizer(tmp_path)
    prompt = [3 + 7 * each % 290 for each in range(3 * CHUNK + 5)]
    layers = LLM.load(tmp_path, weights="int8", attention_backend=plain_attention)
    expected = first_logprobs(layers, prompt)
    options = {"weights": "int8", "kv_cache_dtype": cache}
    found = [
        first_logprobs(LLM.load(tmp_path, **options, max_num_batched_tokens=budget), prompt)
        for budget in (4 * CHUNK, CHUNK - 3, 37)
    ]
    assert np.corrcoef(found[0], expected)[0, 1] > 0.995
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


WAYS: dict[str, dict[str, Any]] = {
    "one at a time": {"max_num_seqs": 1},
    "small chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "chunks of one token beside decodes": {"max_num_batched_tokens": 3, "max_num_seqs": 3},
    "no prefix cache": {"enable_prefix_caching": False},
    "blocks of 32": {"block_size": 32},
    "preempted": {"num_blocks": 9, "max_num_seqs": 7},
    "two threads": {"threads": 2},  # otherwise the tests have one
    "static batches": {"scheduler": "static", "max_num_seqs": 3},
}


@pytest.mark.parametrize("cache", ["bfloat16", "int8"])
@pytest.mark.parametrize("form", ["int4", "int8", "bfloat16"])
def test_no_bit_of_an_answer_depends_on_how_it_was_batched(
    form: str, cache: str, directory: Path
) -> None:
    """Not only the tokens: the logprobs of the likeliest three, too."""
    together = answers(directory, form, kv_cache_dtype=cache)
    for name, options in WAYS.items():
        assert answers(directory, form, kv_cache_dtype=cache, **options) == together, name


@pytest.mark.parametrize("form", ["int4", "int8", "bfloat16"])
@pytest.mark.parametrize("part", ["mlp.down_proj", "input_layernorm", "self_attn.q_proj"])
def test_damaged_weights_are_an_error_and_give_no_answer(
    form: str, part: str, tmp_path: Path
) -> None:
    save_model(tmp_path, "llama", **SIZES)
    save_tokenizer(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[f"model.layers.1.{part}.weight"].view(-1)[5] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    llm = LLM.load(tmp_path, weights=form)
    with pytest.raises(MinigenError, match="logits are not finite"):
        llm.generate("a", SAMPLED)


def test_torch_has_its_threads_back_after_a_compiled_step(directory: Path) -> None:
    """Each runner computes with its own number of threads, whichever ran before."""
    layers = LLM.load(directory, weights="float32", threads=2)
    compiled = LLM.load(directory, weights="int8", threads=2)
    seen = []
    model = runner_of(layers).model
    runner_of(layers).model = Watched(model, seen)
    for llm in (layers, compiled, layers):
        llm.generate("a", SAMPLED)
    assert set(seen) == {2}


def test_several_answers_to_a_prompt_fork_from_its_blocks(directory: Path) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=20, ignore_eos=True)
    llm = LLM.load(directory, weights="int8")
    together = [choice.token_ids for choice in llm.generate("a fork", params).choices]
    again = LLM.load(directory, weights="int8", max_num_seqs=1, enable_prefix_caching=False)
    assert [choice.token_ids for choice in again.generate("a fork", params).choices] == together
    assert len({tuple(each) for each in together}) == 3


@pytest.mark.parametrize("cache", ["bfloat16", "int8"])
def test_the_earlier_contents_of_a_block_do_no_harm(cache: str, directory: Path) -> None:
    """Not even NaN, although NaN times a probability of 0 is NaN."""
    clean = answers(directory, "int8", enable_prefix_caching=False, kv_cache_dtype=cache)
    llm = LLM.load(directory, weights="int8", enable_prefix_caching=False, kv_cache_dtype=cache)
    runner_of(llm).pool.blocks[:] = 0x7FC07FC0
    outputs = llm.generate(PROMPTS, SAMPLED)
    assert [(each.token_ids, each.logprobs) for each in outputs] == clean


def test_models_with_unsupported_biases_run_layer_by_layer(
    tmp_path: Path,
) -> None:
    save_model(tmp_path, "llama-biases", **SIZES)
    save_tokenizer(tmp_path)
    llm = LLM.load(tmp_path, weights="int8")
    assert isinstance(runner_of(llm), PagedRunner)
    assert "biases" in llm.describe()["runner"]
    assert llm.generate("a", SAMPLED).token_ids


@pytest.mark.parametrize(
    ("changes", "block_size", "reason"),
    [
        ({"hidden_size": 48}, 16, "hidden size of 48"),
        ({"head_dim": 20}, 16, "head size of 20"),
        ({"vocab_size": 300}, 16, "vocabulary of 300"),
        ({}, 8, "blocks of 8 tokens"),
    ],
)
def test_sizes_that_do_not_fill_a_vector_are_named(
    changes: dict[str, int], block_size: int, reason: str, tmp_path: Path
) -> None:
    save_model(tmp_path, "llama", **{**SIZES, **changes})
    assert reason in str(refusal(open_checkpoint(tmp_path).config, block_size))


def test_odd_widths_are_refused_in_bytes_with_an_alternative(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", **{**SIZES, "hidden_size": 48})
    save_tokenizer(tmp_path)
    with pytest.raises(OptionError, match=r"multiple of 32.*weights='bfloat16'"):
        LLM.load(tmp_path, weights="int4")


def test_without_numba_bytes_are_refused_and_auto_computes_in_torch(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "has_numba", lambda: False)
    with pytest.raises(OptionError, match=r"pip install 'minigen\[cpu\]'"):
        LLM.load(directory, weights="int8")
    llm = LLM.load(directory)
    assert isinstance(runner_of(llm), PagedRunner)
    assert "Numba is not installed" in llm.describe()["runner"]


def set_speeds(monkeypatch: pytest.MonkeyPatch, **speeds: float) -> None:
    monkeypatch.setattr("minigen.kernels.jit.code_cache.is_compiled", lambda *forms: True)
    monkeypatch.setattr("minigen.kernels.jit.code_cache.speeds", lambda form: speeds)


def test_auto_chooses_the_stored_format_where_it_is_the_fastest(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_speeds(monkeypatch, compiled=30e9, bfloat16=12e9, float32=9e9)
    assert LLM.load(directory).describe()["weights"].startswith("int8 (auto")


@pytest.mark.parametrize(("bfloat16", "form"), [(True, "bfloat16"), (False, "float32")])
def test_auto_chooses_torch_on_a_processor_with_slow_byte_products(
    bfloat16: bool, form: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor without AVX-512 may be an example."""
    set_speeds(monkeypatch, compiled=3e9, bfloat16=12e9, float32=9e9)
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: bfloat16)
    described = LLM.load(directory).describe()
    assert described["weights"].startswith(form)
    assert "multiply 3.0 billion " in described["runner"]
    assert f"torch {12 if bfloat16 else 9}.0 billion in {form}" in described["runner"]


def test_a_processor_without_fast_bfloat16_still_uses_the_stored_format(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_speeds(monkeypatch, compiled=10e9, bfloat16=12e9, float32=9e9)
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: False)
    assert isinstance(runner_of(LLM.load(directory)), CompiledRunner)


def test_speeds_are_measured_once_when_the_step_is_compiled() -> None:
    found = speeds("bfloat16")
    assert found.keys() == {"compiled", "bfloat16", "float32"}
    assert all(each > 1e8 for each in found.values())
    compile_step("bfloat16")
    assert speeds("bfloat16") == found


def test_torch_computes_until_the_kernels_are_compiled(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minigen.kernels.jit.code_cache.is_compiled", lambda *forms: False)
    llm = LLM.load(directory)
    assert isinstance(runner_of(llm), PagedRunner)
    assert "minigen compile" in llm.describe()["runner"]


@pytest.mark.model
def test_the_default_model_keeps_its_four_bits_and_eight_for_the_embedding(
    default_model_path: Path,
) -> None:
    llm = LLM.load(default_model_path, weights="int4")
    weights = runner_of(llm).weights
    assert [type(each).__name__ for each in (weights.qkv, weights.head)] == ["Codes4", "Codes8"]
    assert weights.head is weights.embedding
    answer = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=3))
    assert "Paris" in answer.text


_TWO_ENGINES = """
import sys, threading
from minigen import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
engines = [LLM.load(sys.argv[1], weights="int8", threads=2) for _ in range(2)]
found = {}
def run(number):
    found[number] = engines[number].generate(["abc"] * 4, params)
threads = [threading.Thread(target=run, args=[number]) for number in range(2)]
[each.start() for each in threads]
[each.join() for each in threads]
print([[output.token_ids for output in found[number]] for number in range(2)])
"""


def test_two_engines_in_two_threads_take_turns(directory: Path) -> None:
    """They share the process's thread pool; Numba's own, which is not reentrant, is unused."""
    command = [sys.executable, "-c", _TWO_ENGINES, str(directory)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    first, second = eval(done.stdout)
    assert first == second
