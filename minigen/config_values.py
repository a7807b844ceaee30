"""Values read from JSON by key, each of the type that it must have; wrong ones are named."""

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minigen.errors import ConfigError, FileFormatError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises `FileFormatError` when it holds anything else."""
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
    """A token id, a list of them, or none of them, as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


@dataclass(frozen=True)
class Values:
    """The keys of one object; every method raises `ConfigError` with the key and `where` it stood.

    `defaults` are the values of keys that are absent.
    """

    raw: Mapping[str, Any]
    where: str
    defaults: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is; `default` for null and for a key without one."""
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
        """A whole number from `least` to `most`."""
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
        """A positive number."""
        value = self.get(key, default) if source is None else source.get(key, default)
        if value is None:
            raise ConfigError(f"{self.where}: {key} is missing.")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise ConfigError(
                f"{self.where}: {key} must be a positive number, not {reprlib.repr(value)}."
            )
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; false for an absent key without a default."""
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise ConfigError(
                f"{self.where}: {key} must be true or false, not {reprlib.repr(value)}."
            )
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """A token id, several or none, all below `vocab_size`."""
        ids = as_list(self.get(key))
        for token_id in ids:
            whole = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not whole or not 0 <= token_id < vocab_size:
                raise ConfigError(
                    f"{self.where}: {key} must name tokens below vocab_size {vocab_size}, "
                    f"not {reprlib.repr(token_id)}."
                )
        return tuple(ids)
