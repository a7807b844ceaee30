"""Models of the Hugging Face hub, in its own library's cache, where other tools share them.

Safetensors, configuration and tokenizer make one snapshot folder; a GGUF is one file of one.
"""

import errno
import glob
import json
from pathlib import Path

import huggingface_hub  # lazy: the costly parts are imported when they are first used

from minigen.errors import DownloadError, MinigenError, ModelNotFoundError
from minigen.hub.download import DiskError

SNAPSHOT_PATTERNS = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja")
# Subfolders and consolidated.* hold the same weights again, in forms for other engines.
IGNORED_PATTERNS = ("*/*", "consolidated*")


def find_snapshot(repo: str) -> Path | None:
    """The folder of a repository that is wholly in the cache, without network; None otherwise."""
    folder = _cached_folder(repo, SNAPSHOT_PATTERNS, IGNORED_PATTERNS)
    return folder if folder is not None and _is_model(folder) else None


def pull_snapshot(repo: str) -> Path:
    """The folder of a repository's newest snapshot, downloaded as far as it is missing.

    Raises ModelNotFoundError for a repository that is not there or holds no safetensors,
    DownloadError for all that may go better another time.
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
        f"{repo} holds no model that minigen reads: it wants config.json and *.safetensors, or "
        f"a .gguf, and found {', '.join(sorted(files)) or 'nothing'}."
    )


def find_file(repo: str, file_name: str) -> Path | None:
    """One file of a repository, if it is in the cache."""
    folder = _cached_folder(repo, (glob.escape(file_name),), ())
    return folder / file_name if folder is not None and (folder / file_name).is_file() else None


def pull_file(repo: str, file_name: str) -> Path:
    """One file of a repository, downloaded if the cache misses it or has an older one.

    Raises as `pull_snapshot` does.
    """
    # A snapshot of one file: unlike hf_hub_download it does not retry for 23 s when offline.
    path = _newest_folder(repo, (glob.escape(file_name),), ()) / file_name
    if not path.is_file():
        ggufs = _ggufs_among(_files(repo))
        remedy = f"write {repo}/FILE, where FILE is one of {ggufs}" if ggufs else "nor any other"
        raise ModelNotFoundError(f"{repo} holds no {file_name}; {remedy}.")
    return path


def _cached_folder(repo: str, wanted: tuple[str, ...], unwanted: tuple[str, ...]) -> Path | None:
    try:
        return _snapshot(repo, wanted, unwanted, local_files_only=True)
    except (OSError, ValueError):  # not there, not all there, or no possible name
        return None


def _newest_folder(repo: str, wanted: tuple[str, ...], unwanted: tuple[str, ...]) -> Path:
    try:
        return _snapshot(repo, wanted, unwanted, local_files_only=False)
    except Exception as error:  # its HTTP client, and so what it raises, changes between releases
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
    """Whether a configuration is there, and every file of weights that the index names."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return all((folder / file).is_file() for file in files)


def _explained(repo: str, error: Exception) -> MinigenError:
    """One sentence for what the library raised, with what would help."""
    # It wraps what happened online in "not in the cache either"; the cause says more.
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
