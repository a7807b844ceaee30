"""The options and sockets of an engine, checked before any work starts."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from minigen.errors import OptionError

WEIGHTS = ("auto", "float32", "bfloat16", "int8", "int4")
DEVICES = ("cpu", "cuda")
KV_CACHE_DTYPES = ("auto", "bfloat16", "int8")
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
NUMBER = r"\d{1,9}(?:\.\d{1,9})?"

# Far beyond any use: larger values would make the operating system fail, or end the process.
LARGEST = {
    "threads": 1024,
    "max_num_seqs": 2**16,
    "max_num_batched_tokens": 2**24,
    "block_size": 2**16,
    "num_blocks": 2**24,
    "tensor_parallel_size": 64,
}


@dataclass(frozen=True)
class EngineConfig:
    """The options of `LLM.load` and of the command line; `LLM.load` documents each."""

    weights: str = "auto"
    threads: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | str | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    prefix_cache: Any = None
    scheduler: Any = "continuous"
    allocator: Any = None
    sampler: Any = None
    attention_backend: Any = "auto"
    tensor_parallel_size: int = 1
    device: str = "cpu"
    kv_bytes: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        _known("weights", self.weights, WEIGHTS)
        _known("device", self.device, DEVICES)
        _known("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        for name, largest in LARGEST.items():
            if getattr(self, name) is not None or name not in ("threads", "num_blocks"):
                _whole(name, getattr(self, name), largest)
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise OptionError(
                "num_blocks and kv_cache_memory both set the size of the KV cache; give only one "
                "of them."
            )
        if not isinstance(self.enable_prefix_caching, bool):
            raise OptionError(
                f"enable_prefix_caching must be True or False, not {self.enable_prefix_caching!r}."
            )
        if isinstance(self.prefix_cache, bool) or self.prefix_cache in ("on", "off"):
            on = self.prefix_cache in (True, "on")
            raise OptionError(
                "prefix_cache takes a prefix cache of your own; to switch sharing "
                f"{'on' if on else 'off'}, set enable_prefix_caching to {on} (on the command line "
                f"--{'' if on else 'no-'}enable-prefix-caching)."
            )
        if self.prefix_cache is not None and not self.enable_prefix_caching:
            raise OptionError(
                "prefix_cache is of no use while enable_prefix_caching is False; give only one."
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise OptionError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} must be at least "
                f"max_num_seqs {self.max_num_seqs}, so that each running sequence gets its token "
                "in every step."
            )
        if self.tensor_parallel_size > 1 and self.device != "cpu":
            raise OptionError(
                f"device={self.device!r} holds a whole model: leave tensor_parallel_size at 1, or "
                "set device to 'cpu'."
            )
        if self.tensor_parallel_size > 1 and self.attention_backend not in ("auto", "torch"):
            raise OptionError(
                "tensor_parallel_size above 1 needs minigen's own attention_backend: the other "
                "processes do not have yours."
            )
        if self.kv_cache_memory is not None:
            object.__setattr__(
                self, "kv_bytes", parse_bytes("kv_cache_memory", self.kv_cache_memory)
            )


def parse_bytes(name: str, value: object) -> int:
    """Convert a number, or text such as "512M" or "1.5 GiB", to a number of bytes.

    >>> parse_bytes("kv_cache_memory", "512 MiB")
    536870912
    """
    if not isinstance(value, str):
        _whole(name, value, 2**62)
        return int(value)  # type: ignore[call-overload]  # checked a line above
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([KMG]I?)?B?\s*", value.upper())
    number = 0 if found is None else int(Fraction(found[1]) * UNITS[found[2] or ""])
    if number < 1:
        raise OptionError(
            f"{name} must be a number of bytes, such as 1000000, 512M or 1.5GiB, not {value!r}."
        )
    return number


def parse_seconds(name: str, value: str) -> float:
    """Convert text such as "90", "30s", "10m" or "1h30m" to seconds.

    >>> parse_seconds("keep_alive", "10m")
    600.0
    """
    text = value.strip()
    if re.fullmatch(NUMBER, text):
        return float(text)
    if not re.fullmatch(rf"({NUMBER}(ms|s|m|h))+", text):
        raise OptionError(f"{name} must be a time, such as 30s, 10m or 1h, not {value!r}.")
    parts = re.findall(rf"({NUMBER})(ms|s|m|h)", text)
    return sum(float(number) * SECONDS[unit] for number, unit in parts)


def _known(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise OptionError(f"{name} must be one of {', '.join(known)}, not {value!r}.")


def _whole(name: str, value: object, largest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
        raise OptionError(f"{name} must be a whole number from 1 to {largest}, not {value!r}.")


@contextmanager
def written(option: str, path: Path) -> Generator[None, None, None]:
    """Raise an `OptionError` that names the option if the block cannot write its file."""
    try:
        yield
    except OSError as error:
        raise OptionError(f"--{option} {path} cannot be written: {error.strerror}.") from error
