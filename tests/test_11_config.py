"""A configuration is read completely, checked once, and refused with the name of what is wrong."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from minigen.checkpoint.config_json import FAMILIES, read_config, read_config_of, read_json
from minigen.checkpoint.model_config import ModelConfig, RopeScaling
from minigen.errors import ConfigError, FileFormatError, MinigenError, UnsupportedError

TRANSFORMERS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
}

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
}


def raw(family: str = "llama", **changes: Any) -> dict[str, Any]:
    return {"model_type": family, **SIZES, **changes}


def without(key: str, family: str = "llama") -> dict[str, Any]:
    return {each: value for each, value in raw(family).items() if each != key}


LLAMA = ModelConfig(
    family="llama",
    vocab_size=100,
    hidden=48,
    num_layers=3,
    q_heads=6,
    kv_heads=6,
    head_dim=8,
    ffn=80,
    max_positions=128,
    norm_eps=1e-6,
    rope_theta=10_000.0,
    rope_linear_factor=1.0,
    rope_scaling=None,
    tied_embeddings=False,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    sliding_windows=(None, None, None),
    bos_token_id=None,
    eos_token_ids=(),
)

OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 128},
    "mistral": {"sliding_windows": (4096, 4096, 4096)},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_keys_get_the_defaults_of_the_family(family: str) -> None:
    assert read_config(raw(family)) == ModelConfig(
        **{**vars(LLAMA), "family": family, **OF_FAMILY[family]}
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_defaults_are_those_of_transformers(family: str) -> None:
    # Except head counts: transformers uses those of one large model, not a rule.
    sizes = {**SIZES, "num_key_value_heads": 2}
    if family in ("llama", "mistral"):
        sizes["bos_token_id"], sizes["eos_token_id"] = 1, 2
    theirs = TRANSFORMERS[family](**sizes)
    explicit = json.loads(theirs.to_json_string(use_diff=False))
    assert read_config(explicit) == read_config(raw(family, **sizes))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("use_diff", [True, False])
def test_every_key_that_transformers_writes_is_known(family: str, use_diff: bool) -> None:
    text = TRANSFORMERS[family](num_hidden_layers=30).to_json_string(use_diff=use_diff)
    config = read_config(json.loads(text))
    assert config.family == family
    assert config.num_layers == 30


def test_every_key_is_honoured() -> None:
    config = read_config(
        raw(
            "llama",
            num_key_value_heads=3,
            head_dim=20,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            attention_bias=True,
            mlp_bias=True,
            bos_token_id=5,
            eos_token_id=[6, 7],
            rope_theta=500_000,
        )
    )
    assert config == ModelConfig(
        **{
            **vars(LLAMA),
            "kv_heads": 3,
            "head_dim": 20,
            "norm_eps": 1e-5,
            "tied_embeddings": True,
            "qkv_bias": True,
            "out_bias": True,
            "mlp_bias": True,
            "bos_token_id": 5,
            "eos_token_ids": (6, 7),
            "rope_theta": 500_000.0,
        }
    )


def test_null_is_the_same_as_nothing() -> None:
    keys = "num_key_value_heads head_dim rms_norm_eps rope_theta rope_scaling rope_parameters"
    nulls = dict.fromkeys(
        f"{keys} attention_bias eos_token_id hidden_act quantization_config".split()
    )
    assert read_config(raw(**nulls)) == LLAMA


# --- rotary embedding --------------------------------------------------------------------------

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500_000}},
        {
            "rope_theta": 5e5,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
        },
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    ],
    ids=["old", "middle", "new", "both", "mixed"],
)
def test_linear_scaling_is_read_in_every_spelling(settings: dict[str, Any]) -> None:
    config = read_config(raw(**settings))
    assert (config.rope_theta, config.rope_linear_factor) == (5e5, 4)
    assert config.rope_scaling is None


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_llama3_scaling_is_read_in_every_spelling(settings: dict[str, Any]) -> None:
    config = read_config(raw(**settings))
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 32)
    assert (config.rope_theta, config.rope_linear_factor) == (5e5, 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}},
        {"rope_parameters": {}, "rope_scaling": {}},
    ],
)
def test_no_scaling_is_read_in_every_spelling(settings: dict[str, Any]) -> None:
    assert read_config(raw(**settings)) == LLAMA


# --- sliding windows ---------------------------------------------------------------------------

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("family", "settings", "windows"),
    [
        ("mistral", {"sliding_window": 7}, (7, 7, 7)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("qwen2", {"sliding_window": 7}, (None, None, None)),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": True}, (None, None, None)),
        (
            "qwen2",
            {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
            (None, 7, 7),
        ),
        (
            "qwen3",
            {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0},
            (7, 7, 7),
        ),
        (
            "qwen3",
            {
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": [SLIDING, FULL, SLIDING],
            },
            (7, None, 7),
        ),
        ("qwen2", {"layer_types": [FULL] * 3}, (None, None, None)),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, (None, 4096, 4096)),
        (
            "qwen3",
            {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": None},
            (None, None, None),
        ),
    ],
)
def test_each_layer_gets_the_window_that_transformers_gives_it(
    family: str, settings: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert read_config(raw(family, **settings)).sliding_windows == windows
    theirs = TRANSFORMERS[family](**SIZES, **settings)
    if family == "mistral":
        expected: tuple[int | None, ...] = (theirs.sliding_window,) * 3
    else:
        expected = tuple(
            theirs.sliding_window if kind == SLIDING else None for kind in theirs.layer_types
        )
    assert windows == expected


# --- refusals ----------------------------------------------------------------------------------

COUNTS = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads".split()
COUNTS += ["max_position_embeddings", "num_key_value_heads", "head_dim"]
NO_COUNTS: list[Any] = [0, -1, 2**31, 10**400, True, False, 4.0, "4", [4], {}, math.nan, math.inf]


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize("value", NO_COUNTS, ids=lambda value: repr(value)[:20])
def test_a_count_must_be_a_positive_whole_number(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {key} must be a whole number from 1 to"):
        read_config(raw(**{key: value}))


@pytest.mark.parametrize("key", list(SIZES))
def test_a_size_that_is_missing_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {key} is missing"):
        read_config(without(key))


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize(
    "value", [0, 0.0, -1e-6, math.nan, math.inf, -math.inf, 10**400, True, False, "1e-6", [1], {}]
)
def test_a_number_must_be_positive_and_finite(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be a positive number"):
        read_config(raw(**{key: value}))


@pytest.mark.parametrize(
    "key", ["tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"]
)
@pytest.mark.parametrize("value", [0, 1, "true", [], [True], {}])
def test_a_flag_must_be_true_or_false(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be true or false"):
        read_config(raw("qwen2", **{key: value}))


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id"])
@pytest.mark.parametrize("value", [-1, 100, 2**70, True, 1.0, "2", {}, [[1]], [1, -1], [None]])
def test_a_token_must_be_one_of_the_vocabulary(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key} must name tokens below vocab_size 100, not"):
        read_config(raw(**{key: value}))


def huge() -> Any:
    """Return nested lists, 900 deep, of a million characters."""
    value: Any = "x" * 1_000_000
    for _ in range(900):
        value = [value]
    return value


REFUSED: dict[str, tuple[dict[str, Any], type[MinigenError], str]] = {
    "no family": (SIZES, ConfigError, "model_type is missing"),
    "another family": (raw("gpt_neox"), UnsupportedError, "architecture 'gpt_neox' is not one"),
    "family as list": (raw("llama", model_type=["llama"]), UnsupportedError, r"\['llama'\] is not"),
    "unknown keys": (
        raw(clip_qkv=8.0, alibi=True),
        UnsupportedError,
        "does not know 'alibi', 'clip_qkv', and will not guess",
    ),
    "a thousand unknown keys": (
        raw(**{f"key{n:03}": n for n in range(1000)}),
        UnsupportedError,
        r"'key007', \.\.\., and",
    ),
    "another activation": (raw(hidden_act="gelu"), UnsupportedError, "hidden_act is 'gelu'"),
    "partial rotation": (
        raw(partial_rotary_factor=0.5),
        UnsupportedError,
        "partial_rotary_factor is 0.5; minigen supports only 1",
    ),
    "interleaved": (raw(rope_interleaved=True), UnsupportedError, "rope_interleaved is True"),
    "encoder": (raw(is_encoder_decoder=True), UnsupportedError, "is_encoder_decoder is True"),
    "heads that do not divide": (
        raw(num_attention_heads=5),
        ConfigError,
        "hidden_size 48 is not a multiple of num_attention_heads 5, and there is no head_dim",
    ),
    "more heads than numbers": (
        raw(num_attention_heads=96),
        ConfigError,
        "hidden_size 48 is not a mu",
    ),
    "KV heads that do not divide": (
        raw(num_key_value_heads=4),
        ConfigError,
        "num_attention_heads 6 must be a multiple of num_key_value_heads 4",
    ),
    "more KV heads than heads": (raw(num_key_value_heads=12), ConfigError, "must be a multiple of"),
    "odd heads": (raw(head_dim=7), ConfigError, "head_dim 7 is odd"),
    "odd heads by division": (raw(num_attention_heads=16), ConfigError, "head_dim 3 is odd"),
    "a billion layers": (
        raw(num_hidden_layers=10**9),
        ConfigError,
        "num_hidden_layers must be a whole number from 1 to 10000, not 1000000000",
    ),
    "several beginnings": (raw(bos_token_id=[1, 2]), ConfigError, "bos_token_id must be one token"),
    "too few layer types": (raw(layer_types=[FULL]), ConfigError, "layer_types must list all 3"),
    "layer types as text": (raw(layer_types=FULL), ConfigError, "layer_types must list all 3"),
    "layer types as object": (raw(layer_types={FULL: 3}), ConfigError, "layer_types must list all"),
    "another layer type": (
        raw(layer_types=[FULL, "chunked_attention", FULL]),
        UnsupportedError,
        "layer_types has 'chunked_attention'",
    ),
    "layer types of lists": (
        raw(layer_types=[[], {}, None]),
        UnsupportedError,
        r"layer_types has \[\]; minigen knows",
    ),
    "window unused": (
        raw("qwen2", sliding_window=7, layer_types=[SLIDING] * 3),
        ConfigError,
        "layer_types has sliding_attention, but .* turns the window off",
    ),
    "window without width": (
        raw("mistral", sliding_window=None, layer_types=[SLIDING] * 3),
        ConfigError,
        "layer_types has sliding_attention, but .* turns the window off",
    ),
    "window of text": (raw("mistral", sliding_window="7"), ConfigError, "sliding_window must be a"),
    "window of nothing": (raw("mistral", sliding_window=0), ConfigError, "sliding_window must be"),
    "window of Llama": (
        raw(sliding_window=7),
        UnsupportedError,
        "sliding_window is 7, but the arc",
    ),
    "window layers as text": (
        raw("qwen2", use_sliding_window=True, sliding_window=7, max_window_layers="1"),
        ConfigError,
        "max_window_layers must be a whole number from 0 to 2147483647, not '1'",
    ),
    "window layers negative": (
        raw("qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=-1),
        ConfigError,
        "max_window_layers must be a whole number from 0 to 2147483647, not -1",
    ),
    "window layers true": (
        raw("mistral", sliding_window=7, max_window_layers=True),
        ConfigError,
        "max_window_layers must be a whole number from 0 to 2147483647, not True",
    ),
    "rope as list": (raw(rope_parameters=[]), ConfigError, "rope_parameters must be an object"),
    "rope as text": (raw(rope_scaling="linear"), ConfigError, "rope_scaling must be an object"),
    "rope as false": (raw(rope_scaling=False), ConfigError, "rope_scaling must be an object"),
    "rope type as list": (
        raw(rope_scaling={"type": ["linear"]}),
        UnsupportedError,
        r"rope type \['linear'\] is not supported",
    ),
    "rope said twice": (
        raw(
            rope_scaling={"type": "linear", "factor": 2.0},
            rope_parameters={"rope_type": "linear", "factor": 4.0},
        ),
        ConfigError,
        "rope_parameters and rope_scaling differ",
    ),
    "base said twice": (
        raw(rope_theta=1e4, rope_parameters={"rope_theta": 1e6}),
        ConfigError,
        r"rope_theta is 10000.0, but the rope settings have 1000000.0",
    ),
    "base said twice, not a number": (
        raw(rope_theta=math.nan, rope_parameters={"rope_theta": math.nan}),
        ConfigError,
        "rope_theta",
    ),
    "linear without factor": (raw(rope_scaling={"type": "linear"}), ConfigError, "factor is missi"),
    "linear with text": (
        raw(rope_scaling={"type": "linear", "factor": "4"}),
        ConfigError,
        "factor must be a positive number, not '4'",
    ),
    "linear with more": (
        raw(rope_scaling={"type": "linear", "factor": 4.0, "beta_fast": 3, "mscale": 1}),
        UnsupportedError,
        "rope type 'linear' does not use 'beta_fast', 'mscale'",
    ),
    "default with factor": (
        raw(rope_parameters={"rope_type": "default", "factor": 4.0}),
        UnsupportedError,
        "rope type 'default' does not use 'factor'",
    ),
    "half-turned in the rope": (
        raw(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        UnsupportedError,
        "does not use 'partial_rotary_factor'",
    ),
    "rope by layer type": (
        raw(rope_parameters={FULL: {"rope_theta": 1e6}, SLIDING: {"rope_theta": 1e4}}),
        UnsupportedError,
        "does not use 'full_attention', 'sliding_attention'",
    ),
    "llama3 the wrong way round": (
        raw(rope_scaling={"type": "llama3", **LLAMA3, "high_freq_factor": 0.5}),
        ConfigError,
        "high_freq_factor 0.5 must be above low_freq_factor 1.0",
    ),
    **{
        f"llama3 without {key}": (
            raw(rope_scaling={"type": "llama3", **{k: v for k, v in LLAMA3.items() if k != key}}),
            ConfigError,
            f"{key} is missing",
        )
        for key in LLAMA3
    },
    **{
        f"rope type {kind}": (
            raw(rope_scaling={"type": kind, "factor": 4.0}),
            UnsupportedError,
            f"rope type '{kind}' is not supported; default, linear and llama3 are",
        )
        for kind in ("yarn", "dynamic", "longrope", "su", "mrope", "proportional")
    },
    **{
        f"something huge as {key}": (raw(**{key: huge()}), MinigenError, key)
        for key in ("hidden_size", "rms_norm_eps", "mlp_bias", "hidden_act", "eos_token_id")
    },
    "something huge as rope": (raw(rope_scaling={"type": huge()}), UnsupportedError, "rope type"),
    "something huge as layer": (raw(layer_types=[huge()] * 3), UnsupportedError, "layer_types has"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_config_that_makes_no_sense_is_refused_by_the_key(what: str) -> None:
    config, kind, words = REFUSED[what]
    with pytest.raises(kind, match=words) as error:
        read_config(config, where="here/config.json")
    assert type(error.value) in (ConfigError, UnsupportedError)
    assert str(error.value).startswith("here/config.json: ")
    assert len(str(error.value)) < 300


# --- files -------------------------------------------------------------------------------------


def write(directory: Path, name: str, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, [2, 7], (2, 7)),
        ([2, 3], 7, (2, 3, 7)),
        (None, [7], (7,)),
        (2, None, (2,)),
        (None, None, ()),
    ],
)
def test_the_end_tokens_of_both_files_are_used(
    in_config: Any, in_generation: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    write(tmp_path, "config.json", raw(eos_token_id=in_config))
    write(tmp_path, "generation_config.json", {"eos_token_id": in_generation, "top_k": 3})
    assert read_config_of(tmp_path).eos_token_ids == expected


def test_generation_settings_are_not_needed(tmp_path: Path) -> None:
    write(tmp_path, "config.json", raw(eos_token_id=9))
    assert read_config_of(tmp_path).eos_token_ids == (9,)


@pytest.mark.parametrize("ends", [100, "2", [[7]], {"a": 1}, True])
def test_an_end_token_of_the_generation_settings_must_be_in_the_vocabulary(
    ends: Any, tmp_path: Path
) -> None:
    write(tmp_path, "config.json", raw(eos_token_id=2))
    write(tmp_path, "generation_config.json", {"eos_token_id": ends})
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id must name"):
        read_config_of(tmp_path)
    write(tmp_path, "config.json", raw(eos_token_id=100))
    with pytest.raises(ConfigError, match=r"/config\.json: eos_token_id must name"):
        read_config_of(tmp_path)


BAD_JSON = {
    "empty": ("", "cannot be read as JSON"),
    "cut short": ('{"model_type": "lla', "cannot be read as JSON"),
    "a list": ("[]", "holds a list, but must hold an object"),
    "a number": ("3", "holds a int, but must hold an object"),
    "null": ("null", "holds a NoneType"),
    "nested very deep": ("[" * 200_000, "cannot be read as JSON"),
    "a number of 100,000 digits": ('{"vocab_size": 1' + "0" * 100_000 + "}", "cannot be read as"),
}


@pytest.mark.parametrize("what", BAD_JSON)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_not_a_json_object_is_refused(what: str, name: str, tmp_path: Path) -> None:
    content, words = BAD_JSON[what]
    write(tmp_path, "config.json", raw())
    write(tmp_path, name, content)
    with pytest.raises(FileFormatError, match=f"{name} (cannot|holds)") as error:
        read_config_of(tmp_path)
    assert words in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1e-999"])
def test_nan_and_infinity_in_json_are_refused(number: str, tmp_path: Path) -> None:
    text = json.dumps(raw(rms_norm_eps="here")).replace('"here"', number)
    write(tmp_path, "config.json", text)
    with pytest.raises(ConfigError, match="rms_norm_eps must be a positive number, not"):
        read_config_of(tmp_path)


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(FileFormatError, match=r"config.json cannot be read as JSON"):
        read_config_of(tmp_path)


def test_a_config_that_is_missing_or_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"config.json is missing"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(FileFormatError, match=r"config.json cannot be read as JSON"):
        read_json(tmp_path / "config.json")
