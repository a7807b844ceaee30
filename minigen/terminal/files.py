"""Files that an option names."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from minigen.errors import OptionError


@contextmanager
def written(option: str, path: Path) -> Generator[None, None, None]:
    """Raises `OptionError`, by the option's name, if the block cannot write its file."""
    try:
        yield
    except OSError as error:
        raise OptionError(f"--{option} {path} cannot be written: {error.strerror}.") from error
