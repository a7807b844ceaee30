"""Quantized models on disk: the right bytes, whole or not at all, and readable by others."""

import errno
import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
from filelock import FileLock
from gguf.constants import GGMLQuantizationType

from minigen.checkpoint.checkpoint import Checkpoint, open_checkpoint
from minigen.checkpoint.safetensors import StoredTensor
from minigen.cli import quantize as command
from minigen.errors import (
    DiskError,
    FileFormatError,
    MinigenError,
    OptionError,
    UnsupportedError,
    WeightsError,
)
from minigen.export import gguf_blocks, partial
from minigen.export.conversion import Report, fallback_lines, quantize_model
from minigen.export.gguf_metadata import metadata_of_gguf, tokenizer_keys
from minigen.export.partial import partial_output
from minigen.export.plan import SCHEMES, QuantizeOptions, make_plan
from minigen.model.attention import attend_packed
from minigen.model.transformer import build_transformer, dense_linear
from minigen.quantization.grid import Grid, relative_error, round_to_nearest
from minigen.tokenizer.tokenizer import Tokenizer
from tests import tiny
from tests.quantized_files import SCHEMES as QUANTIZED
from tests.quantized_files import modules, save, tensors_of
from tests.test_12_tokenizer import HARD_TEXTS, WITNESSES, _llama, _save, _trained
from tests.test_cli import main
from tests.tiny_gguf import LAYERS, write_tiny

TEXT = (
    "The cat and the dog went in, and then another thing happened: 37 quick brown foxes jumped "
    "over (lazy) Dogs; 'Why?' asked Bob. Explain x = y + 12 * z! "
)
MESSAGES = [{"role": "user", "content": "the cat and the dog"}]
PROMPT = [1, 40, 71, 5, 260, 99, 12, 13]
LAYER_KINDS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4", "f16", "bf16")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny Llama in F32 as GGUF, and a text to calibrate on beside it."""
    path = tmp_path_factory.mktemp("source") / "tiny.gguf"
    write_tiny(path)
    path.with_name("text.txt").write_text(TEXT * 40, encoding="utf-8")
    return path


def options_of(scheme: str, source: Path, **more: Any) -> QuantizeOptions:
    """Return options with what the scheme needs."""
    if SCHEMES[scheme].calibration == "needed":
        more = {"calibration": source.with_name("text.txt"), "calibration_tokens": 256, **more}
    return QuantizeOptions(scheme, **more)


def made(source: Path, out: Path, scheme: str, **more: Any) -> Report:
    """Quantize the source into `out`."""
    return quantize_model(source, out, options_of(scheme, source, **more))


def logits_on_text(checkpoint: Checkpoint, changed: Any = None) -> Any:
    """Return the logits on the text that the methods are calibrated on."""
    return logits_of(checkpoint, changed, checkpoint.tokenizer().encode(TEXT))


def logits_of(
    checkpoint: Checkpoint,
    changed: dict[str, torch.Tensor] | None = None,
    prompt: Sequence[int] = PROMPT,
) -> Any:
    """Return the logits after a prompt, in float32, with the weights in `changed` by name."""
    tensors = {
        name: stored_as_float32(name, changed[name]) if changed and name in changed else tensor
        for name, tensor in checkpoint.tensors.items()
    }
    model = build_transformer(
        checkpoint.config,
        tensors,
        torch.float32,
        dense_linear(torch.float32),  # type: ignore[arg-type]
    )
    with torch.inference_mode():
        attend = attend_packed([len(prompt)], checkpoint.config.sliding_windows)
        x = model(torch.tensor(prompt), torch.arange(len(prompt)), attend)
        return model.logits(x)


def stored_as_float32(name: str, numbers: torch.Tensor) -> StoredTensor:
    """Return numbers in memory as a stored tensor."""
    rows = numbers.float().contiguous()
    data = (rows.unsqueeze(0) if rows.dim() == 1 else rows).view(torch.uint8)
    return StoredTensor(name, "F32", tuple(numbers.shape), data)


# ---- the bytes of a kind


@pytest.mark.parametrize("kind", gguf_blocks.KINDS)
def test_every_kind_is_read_alike_by_the_gguf_library(kind: str) -> None:
    weight = torch.randn(5, 256) * 0.05
    weight[1], weight[2], weight[3] = 0, weight[2].abs(), -weight[3].abs()
    data = gguf_blocks.quantize_rows(weight, kind)
    theirs = gguf.quants.dequantize(data.numpy(), GGMLQuantizationType[kind])
    assert torch.equal(gguf_blocks.dequantize_rows(data, kind), torch.from_numpy(theirs))
    assert (theirs[1] == 0).all()
    if kind in gguf_blocks.OF_LIBRARY:
        library = gguf.quants.quantize(weight.numpy(), GGMLQuantizationType[kind])
        assert np.array_equal(library.view(np.uint8).reshape(5, -1), data.numpy())


# The relative error of llama.cpp's own quantizer (`ggml_quantize_chunk` of llama-cpp-python 0.3.36)
# on `judged_matrix()`; `benchmarks/quantized_agreement.py` measures it again.
OF_LLAMA_CPP = {
    "Q2_K": 0.29507,
    "Q3_K": 0.17939,
    "Q4_K": 0.08880,
    "Q5_K": 0.04481,
    "Q6_K": 0.02655,
    "IQ4_NL": 0.10756,
}
SLACK = {"Q3_K": 1.02, "IQ4_NL": 1.005}  # where minigen's search is not quite as good


def judged_matrix() -> torch.Tensor:
    """Return 64 rows of 512 weights whose size differs by row, with a few large ones."""
    numbers = np.random.RandomState(35).standard_normal((64, 512)).astype(np.float32)
    sizes = np.linspace(0.01, 0.1, 64, dtype=np.float32)[:, None]
    larger = np.where(np.abs(numbers) > 3, np.float32(5), np.float32(1))
    return torch.from_numpy(numbers * sizes * larger)


