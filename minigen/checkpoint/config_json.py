"""Read a model's configuration from the keys of `config.json`, and check it once.

A GGUF's metadata is first translated to the same keys (`minigen.checkpoint.gguf_mapping`), so
every configuration passes through this module. An error names each value of a wrong type. A key
that could change what the model computes is either supported or refused by name. Keys that have no
meaning for inference are listed here and ignored.
"""

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from minigen.checkpoint.model_config import ModelConfig, RopeScaling
from minigen.errors import ConfigError, FileFormatError, UnsupportedError


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises `FileFormatError` if the file holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileFormatError(f"{path} is missing; a model's directory must hold one.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(value, dict):
        raise FileFormatError(f"{path} holds a {type(value).__name__}, but must hold an object.")
    return value


def as_list(value: Any) -> list[Any]:
    """Return a token id, a list of token ids, or None as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


@dataclass(frozen=True)
class Values:
    """The keys of one JSON object; every method raises `ConfigError` with the key and `where`.

    `where` names the file. `defaults` are the values of absent keys.
    """

    raw: Mapping[str, Any]
    where: str
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the unchecked value; `default` for null and for an absent key."""
        value = self.raw[key] if key in self.raw else self.defaults.get(key)
        return default if value is None else value

    def count(
        self,
        key: str,
        default: int | None = None,
        source: Mapping[str, Any] | None = None,
        least: int = 1,
        most: int = 2**31 - 1,
    ) -> int:
        """Return a whole number from `least` to `most`."""
        value = self.get(key, default) if source is None else source.get(key, default)
        if value is None:
            raise ConfigError(f"{self.where}: {key} is missing.")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(
                f"{self.where}: {key} must be a whole number from {least} to {most}, "
                f"not {reprlib.repr(value)}."
            )
        return value

    def number(
        self, key: str, default: float | None, source: Mapping[str, Any] | None = None
    ) -> float:
        """Return a positive number."""
        value = self.get(key, default) if source is None else source.get(key, default)
        if value is None:
            raise ConfigError(f"{self.where}: {key} is missing.")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise ConfigError(
                f"{self.where}: {key} must be a positive number, not {reprlib.repr(value)}."
            )
        return float(value)

    def flag(self, key: str) -> bool:
        """Return true or false; false for an absent key without a default."""
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise ConfigError(
                f"{self.where}: {key} must be true or false, not {reprlib.repr(value)}."
            )
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Return zero, one or several token ids, all below `vocab_size`."""
        ids = as_list(self.get(key))
        for token_id in ids:
            whole = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not whole or not 0 <= token_id < vocab_size:
                raise ConfigError(
                    f"{self.where}: {key} must name tokens below vocab_size {vocab_size}, "
                    f"not {reprlib.repr(token_id)}."
                )
        return tuple(ids)


@dataclass(frozen=True)
class Family:
    """What distinguishes an architecture from Llama's, and is not in its configuration.

    `defaults` are the values of keys that a configuration may omit (transformers' defaults).
    `windows` says when `sliding_window` holds: "never", "always", or, as in Qwen's models, only
    where `use_sliding_window` is true.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    windows: Literal["never", "always", "by flag"] = "never"
    qkv_bias: bool = False
    qk_norm: bool = False


_QWEN = {"sliding_window": 4096, "max_window_layers": 28}
FAMILIES = {
    "llama": Family(),
    "qwen2": Family(_QWEN, "by flag", qkv_bias=True),
    "qwen3": Family({**_QWEN, "head_dim": 128}, "by flag", qk_norm=True),
    "mistral": Family({"sliding_window": 4096}, "always"),
}

_READ_KEYS = frozenset(
    "model_type vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim intermediate_size max_position_embeddings rms_norm_eps rope_theta rope_scaling "
    "rope_parameters tie_word_embeddings attention_bias mlp_bias sliding_window layer_types "
    "use_sliding_window max_window_layers hidden_act bos_token_id eos_token_id "
    "partial_rotary_factor quantization_config is_encoder_decoder rope_interleaved".split()
)

_MEANINGLESS_KEYS = frozenset(
    "_name_or_path architectures auto_map attention_dropout chunk_size_feed_forward dtype "
    "torch_dtype id2label label2id initializer_range output_attentions output_hidden_states "
    "pad_token_id pretraining_tp problem_type return_dict transformers_version use_cache "
    "is_llama_config resid_pdrop embd_pdrop hidden_dropout classifier_dropout "
    "transformers.js_config unsloth_fixed unsloth_version use_mrope _attn_implementation "
    "_attn_implementation_autoset model_max_length tokenizer_class torchscript name_or_path "
    "ignore_index keys_to_ignore_at_inference finetuning_task task_specific_params "
    "gradient_checkpointing unk_token_id sep_token_id".split()
)

_ROPE_KEYS = {
    "default": "",
    "linear": "factor",
    "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
}

_MAX_LISTED = 8  # keys in one error message
_MAX_LAYERS = 10_000  # a corrupt file may claim billions; real models have about a hundred


def read_config(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Read a configuration from the keys of transformers' `config.json`.

    `quantization_config` does not change the architecture; `minigen.checkpoint.quantized` reads it.
    Raises `ConfigError` for missing keys and contradictions, and `UnsupportedError` for values that
    minigen does not support. Both name the key, its file (`where`), and what would be right.
    """
    return _Reader(raw, where).config()


def read_config_of(directory: Path) -> ModelConfig:
    """Read `config.json`, and add the stop tokens of `generation_config.json`."""
    path = directory / "config.json"
    config = read_config(read_json(path), where=str(path))
    path = directory / "generation_config.json"
    if not path.exists():
        return config
    more = Values(read_json(path), str(path)).token_ids("eos_token_id", config.vocab_size)
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))


@dataclass(frozen=True)
class _Reader:
    """Reads the keys of one configuration; its errors name the file and the key."""

    raw: Mapping[str, Any]
    where: str

    @property
    def values(self) -> Values:
        """The keys' values, with the family's defaults for absent keys."""
        return Values(self.raw, self.where, self.family.defaults)

    @property
    def family(self) -> Family:
        """The entry of this configuration's architecture."""
        return FAMILIES[self.raw["model_type"]]

    def config(self) -> ModelConfig:
        name = self._family_name()
        self._refuse_unknown()
        self._refuse_unsupported()
        hidden = self.values.count("hidden_size")
        q_heads = self.values.count("num_attention_heads")
        kv_heads = self.values.count("num_key_value_heads", default=q_heads)
        num_layers = self.values.count("num_hidden_layers", most=_MAX_LAYERS)
        vocab_size = self.values.count("vocab_size")
        rope = self._rope()
        attention_bias = self.values.flag("attention_bias")
        config = ModelConfig(
            family=name,
            vocab_size=vocab_size,
            hidden=hidden,
            num_layers=num_layers,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=self._head_dim(hidden, q_heads),
            ffn=self.values.count("intermediate_size"),
            max_positions=self.values.count("max_position_embeddings"),
            norm_eps=self.values.number("rms_norm_eps", 1e-6),
            rope_theta=self.values.number("rope_theta", 10_000.0, rope),
            rope_linear_factor=self._linear_factor(rope),
            rope_scaling=self._rope_scaling(rope),
            tied_embeddings=self.values.flag("tie_word_embeddings"),
            qkv_bias=attention_bias or self.family.qkv_bias,
            out_bias=attention_bias,
            mlp_bias=self.values.flag("mlp_bias"),
            qk_norm=self.family.qk_norm,
            sliding_windows=self._sliding_windows(num_layers),
            bos_token_id=self._bos_id(vocab_size),
            eos_token_ids=self.values.token_ids("eos_token_id", vocab_size),
        )
        if q_heads % kv_heads:
            raise ConfigError(
                f"{self.where}: num_attention_heads {q_heads} must be a multiple of "
                f"num_key_value_heads {kv_heads}, so that each KV head serves a whole group."
            )
        return config

    def _family_name(self) -> str:
        name = self.raw.get("model_type")
        if name is None:
            raise ConfigError(f"{self.where}: model_type is missing; it names the architecture.")
        if name not in tuple(FAMILIES):  # a tuple, because a wrong value may be unhashable
            raise UnsupportedError(
                f"{self.where}: the architecture {reprlib.repr(name)} is not one that minigen "
                f"runs ({', '.join(FAMILIES)})."
            )
        return str(name)

    def _refuse_unknown(self) -> None:
        unknown = sorted(set(self.raw) - _READ_KEYS - _MEANINGLESS_KEYS)
        if unknown:
            named = ", ".join(map(repr, unknown[:_MAX_LISTED]))
            more = ", ..." if len(unknown) > _MAX_LISTED else ""
            raise UnsupportedError(
                f"{self.where}: minigen does not know {named}{more}, and will not guess whether "
                "inference depends on it; if it does not, remove it."
            )

    def _refuse_unsupported(self) -> None:
        wanted: dict[str, tuple[Any, ...]] = {
            "hidden_act": ("silu",),
            "partial_rotary_factor": (1, 1.0),
            "is_encoder_decoder": (False,),
            "rope_interleaved": (False,),
        }
        for key, supported in wanted.items():
            value = self.raw.get(key)
            if value is not None and value not in supported:
                raise UnsupportedError(
                    f"{self.where}: {key} is {reprlib.repr(value)}; minigen supports only "
                    f"{supported[0]!r}."
                )

    def _head_dim(self, hidden: int, q_heads: int) -> int:
        head_dim = self.values.get("head_dim")
        if head_dim is None and hidden % q_heads:
            raise ConfigError(
                f"{self.where}: hidden_size {hidden} is not a multiple of num_attention_heads "
                f"{q_heads}, and there is no head_dim to set the size of a head."
            )
        head_dim = hidden // q_heads if head_dim is None else self.values.count("head_dim")
        if head_dim % 2:
            raise ConfigError(
                f"{self.where}: head_dim {head_dim} is odd, but rotary embedding rotates pairs of "
                "numbers, so it must be even."
            )
        return int(head_dim)

    def _rope(self) -> Mapping[str, Any]:
        """Return the rotary settings, from `rope_parameters` or the older pair of keys."""
        rope: Mapping[str, Any] = {}
        for key in ("rope_parameters", "rope_scaling"):
            value = self.values.get(key, {})
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{self.where}: {key} must be an object, not {reprlib.repr(value)}."
                )
            if rope and value and value != rope:
                raise ConfigError(f"{self.where}: rope_parameters and rope_scaling differ.")
            rope = rope or value
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in tuple(_ROPE_KEYS):  # a tuple, because a wrong value may be unhashable
            raise UnsupportedError(
                f"{self.where}: rope type {reprlib.repr(kind)} is not supported; default, linear "
                "and llama3 are."
            )
        surplus = sorted(
            set(rope) - {*_ROPE_KEYS[kind].split()} - {"rope_type", "type", "rope_theta"}
        )
        if surplus == ["partial_rotary_factor"] and rope["partial_rotary_factor"] == 1:
            surplus = []
        if surplus:
            raise UnsupportedError(
                f"{self.where}: rope type {kind!r} does not use "
                f"{', '.join(map(repr, surplus[:_MAX_LISTED]))}."
            )
        theta = self.values.get("rope_theta")
        if theta is None:
            return {**rope, "rope_type": kind}
        if "rope_theta" in rope and rope["rope_theta"] != theta:
            raise ConfigError(
                f"{self.where}: rope_theta is {reprlib.repr(theta)}, but the rope settings have "
                f"{reprlib.repr(rope['rope_theta'])}."
            )
        return {**rope, "rope_theta": theta, "rope_type": kind}

    def _linear_factor(self, rope: Mapping[str, Any]) -> float:
        return self.values.number("factor", None, rope) if rope["rope_type"] == "linear" else 1.0

    def _rope_scaling(self, rope: Mapping[str, Any]) -> RopeScaling | None:
        if rope["rope_type"] != "llama3":
            return None
        scaling = RopeScaling(
            factor=self.values.number("factor", None, rope),
            low_freq_factor=self.values.number("low_freq_factor", None, rope),
            high_freq_factor=self.values.number("high_freq_factor", None, rope),
            original_max_positions=self.values.count(
                "original_max_position_embeddings", source=rope
            ),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise ConfigError(
                f"{self.where}: high_freq_factor {scaling.high_freq_factor} must be above "
                f"low_freq_factor {scaling.low_freq_factor}."
            )
        return scaling

    def _sliding_windows(self, num_layers: int) -> tuple[int | None, ...]:
        """Return each layer's sliding window in tokens; None for full attention."""
        window = self.values.get("sliding_window")
        if self.family.windows == "by flag" and not self.values.flag("use_sliding_window"):
            window = None
        if window is not None and self.family.windows == "never":
            raise UnsupportedError(
                f"{self.where}: sliding_window is {reprlib.repr(window)}, but the architecture "
                f"{self.raw['model_type']!r} has no windows; 'mistral' has."
            )
        kinds = self.values.get("layer_types")
        if kinds is None:
            first = self.values.count("max_window_layers", default=0, least=0)
            kinds = [
                "sliding_attention" if window is not None and layer >= first else "full_attention"
                for layer in range(num_layers)
            ]
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise ConfigError(f"{self.where}: layer_types must list all {num_layers} layers.")
        strange = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
        if strange:
            raise UnsupportedError(
                f"{self.where}: layer_types has {reprlib.repr(strange[0])}; minigen knows "
                "'full_attention' and 'sliding_attention'."
            )
        if "sliding_attention" not in kinds:
            return (None,) * num_layers
        if window is None:
            raise ConfigError(
                f"{self.where}: layer_types has sliding_attention, but sliding_window or "
                "use_sliding_window turns the window off."
            )
        width = self.values.count("sliding_window")
        return tuple(width if kind == "sliding_attention" else None for kind in kinds)

    def _bos_id(self, vocab_size: int) -> int | None:
        ids = self.values.token_ids("bos_token_id", vocab_size)
        if len(ids) > 1:
            raise ConfigError(f"{self.where}: bos_token_id must be one token, not {len(ids)}.")
        return ids[0] if ids else None
