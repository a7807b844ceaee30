"""Models in Ollama's words: their names, and what is known of them, more once they are loaded."""

from datetime import UTC, datetime, timedelta
from math import prod
from typing import Any

from minigen.config import ModelConfig
from minigen.model.transformer import expected_tensors
from minigen.server.host import HostedModel, ModelHost
from minigen.server.served import Served

LATEST = ":latest"
FOR_EVER = datetime(9999, 12, 31, tzinfo=UTC)


def find_model(host: ModelHost, name: str) -> HostedModel:
    """The model of a name, with or without ":latest". Raises `ApiError` (404) for others."""
    return host.find(name if name in host.models else name.removesuffix(LATEST))


def listed(host: ModelHost, model: HostedModel) -> dict[str, Any]:
    """A model as `/api/tags` has it; sizes and details once it has been loaded."""
    name = tagged(model.name)
    facts = {"name": name, "model": name, "modified_at": _date(host.created), "digest": ""}
    if model.served is None:
        return facts
    llm = model.served.llm
    return {**facts, "size": llm.stored_bytes, "details": details(model.served)}


def running(host: ModelHost, model: HostedModel, served: Served) -> dict[str, Any]:
    """A loaded model as `/api/ps` has it, with when it will be unloaded if nobody asks again."""
    return {
        **listed(host, model),
        "size_vram": 0,
        "context_length": served.llm.config.max_positions,
        "expires_at": _expiry(model).isoformat(),
    }


def shown(host: ModelHost, served: Served) -> dict[str, Any]:
    """A loaded model as `/api/show` has it."""
    return {
        "modified_at": _date(host.created),
        "details": details(served),
        "model_info": _model_info(served.llm.config),
        "capabilities": ["completion"],
    }


def details(served: Served) -> dict[str, Any]:
    """The family of a model, how large it is, and the form of its weights."""
    config = served.llm.config
    return {
        "parent_model": "",
        "family": config.family,
        "families": [config.family],
        "parameter_size": f"{_num_parameters(config) / 1e6:.1f}M",
        "quantization_level": served.llm.describe()["weights"].partition(" ")[0],
    }


def tagged(name: str) -> str:
    """A name with a tag, as Ollama's clients expect it: ":latest" where it has none.

    >>> tagged("smollm2-135m"), tagged("org/repo:q8")
    ('smollm2-135m:latest', 'org/repo:q8')
    """
    return name if ":" in name else name + LATEST


def _model_info(config: ModelConfig) -> dict[str, Any]:
    """GGUF's names for the configuration."""
    family = config.family
    return {
        "general.architecture": family,
        "general.parameter_count": _num_parameters(config),
        f"{family}.attention.head_count": config.q_heads,
        f"{family}.attention.head_count_kv": config.kv_heads,
        f"{family}.block_count": config.num_layers,
        f"{family}.context_length": config.max_positions,
        f"{family}.embedding_length": config.hidden,
        f"{family}.feed_forward_length": config.ffn,
        f"{family}.rope.freq_base": config.rope_theta,
        f"{family}.vocab_size": config.vocab_size,
    }


def _num_parameters(config: ModelConfig) -> int:
    return sum(prod(shape) for shape in expected_tensors(config).values())


def _expiry(model: HostedModel) -> datetime:
    if model.keep_alive is None:
        return FOR_EVER
    return model.idle_until or datetime.now(UTC) + timedelta(seconds=model.keep_alive)


def _date(timestamp: float) -> str:
    return datetime.fromtimestamp(timestamp, UTC).isoformat()