@pytest.mark.parametrize("kind", OF_LLAMA_CPP)
def test_the_kinds_that_search_err_about_as_little_as_llama_cpp(kind: str) -> None:
    weight = judged_matrix()
    data = gguf_blocks.quantize_rows(weight, kind)
    error = relative_error(weight, gguf_blocks.dequantize_rows(data, kind))
    assert error <= OF_LLAMA_CPP[kind] * SLACK.get(kind, 1.0)


@pytest.mark.parametrize("kind", gguf_blocks.OWN)
def test_importance_moves_the_error_to_columns_that_matter_less(kind: str) -> None:
    weight = judged_matrix()
    importance = torch.where(torch.arange(512) % 4 == 0, 100.0, 1.0)

    def weighted(given: torch.Tensor | None) -> float:
        data = gguf_blocks.quantize_rows(weight, kind, given)
        change = gguf_blocks.dequantize_rows(data, kind) - weight
        return float((change.square() * importance).sum())

    assert weighted(importance) < 0.95 * weighted(None)


def test_rows_that_are_no_whole_blocks_fall_back_as_in_llama_cpp() -> None:
    fallbacks = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL"}
    for kind, fallback in fallbacks.items():
        assert gguf_blocks.fitting_kind(kind, 576) == fallback
        assert gguf_blocks.fitting_kind(kind, 1536) == kind
    assert gguf_blocks.fitting_kind("Q4_0", 80) == "F16"


@pytest.mark.parametrize(
    ("bits", "symmetric"), [(4, True), (4, False), (5, True), (5, False), (8, True)]
)
def test_blocks_of_a_grid_keep_its_codes(bits: int, symmetric: bool) -> None:
    weight = torch.randn(6, 96)
    matrix = round_to_nearest(weight, Grid(bits, 32, symmetric), scale_dtype=torch.float16)
    kind, data = gguf_blocks.blocks_of_matrix(matrix)
    assert kind == {4: "Q4_", 5: "Q5_", 8: "Q8_"}[bits] + ("0" if symmetric else "1")
    unpacked = gguf_blocks.dequantize_rows(data, kind)
    exact = {"rtol": 0.0, "atol": 0.0 if symmetric else 2**-9}  # the minimum is a float16
    torch.testing.assert_close(unpacked, matrix.dequantize(), **exact)


def test_a_grid_without_a_kind_and_weights_without_a_scale_are_refused() -> None:
    with pytest.raises(OptionError, match="no kind for 3 bits in groups of 64"):
        gguf_blocks.kind_of_grid(3, 64, True)
    for bad, kind, said in (
        (float("nan"), "Q4_0", "has the weight nan, which is not finite"),
        (float("-inf"), "F32", "has the weight -inf, which is not finite"),
        (1e6, "Q4_0", "holds finite numbers up to 65504"),
    ):
        weight = torch.zeros(2, 32)
        weight[1, 3] = bad
        with pytest.raises(WeightsError, match=said):
            gguf_blocks.quantize_rows(weight, kind)


# ---- GGUF files


