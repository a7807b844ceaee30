"""Quantised checkpoints that are broken or contradict themselves are refused in one sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minigen.checkpoint.checkpoint import open_checkpoint
from minigen.errors import ConfigError, FileFormatError, UnsupportedError, WeightsError
from tests.quantized_files import SCHEMES, save, tensors_of
from tests.test_11_fuzz import read_all

QUERY = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, Tensor]
Change = Callable[[Tensors], Any]


def changed(part: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Return a change of one part of the first matrix."""

    def apply(tensors: Tensors) -> None:
        name = f"{QUERY}.{part}"
        tensors[name] = change(tensors[name]).contiguous()

    return apply


def without(part: str) -> Change:
    return lambda tensors: tensors.pop(f"{QUERY}.{part}")


def added(part: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({f"{QUERY}.{part}": tensor})


def filled(value: float) -> Callable[[Tensor], Tensor]:
    """Return a change of the first number."""

    def apply(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return apply


def state(**changes: Any) -> Change:
    """Return a change of bitsandbytes' JSON."""

    def change(tensor: Tensor) -> Tensor:
        found = {**json.loads(bytes(tensor.tolist())), **changes}
        return torch.tensor(list(json.dumps(found).encode()), dtype=torch.uint8)

    return changed("weight.quant_state.bitsandbytes__nf4", change)


# By name: the scheme to start from, a change of its tensors, the error, and words of its message.
BROKEN: dict[str, tuple[str, Change, type[Exception], str]] = {
    "no scales": ("gptq 4 v1", without("scales"), WeightsError, "q_proj has .*, but no scales"),
    "no zeros": ("awq", without("qzeros"), WeightsError, "but no qzeros"),
    "no g_idx": ("gptq 4 desc_act", without("g_idx"), WeightsError, "no g_idx, which desc_act"),
    "no codes": (
        "gptq 4 v1",
        without("qweight"),
        WeightsError,
        "q_proj has g_idx, qzeros, scales, but not the codes for them",
    ),
    "codes of another dtype": (
        "packed 4",
        changed("weight_packed", lambda t: t.to(torch.int64)),
        WeightsError,
        r"weight_packed is int64 of shape \(64, 8\), but should be int32 of shape \(64, 8\) for 4",
    ),
    "codes of a narrower matrix": (
        "awq",
        changed("qweight", lambda t: t[:-1]),
        WeightsError,
        r"qweight is int32 of shape \(63, 8\), but should be int32 of shape \(64, 8\)",
    ),
    "too few scales": (
        "gptq 4 v1",
        changed("scales", lambda t: t[:1]),
        WeightsError,
        r"scales is float16 of shape \(1, 64\), but should be .* of shape \(2, 64\)",
    ),
    "scales of whole numbers": (
        "packed 4",
        changed("weight_scale", lambda t: t.to(torch.int32)),
        WeightsError,
        "weight_scale is int32 .* should be float16 or bfloat16 or float32",
    ),
    "a scale that is no number": (
        "gptq 4 v1",
        changed("scales", filled(float("nan"))),
        FileFormatError,
        "q_proj has a scale that is infinite or not a number",
    ),
    "an infinite scale of FP8": (
        "fp8 blocks",
        changed("weight_scale_inv", filled(float("inf"))),
        FileFormatError,
        "a scale that is infinite or not a number",
    ),
    "a power of two that is no number": (
        "mxfp4",
        changed("weight_scales", filled(255)),
        FileFormatError,
        "a scale that is infinite or not a number",
    ),
    "a division by zero": (
        "nvfp4",
        changed("weight_global_scale", torch.zeros_like),
        FileFormatError,
        "a scale that is infinite or not a number",
    ),
    "a group past the last": (
        "gptq 4 desc_act",
        changed("g_idx", filled(2)),
        FileFormatError,
        "g_idx names the group 2 or 0, but the groups are 0 to 1",
    ),
    "a group before the first": (
        "gptq 4 desc_act",
        changed("g_idx", filled(-1)),
        FileFormatError,
        "g_idx names the group 1 or -1, but the groups are 0 to 1",
    ),
    "zero points of the other version": (
        "gptq 4 v1",
        changed("qzeros", lambda t: torch.full_like(t, -0x77777778)),
        FileFormatError,
        "zero points other than 8 although sym is true; checkpoint_format",
    ),
    "a zero point of more than 4 bits": (
        "int groups of 4 bits",
        changed("weight_zero_point", filled(8)),
        FileFormatError,
        "a zero point outside -8 to 7, the range of 4 bits",
    ),
    "a code of more than 4 bits": (
        "int groups of 4 bits",
        changed("weight", filled(-9)),
        FileFormatError,
        "a code outside -8 to 7, the range of 4 bits",
    ),
    "zero points that the settings deny": (
        "awq without zero points",
        added("qzeros", torch.zeros(4, 8, dtype=torch.int32)),
        WeightsError,
        "has qzeros although zero_point is false",
    ),
    "another shape": (
        "packed 4",
        changed("weight_shape", lambda t: t + 2**33),
        WeightsError,
        r"weight_shape is \[8589934656, 8589934656\], but the model needs \[64, 64\]",
    ),
    "another shape in JSON": (
        "nf4",
        state(shape=[2**40, 2**40]),
        WeightsError,
        r"has the shape \[1099511627776, 1099511627776\], but the model needs \[64, 64\]",
    ),
    "another block in JSON": (
        "nf4",
        state(blocksize=48),
        WeightsError,
        "rows of 64 numbers, which are not whole groups of 48",
    ),
    "a block of nothing in JSON": ("nf4", state(blocksize=0), ConfigError, "blocksize must be"),
    "another type in JSON": ("nf4", state(quant_type="fp4"), FileFormatError, "quant_type is nf4"),
    "an offset that is no number": (
        "nf4 double",
        state(nested_offset=float("nan")),
        FileFormatError,
        "nested_offset must be a number below 1e30, not nan",
    ),
    "an offset past all floats": (
        "nf4 double",
        state(nested_offset=10**400),
        FileFormatError,
        "nested_offset must be a number below 1e30, not 1000",
    ),
    "a code of FP8 that is no number": (
        "fp8 blocks",
        changed("weight", filled(float("nan"))),
        FileFormatError,
        "q_proj has a weight that is infinite or not a number",
    ),
    "a scale whose products overflow": (
        "gptq 4 v1",
        changed("scales", lambda t: torch.full(t.shape, 3e38)),
        FileFormatError,
        "q_proj has a weight that is infinite or not a number",
    ),
    "a name with a line break": (
        "gptq 4 v1",
        added("a\nb", torch.zeros(2, 2)),
        FileFormatError,
        r"a tensor whose name is not printable: '.*q_proj\.a\\nb'",
    ),
    "no JSON": (
        "nf4",
        changed("weight.quant_state.bitsandbytes__nf4", lambda t: t[:-1]),
        FileFormatError,
        "bitsandbytes__nf4 is not JSON",
    ),
    "other levels": (
        "nf4",
        changed("weight.quant_map", torch.zeros_like),
        FileFormatError,
        "does not hold the sixteen levels of NF4",
    ),
    "bitsandbytes' FP4 without a word": (
        "nf4",
        lambda tensors: tensors.update(
            {
                f"{QUERY}.weight.quant_state.bitsandbytes__fp4": tensors.pop(
                    f"{QUERY}.weight.quant_state.bitsandbytes__nf4"
                )
            }
        ),
        UnsupportedError,
        "is stored as bitsandbytes__fp4; minigen reads NF4",
    ),
    "an order that the format lacks": (
        "int rows",
        added("weight_g_idx", torch.zeros(64, dtype=torch.int32)),
        WeightsError,
        "q_proj has weight_g_idx, which int-quantized lacks",
    ),
    "complex zero points": (
        "float8 rows",
        added("weight_zero_point", torch.ones(64, 1, dtype=torch.complex64)),
        UnsupportedError,
        "has floats with zero points, which minigen does not read",
    ),
    "zero points of floats": (
        "float8 rows",
        added("weight_zero_point", torch.ones(64, 1)),
        UnsupportedError,
        "has floats with zero points, which minigen does not read",
    ),
    "both forms": (
        "gptq 4 v1",
        added("weight", torch.zeros(64, 64)),
        WeightsError,
        "stored twice, quantised and as a plain weight",
    ),
    "a matrix that the model lacks": (
        "gptq 4 v1",
        lambda tensors: tensors.update({"model.layers.7.mlp.up_proj.scales": torch.zeros(1, 2)}),
        WeightsError,
        "1 unexpected: model.layers.7.mlp.up_proj.scales",
    ),
    "codes without a scheme": (
        "mxfp4",
        lambda tensors: tensors.update({"x": torch.zeros(2, 2, dtype=torch.int8)}),
        UnsupportedError,
        "x is stored as I8; minigen reads F32, F16 and BF16",
    ),
    "a bias that the model lacks": (
        "gptq 4 v1",
        added("bias", torch.ones(64)),
        WeightsError,
        "1 unexpected: .*q_proj.bias",
    ),
}

# By name: the scheme to start from, changed settings, the error, and words of its message.
CONTRADICTED: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "another method": ("awq", {"quant_method": "hqq"}, UnsupportedError, "is 'hqq'; minigen reads"),
    "a method that is a list": ("awq", {"quant_method": []}, UnsupportedError, r"is \[\]"),
    "a wrong method": ("awq", {"quant_method": "fp8"}, UnsupportedError, "does not know 'bits'"),
    "an unknown setting": ("awq", {"rotate": True}, UnsupportedError, "not know 'rotate', and"),
    "another version": (
        "awq",
        {"version": "gemv"},
        UnsupportedError,
        "version is 'gemv'; .*'gemm'",
    ),
    "other bits of AWQ": ("awq", {"bits": 3}, UnsupportedError, "bits is 3; minigen supports 4"),
    "other bits than the tensors": (
        "gptq 4 v1",
        {"bits": 8},
        WeightsError,
        r"qweight is int32 of shape \(12, 64\), but should be int32 of shape \(24, 64\) for 8",
    ),
    "bits that are text": ("gptq 4 v1", {"bits": "4"}, UnsupportedError, "bits is '4'"),
    "another group": (
        "gptq 4 v1",
        {"group_size": 64},
        WeightsError,
        r"qzeros is int32 of shape \(3, 8\), but should be int32 of shape \(2, 8\)",
    ),
    "a group of nothing": ("gptq 4 v1", {"group_size": 0}, ConfigError, "group_size must be"),
    "a group wider than a row": (
        "gptq 4 v1",
        {"group_size": 128},
        WeightsError,
        "rows of 96 numbers, which are fewer than the group_size 128",
    ),
    "a group past 32 bits": ("awq", {"group_size": 2**40}, ConfigError, "group_size must be"),
    "the other version": (
        "gptq 4 v2",
        {"checkpoint_format": "gptq"},
        FileFormatError,
        "zero points other than 8 although sym is true",
    ),
    "an unknown version": (
        "gptq 4 v1",
        {"checkpoint_format": "marlin"},
        UnsupportedError,
        "checkpoint_format is 'marlin'; minigen supports 'gptq', 'gptq_v2'",
    ),
    "two versions": ("gptq 4 v1", {"format": "gptq_v2"}, ConfigError, "and format differ"),
    "settings by module": (
        "gptq 4 v1",
        {"dynamic": {"-:x": {}}},
        UnsupportedError,
        "dynamic gives",
    ),
    "other blocks": (
        "fp8 blocks",
        {"weight_block_size": [32, 32]},
        WeightsError,
        r"weight_scale_inv is .* shape \(4, 6\), but should be .* shape \(2, 3\)",
    ),
    "blocks of nothing": (
        "fp8 blocks",
        {"weight_block_size": [0, 128]},
        ConfigError,
        "weight_block_size must be two positive whole numbers",
    ),
    "no blocks": (
        "fp8 blocks",
        {"weight_block_size": None},
        WeightsError,
        "for one scale per matrix",
    ),
    "LLM.int8": ("nf4", {"load_in_8bit": True}, UnsupportedError, "load_in_8bit is True"),
    "bitsandbytes' FP4": (
        "nf4",
        {"bnb_4bit_quant_type": "fp4"},
        UnsupportedError,
        "bnb_4bit_quant_type is 'fp4'; minigen supports 'nf4'",
    ),
    "all ignored": (
        "packed 4",
        {"ignore": ["re:.*"]},
        WeightsError,
        "is stored quantised, but quantization_config ignores it",
    ),
    "a format that is not known": (
        "packed 4",
        {"format": "marlin-24"},
        UnsupportedError,
        "format is 'marlin-24'; minigen reads pack-quantized",
    ),
    "a wrong format": (
        "packed 4",
        {"format": "nvfp4-pack-quantized"},
        WeightsError,
        "has weight_shape, which nvfp4-pack-quantized lacks",
    ),
    "rotated activations": (
        "packed 4",
        {"transform_config": {"config_groups": {"u": {}}}},
        UnsupportedError,
        "transform_config rotates activations",
    ),
    "sparse weights": (
        "packed 4",
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        UnsupportedError,
        "does not read a sparsity_config",
    ),
    "a pattern that takes for ever": (
        "packed 4",
        {"ignore": ["re:(a+)+$"]},
        UnsupportedError,
        r"pattern 're:\(a\+\)\+\$', which is not valid or could take too long",
    ),
    "many optional characters": (
        "packed 4",
        {"ignore": ["re:" + ".?" * 40 + "x"]},
        UnsupportedError,
        "not valid or could take too long",
    ),
    "many alternatives": (
        "packed 4",
        {"ignore": ["re:" + "(.|..)" * 20 + "x"]},
        UnsupportedError,
        "not valid or could take too long",
    ),
    "very many patterns": (
        "packed 4",
        {"ignore": [f"re:x{each}" for each in range(201)]},
        UnsupportedError,
        "ignore has 201 patterns; minigen reads at most 200",
    ),
    "a group's name of two lines": (
        "packed 4",
        {"config_groups": {"a\nb": []}},
        UnsupportedError,
        r"config_groups\.'a\\nb' must be an object",
    ),
    "a setting with a very long name": (
        "awq",
        {"x" * 5000: 1},
        UnsupportedError,
        r"does not know 'x+\.\.\.x+'",
    ),
    "a pattern that is none": ("packed 4", {"ignore": ["re:("]}, UnsupportedError, "not valid or"),
    "no groups": ("packed 4", {"config_groups": {}}, ConfigError, "at least one group"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tensors_are_refused(name: str, tmp_path: Path) -> None:
    scheme_name, change, error, words = BROKEN[name]
    scheme = SCHEMES[scheme_name]
    tensors, _ = tensors_of(scheme)
    change(tensors)
    path = save(tmp_path / "model", tensors, scheme.settings)
    with pytest.raises(error, match=words) as caught:
        read_all(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("name", CONTRADICTED)
def test_settings_that_contradict_the_tensors_are_refused(name: str, tmp_path: Path) -> None:
    scheme_name, changes, error, words = CONTRADICTED[name]
    scheme = SCHEMES[scheme_name]
    tensors, _ = tensors_of(scheme)
    path = save(tmp_path / "model", tensors, {**scheme.settings, **changes})
    with pytest.raises(error, match=words) as caught:
        read_all(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("settings", [[], "gptq", {}, {"bits": 4}, 3])
def test_settings_without_a_method_are_refused(settings: Any, tmp_path: Path) -> None:
    tensors, _ = tensors_of(SCHEMES["awq"])
    path = save(tmp_path / "model", tensors, settings)
    with pytest.raises(ConfigError, match="must be an object that names its quant_method, not"):
        read_all(path)


def test_settings_without_a_quantised_tensor_are_refused(tmp_path: Path) -> None:
    tensors, numbers = tensors_of(SCHEMES["awq"])
    plain = {
        n: t for n, t in tensors.items() if n.endswith(("norm.weight", "s.weight", "d.weight"))
    }
    plain |= {name: torch.from_numpy(each) for name, each in numbers.items()}
    path = save(tmp_path / "model", plain, SCHEMES["awq"].settings)
    with pytest.raises(ConfigError, match="says 'awq', but no tensor is stored that way"):
        read_all(path)


def test_quantised_tensors_without_settings_are_refused(tmp_path: Path) -> None:
    tensors, _ = tensors_of(SCHEMES["awq"])
    path = save(tmp_path / "model", tensors, None)
    with pytest.raises(UnsupportedError, match="is stored as I32; minigen reads F32, F16 and BF16"):
        read_all(path)


@pytest.mark.parametrize("name", ["gptq 4 desc_act", "nvfp4", "nf4 double"])
def test_a_file_that_is_cut_short_anywhere_is_refused(name: str, tmp_path: Path) -> None:
    tensors, _ = tensors_of(SCHEMES[name])
    path = save(tmp_path / "model", tensors, SCHEMES[name].settings)
    raw = (path / "model.safetensors").read_bytes()
    for kept in [*range(0, len(raw), len(raw) // 20), len(raw) - 1]:
        (path / "model.safetensors").write_bytes(raw[:kept])
        with pytest.raises(FileFormatError, match="is not a valid safetensors file"):
            open_checkpoint(path)
