"""Models of the Hugging Face hub, stored in the cache of its library and shared with other tools.

A model is a snapshot folder with safetensors, configuration and tokenizer, or one GGUF file of a
repository.
"""

import errno
import glob
import json
from pathlib import Path

import huggingface_hub  # lazy: the costly parts are imported when they are first used

from minigen.errors import DownloadError, MinigenError, ModelNotFoundError
from minigen.hub.download import DiskError

SNAPSHOT_PATTERNS = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja")
# Subfolders and consolidated.* hold the same weights in formats of other engines.
IGNORED_PATTERNS = ("*/*", "consolidated*")


def find_snapshot(repo: str) -> Path | None:
    """Return the folder of a repository if all of it is in the cache, without network, or None."""
    folder = _cached_folder(repo, SNAPSHOT_PATTERNS, IGNORED_PATTERNS)
    return folder if folder is not None and _is_model(folder) else None


def pull_snapshot(repo: str) -> Path:
    """Download the missing files of a repository's newest snapshot, and return its folder.

    Raises ModelNotFoundError for a repository that does not exist or holds no safetensors, and
    DownloadError for errors that may be gone at another time.
    """
    folder = _newest_folder(repo, SNAPSHOT_PATTERNS, IGNORED_PATTERNS)
    if _is_model(folder):
        return folder
    files = _files(repo)
    ggufs = _ggufs_among(files)
    if ggufs:
        raise ModelNotFoundError(
            f"{repo} holds GGUF files only; write {repo}/FILE, where FILE is one of {ggufs}."
        )
    raise ModelNotFoundError(
        f"{repo} holds no model that minigen reads: it needs config.json and *.safetensors, or "
        f"a .gguf, but it holds {', '.join(sorted(files)) or 'nothing'}."
    )


def find_file(repo: str, file_name: str) -> Path | None:
    """Return one file of a repository if it is in the cache, or None."""
    folder = _cached_folder(repo, (glob.escape(file_name),), ())
    return folder / file_name if folder is not None and (folder / file_name).is_file() else None


def pull_file(repo: str, file_name: str) -> Path:
    """Return one file of a repository, and download it if it is missing or out of date.

    Raises as `pull_snapshot` does.
    """
    # A snapshot of one file, because hf_hub_download retries for 23 s when offline.
    path = _newest_folder(repo, (glob.escape(file_name),), ()) / file_name
    if not path.is_file():
        ggufs = _ggufs_among(_files(repo))
        remedy = (
            f"write {repo}/FILE, where FILE is one of {ggufs}"
            if ggufs
            else "it holds no GGUF file at all"
        )
        raise ModelNotFoundError(f"{repo} holds no {file_name}; {remedy}.")
    return path


def _cached_folder(repo: str, wanted: tuple[str, ...], unwanted: tuple[str, ...]) -> Path | None:
    try:
        return _snapshot(repo, wanted, unwanted, local_files_only=True)
    except (OSError, ValueError):  # absent, incomplete, or an invalid name
        return None


def _newest_folder(repo: str, wanted: tuple[str, ...], unwanted: tuple[str, ...]) -> Path:
    try:
        return _snapshot(repo, wanted, unwanted, local_files_only=False)
    except Exception as error:  # the library's HTTP client and its errors vary between releases
        raise _explained(repo, error) from error


def _snapshot(
    repo: str, wanted: tuple[str, ...], unwanted: tuple[str, ...], *, local_files_only: bool
) -> Path:
    folder = huggingface_hub.snapshot_download(
        repo,
        allow_patterns=list(wanted),
        ignore_patterns=list(unwanted),
        local_files_only=local_files_only,
    )
    return Path(folder)


def _files(repo: str) -> list[str]:
    try:
        return huggingface_hub.list_repo_files(repo)
    except Exception as error:  # see _newest_folder
        raise _explained(repo, error) from error


def _ggufs_among(files: list[str]) -> str:
    return ", ".join(sorted(file for file in files if file.endswith(".gguf")))


def _is_model(folder: Path) -> bool:
    """Return whether the folder has a configuration and every weight file that the index names."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return all((folder / file).is_file() for file in files)


def _explained(repo: str, error: Exception) -> MinigenError:
    """Convert an error of the library to one with a single sentence that names a remedy."""
    # The library wraps a network error in "not in the cache either"; the cause is more precise.
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    errors = huggingface_hub.errors
    if isinstance(error, ValueError):
        return ModelNotFoundError(f"{repo!r} cannot be a name on the hub ({_first_line(error)}).")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EACCES, errno.EROFS):
        return DiskError(
            f"{repo} cannot be written to the Hugging Face cache ({error.strerror}: "
            f"{error.filename}); free some space, or set HF_HOME to another folder."
        )
    if isinstance(error, errors.GatedRepoError):
        return DownloadError(
            f"{repo} is gated: accept its terms on its page on the hub, then run "
            "`hf auth login` or set HF_TOKEN."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(
            f"{repo} is neither here nor a model on the hub that this account may see; check the "
            "spelling, or set HF_TOKEN if it is private."
        )
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        return DownloadError(f"The hub answered {status} for {repo}; try again later.")
    return DownloadError(
        f"{repo} is not in the cache and the hub could not be reached ({_first_line(error)}): "
        "check the network, HF_ENDPOINT and HF_HUB_OFFLINE."
    )


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