@pytest.mark.parametrize("scheme", LAYER_KINDS)
def test_written_kinds_are_those_of_the_library_bit_for_bit(
    scheme: str, source: Path, tmp_path: Path
) -> None:
    made(source, tmp_path / "out.gguf", scheme)
    theirs = {each.name: each for each in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    original = {each.name: each for each in gguf.GGUFReader(source).tensors}
    assert set(theirs) == set(original)
    for name, each in theirs.items():
        numbers = original[name].data
        kind = GGMLQuantizationType.F32 if numbers.ndim == 1 else each.tensor_type
        assert each.tensor_type == kind
        assert np.array_equal(gguf.quants.quantize(numbers, kind), each.data), name
        if "blk" in name and numbers.ndim == 2:
            assert kind.name == scheme.upper()


@pytest.mark.parametrize("scheme", ["q4_0", "q4_k", "q6_k", "int4"])
def test_a_written_gguf_computes_what_its_weights_compute_in_memory(
    scheme: str, source: Path, tmp_path: Path
) -> None:
    made(source, tmp_path / "out.gguf", scheme)
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out.gguf")
    changed = {}
    plan = make_plan(before, options_of(scheme, source), to_gguf=True)
    for name, kind in plan.kinds.items():
        weight = before.tensors[name].dequantize()
        if name in plan.grids:
            grid = plan.grids[name]
            rounded = round_to_nearest(weight, grid, scale_dtype=torch.float16, whole_zeros=False)
            changed[name] = rounded.dequantize()
        elif weight.dim() == 2:
            changed[name] = gguf_blocks.dequantize_rows(
                gguf_blocks.quantize_rows(weight, kind), kind
            )
    assert torch.equal(logits_of(after), logits_of(before, changed))


def test_tokens_chat_template_and_all_other_keys_survive(source: Path, tmp_path: Path) -> None:
    made(source, tmp_path / "out.gguf", "q4_0")
    before, after = metadata_of_gguf(source), metadata_of_gguf(tmp_path / "out.gguf")
    assert after.pop("general.file_type").value == gguf.LlamaFileType.MOSTLY_Q4_0
    assert after.pop("general.quantization_version").value == 2
    assert after == before
    assert open_checkpoint(tmp_path / "out.gguf").config == open_checkpoint(source).config


def test_each_fallback_is_named_with_its_layers(source: Path, tmp_path: Path) -> None:
    report = made(source, tmp_path / "out.gguf", "q4_k")
    line = "self_attn.q_proj of layers 0-1: Q5_0, because rows of 64 are no whole blocks of 256 for"
    assert any(each.startswith(line) for each in report.lines())
    assert not any("down_proj" in each for each in report.lines())
    tensors = open_checkpoint(tmp_path / "out.gguf").tensors
    assert tensors["model.layers.0.mlp.down_proj.weight"].kind == "Q4_K"
    assert tensors["model.layers.1.mlp.up_proj.weight"].kind == "Q5_0"
    assert tensors["model.embed_tokens.weight"].kind == "Q8_0"


def test_layers_with_gaps_are_written_as_ranges(source: Path) -> None:
    plan = make_plan(open_checkpoint(source), QuantizeOptions("q4_k"), to_gguf=True)
    fallen = {
        f"model.layers.{layer}.mlp.up_proj.weight": ("Q4_K", "Q5_0", 64)
        for layer in (0, 1, 7, 8, 2, 5)
    }
    plan.fallbacks.clear()  # type: ignore[attr-defined]
    plan.fallbacks.update(fallen)  # type: ignore[attr-defined]
    (line,) = fallback_lines(plan)
    assert line.startswith("mlp.up_proj of layers 0-2, 5, 7-8: Q5_0")


# ---- directories


def by_hand(directory: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a directory of compressed-tensors, unpacked bit by bit in numpy."""
    stored = safetensors.torch.load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text("utf-8"))["quantization_config"]
    bits_of = {}
    for group in config["config_groups"].values():
        bits_of |= dict.fromkeys(group["targets"], group["weights"]["num_bits"])

    def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
        stream = np.unpackbits(words.numpy().view(np.uint8), axis=-1, bitorder="little")
        places = 1 << np.arange(bits)
        numbers = stream[:, : bits * count].reshape(len(words), count, bits) @ places
        return torch.from_numpy(numbers).float() - 2 ** (bits - 1)

    weights = {}
    for name, tensor in stored.items():
        module, _, suffix = name.rpartition(".")
        scales = stored.get(f"{module}.weight_scale")
        if suffix == "weight" and scales is None:
            weights[name] = tensor.float()
        elif suffix == "weight":
            weights[name] = tensor.float() * scales
        elif suffix == "weight_packed":
            bits = bits_of.get(module) or bits_of["Linear"]
            rows, columns = stored[f"{module}.weight_shape"].tolist()
            codes = unpack(tensor, bits, columns).unflatten(-1, (scales.shape[1], -1))
            zeros = stored.get(f"{module}.weight_zero_point")
            if zeros is not None:
                codes = codes - unpack(zeros.T.contiguous(), bits, rows).T.unsqueeze(-1)
            weights[f"{module}.weight"] = (codes * scales.float().unsqueeze(-1)).flatten(-2)
    return weights


@pytest.mark.parametrize(
    ("scheme", "more", "most"),
    [
        ("int4", {}, 0.16),
        ("int4", {"symmetric": False, "group_size": 32}, 0.1),
        ("int8", {}, 0.012),
        ("rtn", {"bits": 3, "group_size": 16}, 0.25),
        ("rtn", {"bits": 5, "symmetric": False}, 0.05),
        ("rtn", {"bits": 2, "group_size": 32, "symmetric": False}, 0.5),
        ("w8a8", {}, 0.012),
        ("fp8", {}, 0.03),
    ],
)
def test_a_directory_holds_the_weights_of_the_scheme(
    scheme: str, more: dict[str, Any], most: float, source: Path, tmp_path: Path
) -> None:
    made(source, tmp_path / "out", scheme, **more)
    before, weights = open_checkpoint(source), by_hand(tmp_path / "out")
    assert set(weights) == set(before.tensors)
    for name, weight in weights.items():
        original = before.tensors[name].dequantize()
        if ".layers." not in name or original.dim() == 1:
            assert torch.equal(weight, original), name
            continue
        error = relative_error(original, weight)
        assert 0 < error < most, (name, error)
        if scheme not in ("w8a8", "fp8"):
            grid = make_plan(before, QuantizeOptions(scheme, **more), False).grids[name]
            rounded = round_to_nearest(original, grid, scale_dtype=torch.float16)
            assert torch.equal(weight, rounded.dequantize()), name
    after = open_checkpoint(tmp_path / "out")
    for name, weight in weights.items():
        torch.testing.assert_close(after.tensors[name].dequantize(), weight, rtol=1e-6, atol=0)
    torch.testing.assert_close(logits_of(after), logits_of(before, weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("scheme", "more"),
    [
        ("int4", {"symmetric": False}),
        ("rtn", {"bits": 3, "group_size": 16, "symmetric": False}),
        ("int8", {}),
        ("w8a8", {}),
        ("fp8", {}),
    ],
)
def test_the_library_of_compressed_tensors_reads_the_same_weights(
    scheme: str, more: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    made(source, tmp_path / "out", scheme, **more)
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    theirs = QuantizationConfig(**config["quantization_config"])
    (group,) = theirs.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(theirs.format)
    stored = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    for name, weight in by_hand(tmp_path / "out").items():
        module = name.removesuffix(".weight")
        if f"{module}.weight_scale" in stored:
            parts = {
                key.removeprefix(f"{module}."): tensor
                for key, tensor in stored.items()
                if key.startswith(f"{module}.weight")
            }
            found = compressor.decompress(parts, group)["weight"]
            torch.testing.assert_close(found.float(), weight, rtol=2**-10, atol=0)


def test_the_configuration_names_format_bits_groups_and_activations(
    source: Path, tmp_path: Path
) -> None:
    def group(scheme: str, **more: Any) -> dict[str, Any]:
        out = tmp_path / scheme
        made(source, out, scheme, **more)
        config = json.loads((out / "config.json").read_text("utf-8"))["quantization_config"]
        assert config["quant_method"] == "compressed-tensors"
        assert config["ignore"] == ["lm_head"]
        (only,) = config["config_groups"].values()
        assert only["targets"] == ["Linear"]
        assert config["format"] == only["format"]
        return only

    int4, int8, w8a8, fp8 = group("int4", group_size=32), group("int8"), group("w8a8"), group("fp8")
    assert int4["format"] == int8["format"] == "pack-quantized"
    assert (int4["weights"]["strategy"], int4["weights"]["group_size"]) == ("group", 32)
    assert (int8["weights"]["strategy"], int8["weights"]["group_size"]) == ("channel", None)
    assert int4["input_activations"] is int8["input_activations"] is None
    assert (w8a8["format"], fp8["format"]) == ("int-quantized", "float-quantized")
    assert w8a8["input_activations"]["type"] == "int"
    assert fp8["weights"]["type"] == fp8["input_activations"]["type"] == "float"
    assert fp8["input_activations"]["strategy"] == "token"


def test_nf4_has_the_layout_of_bitsandbytes(source: Path, tmp_path: Path) -> None:
    made(source, tmp_path / "out", "nf4")
    stored = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    state = json.loads(stored[f"{name}.quant_state.bitsandbytes__nf4"].numpy().tobytes())
    assert state == {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [64, 256]}
    packed = stored[name].flatten()
    codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten().long()
    values = stored[f"{name}.quant_map"][codes].unflatten(0, (-1, 64))
    weight = (values * stored[f"{name}.absmax"].unsqueeze(-1)).view(64, 256)
    assert relative_error(open_checkpoint(source).tensors[name].dequantize(), weight) < 0.1
    assert torch.equal(open_checkpoint(tmp_path / "out").tensors[name].dequantize(), weight)


def test_the_tokenizer_and_template_of_a_gguf_open_in_transformers(
    source: Path, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoTokenizer

    made(source, tmp_path / "out", "int8")
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "out"), open_checkpoint(source)
    for text in ("the cat and 1234 an  another<|im_end|> é 日本", TEXT):
        assert theirs.encode(text) == ours.tokenizer().encode(text)
    template = ours.chat_template()
    assert template is not None
    assert theirs.apply_chat_template(MESSAGES, tokenize=False) == template.render(MESSAGES)
    assert (theirs.bos_token, theirs.eos_token) == ("<|im_start|>", "<|im_end|>")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.model_type, config.head_dim, config.tie_word_embeddings) == ("llama", 16, True)


# ---- from a directory to GGUF


def save_directory(folder: Path, variant: str) -> None:
    """Save a random model of a variant, in numbers that float16 holds, with a tokenizer."""
    from tests.tiny import make_model

    model = make_model(variant, vocab_size=300)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())
    model.save_pretrained(folder)
    save_merging_tokenizer(folder)


def save_merging_tokenizer(folder: Path) -> None:
    """Save a byte-level tokenizer with merges and the rules of GPT-2, as transformers does."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    from tests.tiny_gguf import MERGES, SPECIALS, TEMPLATE, vocabulary

    ids = {token: i for i, token in enumerate(vocabulary())}
    merges = [(left, right) for left, _, right in (each.partition(" ") for each in MERGES)]
    backend = tokenizers.Tokenizer(models.BPE(ids, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(each, special=True) for each in SPECIALS])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


@pytest.mark.parametrize(
    "variant",
    [
        *("llama", "llama-tied", "llama-biases", "llama-rope-llama3", "llama-rope-linear"),
        *("qwen2", "qwen3", "mistral-window"),
    ],
)
def test_a_directory_becomes_a_gguf_that_computes_the_same(variant: str, tmp_path: Path) -> None:
    save_directory(tmp_path, variant)
    made(tmp_path, tmp_path / "out.gguf", "f16")
    before, after = open_checkpoint(tmp_path), open_checkpoint(tmp_path / "out.gguf")
    torch.testing.assert_close(logits_of(after), logits_of(before), rtol=1e-5, atol=1e-5)
    text = "the cat and 1234 an  another<|im_end|> é"
    assert after.tokenizer().encode(text) == before.tokenizer().encode(text)
    templates = before.chat_template(), after.chat_template()
    assert len({each.source for each in templates if each is not None}) == 1
    assert None not in templates
    assert set(before.config.eos_token_ids) <= set(after.config.eos_token_ids)


@pytest.mark.parametrize("family", [*WITNESSES, "pieces"])
def test_each_family_of_tokenizers_is_found_by_how_it_cuts_texts(
    family: str, source: Path, tmp_path: Path
) -> None:
    is_pieces = family == "pieces"
    backend = _llama()._backend if is_pieces else _trained(family)
    tokens = {"bos_token": "<s>", "eos_token": "</s>"} if is_pieces else {}
    _save(backend, tmp_path, **tokens)
    num_ids = backend.get_vocab_size() + 3  # models pad their vocabularies
    config = replace(open_checkpoint(source).config, vocab_size=num_ids)
    keys = tokenizer_keys(tmp_path, config)
    read = Tokenizer.from_gguf({key: typed.value for key, typed in keys.items()})
    expected = Tokenizer.from_directory(tmp_path)
    for text in HARD_TEXTS:
        assert read.encode(text) == expected.encode(text)
    assert read.num_ids == num_ids


def test_windows_in_some_layers_only_have_no_key_in_gguf(tmp_path: Path) -> None:
    save_directory(tmp_path, "qwen2-window")
    with pytest.raises(MinigenError, match="sliding window in some layers only"):
        made(tmp_path, tmp_path / "out.gguf", "q8_0")


def test_a_directory_keeps_its_files_and_its_kind_of_numbers(tmp_path: Path) -> None:
    save_directory(tmp_path / "in", "llama")
    made(tmp_path / "in", tmp_path / "out", "int8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert config["dtype"] == "float32"
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


# ---- methods that calibrate


@pytest.mark.parametrize("scheme", ["awq", "w8a8"])
def test_folded_factors_leave_the_function_of_the_model(
    scheme: str, source: Path, tmp_path: Path
) -> None:
    """The written weights and norms compute what unfolded weights compute between old norms."""
    calibration = {"calibration": source.with_name("text.txt"), "calibration_tokens": 200}
    made(
        source, tmp_path / "out", scheme, **calibration, **({"bits": 8} if scheme == "awq" else {})
    )
    before, weights = open_checkpoint(source), by_hand(tmp_path / "out")
    norm = "model.layers.0.input_layernorm.weight"
    assert not torch.allclose(weights[norm], before.tensors[norm].dequantize())
    expected, found = logits_of(before), logits_of(before, weights)
    assert relative_error(expected, found) < 0.1


@pytest.mark.parametrize(("scheme", "out"), [("gptq", "out.gguf"), ("awq", "out.gguf")])
def test_calibrated_methods_write_gguf_in_groups_of_32(
    scheme: str, out: str, source: Path, tmp_path: Path
) -> None:
    made(source, tmp_path / out, scheme, group_size=32)
    after = open_checkpoint(tmp_path / out)
    kind = "Q4_0" if scheme == "gptq" else "Q4_1"
    assert after.tensors["model.layers.1.self_attn.k_proj.weight"].kind == kind
    expected = logits_on_text(open_checkpoint(source))
    assert relative_error(expected, logits_on_text(after)) < 0.35


def test_gptq_and_awq_change_the_outputs_less_than_rounding(source: Path, tmp_path: Path) -> None:
    before = open_checkpoint(source)
    expected, errors = logits_on_text(before), {}
    for scheme in ("rtn", "gptq", "awq"):
        more = {"symmetric": False, "bits": 3, "group_size": 32}
        made(source, tmp_path / scheme, scheme, **more)
        found = logits_on_text(before, by_hand(tmp_path / scheme))
        errors[scheme] = relative_error(expected, found)
    assert errors["awq"] < errors["rtn"]
    assert errors["gptq"] < errors["rtn"]


def test_mixed_bits_fill_the_target_and_fused_matrices_share_them(
    source: Path, tmp_path: Path
) -> None:
    made(source, tmp_path / "out", "mixed", target_bits=4.6, group_size=32)
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    groups = config["quantization_config"]["config_groups"].values()
    bits = {name: group["weights"]["num_bits"] for group in groups for name in group["targets"]}
    assert len(bits) == 7 * LAYERS
    assert len(set(bits.values())) > 1
    for layer in range(LAYERS):
        for fused in (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("mlp.gate_proj", "mlp.up_proj"),
        ):
            assert len({bits[f"model.layers.{layer}.{each}"] for each in fused}) == 1
    shapes = {name: open_checkpoint(source).tensors[f"{name}.weight"].shape for name in bits}
    weights = {name: rows * columns for name, (rows, columns) in shapes.items()}
    per_weight = sum(weights[name] * (bits[name] + 0.5) for name in bits) / sum(weights.values())
    assert 4.0 < per_weight <= 4.6
    by_hand(tmp_path / "out")


def test_mixed_bits_in_a_gguf_are_of_several_kinds(source: Path, tmp_path: Path) -> None:
    made(source, tmp_path / "out.gguf", "mixed", target_bits=5.3)
    tensors = open_checkpoint(tmp_path / "out.gguf").tensors
    linears = {name: each for name, each in tensors.items() if each.shape[1:] and "layers" in name}
    assert len({each.kind for each in linears.values()}) > 1
    numbers = sum(each.shape[0] * each.shape[1] for each in linears.values())
    assert 4.5 < 8 * sum(each.num_bytes for each in linears.values()) / numbers <= 5.3


# ---- whole or not at all


class Interruption(Exception):
    """Ends a run as Ctrl-C does, but only where the test says."""


def interrupted(after: int) -> Callable[[str, int, int | None], None]:
    """Return a progress that interrupts when that many calls have come."""
    calls = []

    def progress(label: str, num_bytes: int, num_total_bytes: int | None) -> None:
        calls.append(label)
        if len(calls) > after:
            raise Interruption

    return progress


@pytest.mark.parametrize(
    ("scheme", "out"),
    [("q4_k", "out.gguf"), ("int4", "out"), ("gptq", "out"), ("awq", "out"), ("mixed", "out")],
)
def test_an_interrupted_run_goes_on_and_writes_the_same_bytes(
    scheme: str, out: str, source: Path, tmp_path: Path
) -> None:
    options = options_of(scheme, source)
    made(source, tmp_path / f"whole{Path(out).suffix}", scheme)
    path = tmp_path / out
    for after in (1, 10):  # in the first layer, and in the second one, or between measurements
        if scheme == "mixed":
            after //= 5
        with pytest.raises(Interruption):
            quantize_model(source, path, options, interrupted(after))
        assert not path.exists()
        assert (tmp_path / f"{out}.partial" / "manifest.json").exists()
    report = quantize_model(source, path, options)
    assert report.num_found > 0 or scheme == "mixed"
    assert "by an earlier run" in report.lines()[-1] or scheme == "mixed"
    for whole in ("whole", "whole/model.safetensors", "whole/config.json", "whole.gguf"):
        if (tmp_path / whole).is_file():
            again = tmp_path / whole.replace("whole", "out")
            assert again.read_bytes() == (tmp_path / whole).read_bytes()
    assert not (tmp_path / f"{out}.partial").exists()


def test_a_beginning_of_something_else_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    with pytest.raises(Interruption):
        quantize_model(source, out, QuantizeOptions("q4_0"), interrupted(3))
    with pytest.raises(OptionError, match=r"other settings \(scheme 'q4_0', now 'q4_1'\)"):
        made(source, out, "q4_1")
    other = tmp_path / "tiny.gguf"
    write_tiny(other, seed=4)
    with pytest.raises(OptionError, match="holds the beginning of an output with another source"):
        made(other, out, "q4_0")
    made(source, out, "q4_0")


def test_an_output_that_exists_is_never_touched(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_text("mine", encoding="utf-8")
    with pytest.raises(OptionError, match=r"out\.gguf exists; name another output, or remove it"):
        made(source, out, "q4_0")
    assert out.read_text("utf-8") == "mine"
    assert not (tmp_path / "out.gguf.partial").exists()


def test_a_link_to_nothing_is_an_output_that_exists(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.symlink_to(tmp_path / "elsewhere.gguf")
    with pytest.raises(OptionError, match=r"out\.gguf exists"):
        made(source, out, "q4_0")
    assert out.is_symlink()


def test_a_folder_without_a_finished_matrix_is_no_obstacle(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    with pytest.raises(Interruption):
        quantize_model(source, out, QuantizeOptions("q4_0"), interrupted(0))
    assert (tmp_path / "out.gguf.partial").exists()
    made(source, out, "q4_1")


def test_a_changed_configuration_is_another_source(tmp_path: Path) -> None:
    save_directory(tmp_path / "in", "llama")
    with pytest.raises(Interruption):
        quantize_model(tmp_path / "in", tmp_path / "out", QuantizeOptions("int8"), interrupted(3))
    path = tmp_path / "in" / "config.json"
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**config, "rms_norm_eps": 1e-3}), encoding="utf-8")
    with pytest.raises(OptionError, match="the beginning of an output with another source"):
        made(tmp_path / "in", tmp_path / "out", "int8")


def test_another_model_with_equal_ends_and_size_is_another_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial, "_HASHED", 64)
    source, out = tmp_path / "tiny.gguf", tmp_path / "out.gguf"
    write_tiny(source)
    with pytest.raises(Interruption):
        quantize_model(source, out, QuantizeOptions("q4_0"), interrupted(3))
    reader = gguf.GGUFReader(source, "r+")
    next(each for each in reader.tensors if each.name == "blk.1.ffn_down.weight").data[:] = 1
    reader.data.flush()
    with pytest.raises(OptionError, match=r"another source \(tiny\.gguf was changed, replaced or"):
        made(source, out, "q4_0")


def test_an_output_finished_by_another_process_meanwhile_is_found_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(
        FileLock, "acquire", lambda lock, timeout: out.write_text("theirs", encoding="utf-8")
    )
    with (
        pytest.raises(OptionError, match="exists; name another output"),
        partial_output(out, {}, ()),
    ):
        pytest.fail("there is nothing to do")
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_two_processes_do_not_work_on_one_output(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out.gguf.partial"
    folder.mkdir()
    with FileLock(folder / ".lock"), pytest.raises(OptionError, match="Another process is working"):
        made(source, tmp_path / "out.gguf", "q4_0")


def test_a_full_disk_is_said_before_and_while_writing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.gguf"
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(DiskError, match=r"1 kB of free space, but about \d+ kB are needed"):
            made(source, out, "q4_0")
    assert list(tmp_path.iterdir()) == []
    written = []
    write = partial.write_safetensors

    def fills(path: Path, *arguments: Any) -> None:
        written.append(path)
        if len(written) > 4:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(partial, "write_safetensors", fills)
        with pytest.raises(DiskError, match="the disk is full; what was finished stays there"):
            made(source, out, "q4_0")
    assert not out.exists()
    assert made(source, out, "q4_0").num_found == 4


def test_a_disk_that_fills_up_while_the_output_is_written_is_called_full(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numpy's `tofile` raises an error without a number, tokenizers' `save` a bare Exception."""
    for out, name in (
        ("out.gguf", "gguf_writer.write_gguf"),
        ("out", "directory_writer._write_json"),
    ):

        def fills(*arguments: Any) -> None:
            with Path("/dev/full").open("wb") as full:
                np.zeros(10**6).tofile(full)

        with monkeypatch.context() as patch:
            patch.setattr(f"minigen.export.{name}", fills)
            with pytest.raises(DiskError, match="the disk is full; what was finished stays"):
                made(source, tmp_path / out, "int8")
        assert not (tmp_path / out).exists()
        report = made(source, tmp_path / out, "int8")
        assert report.num_found == report.num_made


def test_what_an_earlier_run_finished_needs_no_space_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "out.gguf", tmp_path / "whole.gguf"
    made(source, whole, "q8_0")
    usage, total = shutil.disk_usage(tmp_path), int(2.2 * whole.stat().st_size)

    def small_disk(path: Path) -> object:
        pieces = partial.folder_of(out).glob("*.safetensors")
        return usage._replace(free=total - sum(each.stat().st_size for each in pieces))

    monkeypatch.setattr(shutil, "disk_usage", small_disk)
    with pytest.raises(Interruption):
        quantize_model(source, out, QuantizeOptions("q8_0"), interrupted(10))
    assert made(source, out, "q8_0").num_found == 10


@pytest.mark.parametrize(("scheme", "times"), [("bf16", 1.0), ("nf4", 1.7), ("q8_0", 2.0)])
def test_space_is_needed_once_for_what_has_no_pieces(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, times: float
) -> None:
    end = "" if scheme == "nf4" else ".gguf"
    made(source, tmp_path / f"whole{end}", scheme)
    whole = tmp_path / f"whole{end}"
    files = [whole] if whole.is_file() else whole.glob("*.safetensors")
    usage, size = shutil.disk_usage(tmp_path), sum(each.stat().st_size for each in files)
    free = int(size * (times + 0.1))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    assert made(source, tmp_path / f"again{end}", scheme).num_bytes > 0


def test_a_gguf_that_could_not_name_all_end_tokens_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "source"
    tiny.save_model(directory, "llama", vocab_size=tiny.TINY_VOCAB)
    tiny.save_tokenizer(directory)
    config = json.dumps({"eos_token_id": [3, 4, 5, 6]})
    (directory / "generation_config.json").write_text(config, encoding="utf-8")
    with pytest.raises(UnsupportedError, match=r"not stop at \[\d+(, \d+)*\]; write a directory"):
        made(directory, tmp_path / "out.gguf", "f16")


def test_the_space_for_a_mixture_is_that_of_its_target(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    checkpoint, needed = open_checkpoint(source), []
    shapes = [each.shape for name, each in checkpoint.tensors.items() if ".layers." in name]
    weights = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    for target_bits in (5.0, 8.0):
        with pytest.raises(DiskError) as refused:
            made(source, tmp_path / "out", "mixed", target_bits=target_bits)
        needed.append(int(re.search(r"about (\d+) kB", str(refused.value))[1]) * 1000)
    assert needed[1] - needed[0] == pytest.approx(2 * weights * 3 / 8, abs=2000)


def test_a_folder_whose_name_is_too_long_is_said_in_a_sentence(
    source: Path, tmp_path: Path
) -> None:
    with pytest.raises(DiskError, match="File name too long"):
        made(source, tmp_path / ("a" * 256) / "out.gguf", "q4_0")


def test_a_damaged_piece_is_named(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    with pytest.raises(Interruption):
        quantize_model(source, out, QuantizeOptions("q4_0"), interrupted(5))
    (tmp_path / "out.gguf.partial" / "0002.safetensors").write_bytes(b"half")
    with pytest.raises(FileFormatError, match=r"0002\.safetensors is damaged .* delete it"):
        made(source, out, "q4_0")


def write_while_another_appears(out: Path) -> None:
    """Write an output, at whose name another file appears before the end."""
    with partial_output(out, {}, ()) as work, work.writing() as target:
        target.write_text("ours", encoding="utf-8")
        out.write_text("theirs", encoding="utf-8")


def test_a_target_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="has appeared meanwhile"):
        write_while_another_appears(tmp_path / "out")
    assert (tmp_path / "out").read_text("utf-8") == "theirs"


# ---- refusals


def test_a_quantized_source_needs_a_flag_and_the_message_says_why(
    source: Path, tmp_path: Path
) -> None:
    small = tmp_path / "small.gguf"
    made(source, small, "q4_1")
    with pytest.raises(OptionError, match=r"already \(14 in Q4_1\).*a second error.*allow_requan"):
        made(small, tmp_path / "out", "int4")
    assert list(tmp_path.iterdir()) == [small]
    made(small, tmp_path / "out", "int4", allow_requantize=True)
    again = made(small, tmp_path / "again.gguf", "q4_1")
    assert again.num_made == 0
    assert (tmp_path / "again.gguf").read_bytes() == small.read_bytes()


def test_groups_that_do_not_divide_the_rows_are_refused_with_those_that_do(source: Path) -> None:
    with pytest.raises(OptionError, match=r"Groups of 128 do not divide the rows of 64 weights; "):
        make_plan(open_checkpoint(source), QuantizeOptions("rtn", group_size=128), False)
    with pytest.raises(OptionError, match=r"group_size 64, 32, 16, -1 would fit"):
        make_plan(open_checkpoint(source), QuantizeOptions("rtn", group_size=48), False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scheme": "q3"}, "There is no scheme 'q3'; the schemes are q4_0, "),
        ({"scheme": "q4_0", "bits": 4}, "The scheme q4_0 takes no bits"),
        ({"scheme": "int8", "bits": 4}, "The scheme int8 takes no bits"),
        ({"scheme": "fp8", "group_size": 32}, "The scheme fp8 takes no group_size"),
        ({"scheme": "w8a8", "symmetric": False}, "The scheme w8a8 takes no symmetric"),
        ({"scheme": "q4_0", "calibration": Path("a")}, "The scheme q4_0 takes no calibration"),
        ({"scheme": "rtn", "target_bits": 4.0}, "The scheme rtn takes no target_bits"),
        ({"scheme": "mixed", "target_bits": 1.0}, "target_bits must be from 2 to 16, not 1.0"),
        ({"scheme": "gptq"}, "The scheme gptq needs calibration, a text file"),
        ({"scheme": "rtn", "calibration_tokens": 0}, "calibration_tokens must be at least 1"),
        ({"scheme": "q4_k", "calibration_tokens": 99}, "calibration_tokens needs calibration"),
    ],
)
def test_options_that_a_scheme_does_not_take_are_refused(given: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message.replace("(", r"\(")):
        QuantizeOptions(**given)


@pytest.mark.parametrize(
    ("scheme", "out", "more", "message"),
    [
        ("rtn", "out.gguf", {"bits": 0}, "2 to 8 bits per weight, not 0"),
        ("mixed", "out", {"target_bits": 2.0}, r"2 is too small: 2 bits .* take 2\.25 per weight"),
        ("mixed", "out.gguf", {"target_bits": 4.0}, r"4 is too small: 4 bits .* take 4\.5 per"),
        ("mixed", "o.gguf", {"target_bits": 4.9, "symmetric": False}, r"take 5 per weight"),
    ],
)
def test_impossible_bits_are_refused_before_any_work(
    scheme: str, out: str, more: Any, message: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=message):
        made(source, tmp_path / out, scheme, **more)
    assert list(tmp_path.iterdir()) == []


def test_mixed_bits_in_a_gguf_may_be_asymmetric(source: Path, tmp_path: Path) -> None:
    made(source, tmp_path / "out.gguf", "mixed", target_bits=5.5, symmetric=False)
    tensors = open_checkpoint(tmp_path / "out.gguf").tensors
    kinds = {each.kind for name, each in tensors.items() if ".layers." in name and each.shape[1:]}
    assert kinds == {"Q4_1", "Q5_1"}


def test_rows_that_are_no_blocks_of_nf4_are_refused_before_any_work(tmp_path: Path) -> None:
    tensors, _ = tensors_of(QUANTIZED["int rows"])
    plain = {name: each for name, each in tensors.items() if each.dtype == torch.bfloat16}
    weights = {f"{module}.weight": torch.ones(shape) for module, shape in modules().items()}
    path = save(tmp_path / "in", {**plain, **weights}, None)
    with pytest.raises(OptionError, match=r"blocks of 64 .*down_proj\.weight has rows of 96"):
        make_plan(open_checkpoint(path), QuantizeOptions("nf4"), False)


@pytest.mark.parametrize("scheme", ["q4_0", "q4_k", "f16", "rtn", "fp8", "w8a8", "gptq", "mixed"])
def test_a_weight_that_is_no_number_is_named(scheme: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny(path)
    path.with_name("text.txt").write_text(TEXT * 40, encoding="utf-8")
    reader = gguf.GGUFReader(path, "r+")
    damaged = next(each for each in reader.tensors if each.name == "blk.1.ffn_down.weight")
    damaged.data[3, 4] = np.nan
    reader.data.flush()
    out = "out.gguf" if SCHEMES[scheme].kind else "out"
    with pytest.raises(WeightsError, match=r"^model\.layers\.1\.mlp\.down_proj\.weight"):
        made(path, tmp_path / out, scheme)


@pytest.mark.parametrize("out", ["out", "out.gguf"])
def test_a_norm_that_is_no_number_is_named_before_any_work(out: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny(path)
    reader = gguf.GGUFReader(path, "r+")
    next(each for each in reader.tensors if each.name == "output_norm.weight").data[3] = np.nan
    reader.data.flush()
    with pytest.raises(WeightsError, match=r"^model\.norm\.weight has a number that is not finite"):
        made(path, tmp_path / out, "int4")
    assert not partial.folder_of(tmp_path / out).exists()


@pytest.mark.parametrize("scheme", ["int4", "int8", "gptq", "awq", "mixed"])
@pytest.mark.parametrize(
    ("weight", "reason"),
    [(1e7, "needs a larger scale than float16 holds"), (1e-9, "all weights would become 0")],
)
def test_weights_that_float16_scales_cannot_hold_are_named(
    weight: float, reason: str, scheme: str, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny(path)
    path.with_name("text.txt").write_text(TEXT * 40, encoding="utf-8")
    reader = gguf.GGUFReader(path, "r+")
    next(each for each in reader.tensors if each.name == "blk.1.ffn_down.weight").data[:] = weight
    reader.data.flush()
    with pytest.raises(WeightsError, match=rf"^model\.layers\.1\.mlp\.down_proj.* {reason}"):
        made(path, tmp_path / "out", scheme)


def test_a_group_of_almost_nothing_is_no_reason_to_refuse_a_matrix() -> None:
    weight = torch.ones(1, 64)
    weight[:, 32:] = 1e-9
    found = round_to_nearest(weight, Grid(4, 32, True), scale_dtype=torch.float16).dequantize()
    assert found[0, :32].allclose(torch.tensor(1.0), atol=0.1)
    assert not found[0, 32:].any()


def test_a_minimum_that_float16_cannot_hold_is_refused() -> None:
    weight = torch.tensor([[-1e6, 0.0] * 16])
    matrix = round_to_nearest(weight, Grid(4, 32, False))
    with pytest.raises(WeightsError, match="begins below -65504, which the float16 minimum"):
        gguf_blocks.blocks_of_matrix(matrix)


def test_schemes_and_outputs_must_fit(source: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"q4_0 is written to a \.gguf file"):
        made(source, tmp_path / "out", "q4_0")
    with pytest.raises(OptionError, match="fp8 is written to a directory"):
        made(source, tmp_path / "out.gguf", "fp8")
    with pytest.raises(OptionError, match="no kind for 4 bits in groups of 64"):
        made(source, tmp_path / "out.gguf", "int4", group_size=64)
    assert list(tmp_path.iterdir()) == []


def test_a_text_too_short_or_unreadable_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short", encoding="utf-8")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    for name, message in (
        ("short", "calibration needs at least"),
        ("bytes", "cannot be read"),
        ("absent", "cannot be read"),
    ):
        with pytest.raises(OptionError, match=message):
            made(source, tmp_path / "out", "gptq", calibration=tmp_path / f"{name}.txt")


# ---- the command


def test_the_command_prints_the_path_and_names_fallbacks(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out.gguf"
    done = main(monkeypatch, capsys, "quantize", str(source), str(out), "--scheme", "q4_k")
    assert done[:2] == (0, f"{out}\n")
    assert "mlp.up_proj of layers 0-1: Q5_0" in done[2]
    assert "matrices quantized" in done[2]
    again = main(monkeypatch, capsys, "quantize", str(source), str(out), "--scheme", "q4_k")
    assert again[0] == 1
    assert again[2] == f"minigen: {out} exists; name another output, or remove it.\n"


def test_ctrl_c_names_what_stays(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from minigen.export import conversion

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "plain_piece", stop)
    out = tmp_path / "out.gguf"
    code, stdout, stderr = main(
        monkeypatch, capsys, "quantize", str(source), str(out), "--scheme", "q4_0"
    )
    assert (code, stdout) == (130, "")
    assert f"The finished matrices are in {out}.partial; the same command goes on" in stderr


def test_the_help_names_every_scheme() -> None:
    assert tuple(SCHEMES) == command.SCHEMES
