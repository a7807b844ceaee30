"""Models of the Hugging Face hub, stored in the cache of its library and shared with other tools.

A model is a snapshot folder with safetensors, configuration and tokenizer, or one GGUF file of a
repository. The library resolves a revision to a commit, downloads all files of that commit, checks
their sizes, continues after a lost connection, keeps what is complete, and shows progress bars.
"""

import errno
import glob
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from huggingface_hub import HfApi, errors, hf_hub_url, snapshot_download, utils

from minigen.errors import DiskError, DownloadError, MinigenError, ModelNotFoundError

SNAPSHOT_PATTERNS = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja")
# Subfolders and consolidated.* hold the same weights in formats of other engines.
IGNORED_PATTERNS = ("*/*", "consolidated*")
HEADERS_TIMEOUT_SECONDS = 30.0
# A failed write has such a number; another error of the disk names its file, a network's does not.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)


@dataclass(frozen=True)
class HubModel:
    """A model's address: repository, branch, tag or commit (None: main), and GGUF file (or None).

    Its methods raise ModelNotFoundError for a repository, revision or file that does not exist or
    is no model, and DownloadError for errors that may be gone at another time.
    """

    repo: str
    revision: str | None
    file_name: str | None

    def find(self) -> Path | None:
        """Return the folder or file if all of it is in the cache, without network, or None."""
        try:
            return self._model_in(self._snapshot(local_files_only=True))
        except (OSError, ValueError):  # absent, incomplete, or an invalid name
            return None

    def pull(self) -> Path:
        """Download the missing files of the newest commit, and return the folder or file."""
        with _one_sentence(self):
            # For one file too, because hf_hub_download retries for 23 s when offline.
            folder = self._snapshot(local_files_only=False)
            path = self._model_in(folder)
            if path is None:
                raise self._no_model(list(self._remote(folder.name).sizes))
            return path

    def remote(self) -> "RemoteFiles":
        """Return the files of the model's newest commit that `pull` downloads."""
        with _one_sentence(self):
            found = self._remote(self.revision)
        wanted, unwanted = self._patterns
        names = list(
            utils.filter_repo_objects(found.sizes, allow_patterns=wanted, ignore_patterns=unwanted)
        )
        has_weights = any(name.endswith((".safetensors", ".gguf")) for name in names)
        if not has_weights or (self.file_name is None and "config.json" not in names):
            raise self._no_model(list(found.sizes))
        return RemoteFiles(self, found.commit, {name: found.sizes[name] for name in names})

    @property
    def _patterns(self) -> tuple[list[str], list[str]]:
        if self.file_name is not None:
            return [glob.escape(self.file_name)], []
        return list(SNAPSHOT_PATTERNS), list(IGNORED_PATTERNS)

    def _snapshot(self, *, local_files_only: bool) -> Path:
        wanted, unwanted = self._patterns
        folder = snapshot_download(
            self.repo,
            revision=self.revision,
            allow_patterns=wanted,
            ignore_patterns=unwanted,
            local_files_only=local_files_only,
        )
        return Path(folder)

    def _model_in(self, folder: Path) -> Path | None:
        """Return the model in a snapshot folder, or None if a part of it is missing."""
        if self.file_name is not None:
            path = folder / self.file_name
            return path if path.is_file() else None
        if not (folder / "config.json").is_file():
            return None
        index = folder / "model.safetensors.index.json"
        if not index.is_file():
            return folder if any(folder.glob("*.safetensors")) else None
        try:
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return folder if all((folder / file).is_file() for file in files) else None
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
            return folder  # the loader says what is wrong with the index

    def _remote(self, revision: str | None) -> "RemoteFiles":
        info = HfApi().model_info(
            self.repo, revision=revision, files_metadata=True, timeout=HEADERS_TIMEOUT_SECONDS
        )
        sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
        return RemoteFiles(self, str(info.sha), sizes)

    def _no_model(self, files: list[str]) -> ModelNotFoundError:
        ggufs = ", ".join(sorted(file for file in files if file.endswith(".gguf")))
        remedy = f"write {self.repo}/FILE, where FILE is one of {ggufs}"
        if self.file_name is not None:
            remedy = remedy if ggufs else "it holds no GGUF file at all"
            return ModelNotFoundError(f"{self.repo} holds no {self.file_name}; {remedy}.")
        if ggufs:
            return ModelNotFoundError(f"{self.repo} holds GGUF files only; {remedy}.")
        return ModelNotFoundError(
            f"{self.repo} holds no model that minigen reads: it needs config.json and "
            f"*.safetensors, or a .gguf, but it holds {', '.join(sorted(files)) or 'nothing'}."
        )


@dataclass(frozen=True)
class RemoteFiles:
    """The files of one commit on the hub: their sizes in bytes by name. Nothing is downloaded."""

    model: HubModel
    commit: str
    sizes: Mapping[str, int]

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes `start` to `stop` of a file, by an HTTP range request.

        Raises DownloadError if the hub refuses or cannot be reached.
        """
        if start >= stop:
            return b""
        url = hf_hub_url(self.model.repo, name, revision=self.commit)
        own = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        headers = {**utils.build_hf_headers(), **own}
        with _one_sentence(self.model):
            response = utils.get_session().get(
                url, headers=headers, timeout=HEADERS_TIMEOUT_SECONDS
            )
            utils.hf_raise_for_status(response)
            content = bytes(response.content)
        is_part = response.status_code == HTTPStatus.PARTIAL_CONTENT
        return content if is_part else content[start:stop]


@contextmanager
def _one_sentence(model: HubModel) -> Iterator[None]:
    """Convert an error of the block to one with a single sentence that names a remedy."""
    try:
        yield
    except MinigenError:
        raise
    except Exception as error:  # the library's HTTP client and its errors vary between releases
        raise _explained(model, error) from error


def _explained(model: HubModel, error: Exception) -> MinigenError:
    # The library wraps a network error in "not in the cache either"; the cause is more precise.
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, ValueError):
        return ModelNotFoundError(
            f"{model.repo!r} cannot be a name on the hub ({_first_line(error)})."
        )
    if isinstance(error, OSError) and (error.filename or error.errno in _DISK_ERRORS):
        where = "" if error.filename is None else f": {error.filename}"
        return DiskError(
            f"{model.repo} cannot be written to the Hugging Face cache ({error.strerror}{where}); "
            "free some space, or set HF_HOME to another folder."
        )
    if isinstance(error, errors.GatedRepoError):
        return DownloadError(
            f"{model.repo} is gated: accept its terms on its page on the hub, then run "
            "`hf auth login` or set HF_TOKEN."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(
            f"{model.repo} is neither here nor a model on the hub that this account may see; "
            "check the spelling, or set HF_TOKEN if it is private."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(
            f"{model.repo} has no branch, tag or commit {model.revision!r}; its page on the hub "
            f"lists them, and plain {model.repo} is its main branch."
        )
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        return DownloadError(f"The hub answered {status} for {model.repo}; try again later.")
    return DownloadError(
        f"{model.repo} is not in the cache and the hub could not be reached "
        f"({_first_line(error)}): check the network, HF_ENDPOINT and HF_HUB_OFFLINE."
    )


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
