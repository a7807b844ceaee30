"""A URL becomes a file: streamed, resumed after a break, checked, and only then given its name.

    url --> name.part  (grows; survives a kill; the next fetch asks for the rest)
            name.part --sha256 right--> name      (one rename: whole or not there)
            name.part --sha256 wrong--> deleted

What a `.part` file holds is never trusted: its hash decides. Only http, https and file addresses;
one connection; no mirrors.
"""

import base64
import errno
import hashlib
import os
import shutil
import ssl
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Protocol, runtime_checkable
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit
from urllib.request import HTTPSHandler, OpenerDirector, ProxyHandler, Request, build_opener

from minigen.errors import DownloadError

CHUNK_BYTES = 256 * 1024
TIMEOUT_SECONDS = 30.0
PAUSES_SECONDS = (0.2, 1.0, 3.0)  # before each try that follows one which brought nothing new
BUSY_STATUSES = frozenset({408, 429, 500, 502, 503, 504})


@runtime_checkable
class Progress(Protocol):
    """Hears how far a piece of work has come; called for every chunk and once when it is done."""

    def __call__(self, label: str, num_bytes: int, num_total_bytes: int | None) -> None: ...


class Lines:
    """A `Progress` for logs: a line on stderr when work begins and one when it is whole."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[float, int]] = {}  # label -> time, bytes already there

    def __call__(self, label: str, num_bytes: int, num_total_bytes: int | None) -> None:
        if label not in self._begun:
            self._begun[label] = (time.monotonic(), num_bytes)
            size = "" if num_total_bytes is None else f": {in_words(num_total_bytes)}"
            there = f", {in_words(num_bytes)} already there" if num_bytes > 0 else ""
            print(f"{label}{size}{there}", file=sys.stderr, flush=True)
        if num_bytes == num_total_bytes:
            started, num_before = self._begun.pop(label)
            seconds = max(time.monotonic() - started, 1e-3)
            speed = in_words(int((num_bytes - num_before) / seconds))
            print(f"{label}: done in {seconds:.1f} s, {speed}/s", file=sys.stderr, flush=True)


class DiskError(DownloadError):
    """The disk is full or may not be written; no other way of downloading would help."""


class InterruptedDownloadError(DownloadError):
    """A connection broke or the server was busy; what has arrived is kept, to be continued."""


def fetch(
    url: str,
    to: Path,
    *,
    sha256: str | None,
    opener: OpenerDirector,
    progress: Progress,
    label: str,
) -> None:
    """Write what `url` serves to `to`, continuing `to`'s part file if there is one.

    Tries again while tries bring bytes, and thrice after one that does not. Without a `sha256` the
    caller checks the content. Raises DiskError, InterruptedDownloadError, or DownloadError for a
    refusal and for content with another hash. One process at a time: the caller holds a lock.
    """
    if _is_complete(to, sha256):
        return
    part = part_of(to)
    resumed = part.exists()
    if not _is_complete(part, sha256):
        _stream_patiently(url, part, opener=opener, progress=progress, label=label)
    if resumed and sha256 is not None and not _is_complete(part, sha256):
        part.unlink()  # an earlier half of something else
        _stream_patiently(url, part, opener=opener, progress=progress, label=label)
    if sha256 is not None and not _is_complete(part, sha256):
        part.unlink()
        raise DownloadError(
            f"What {shown(url)} serves is not what its index promised (the sha256 differs), "
            "so it was deleted; pull again, perhaps from another network."
        )
    with disk_errors(to.parent):
        os.replace(part, to)


def make_opener(*, proxy: str | None = None, cert: str | None = None) -> OpenerDirector:
    """An opener that honours the environment's proxies and certificates, and these besides."""
    context = ssl.create_default_context()  # reads SSL_CERT_FILE and SSL_CERT_DIR
    if cert is not None:
        folder = cert if Path(cert).is_dir() else None
        try:
            context.load_verify_locations(cafile=None if folder else cert, capath=folder)
        except OSError as error:
            raise DownloadError(f"The certificates in {cert} cannot be read: {error}.") from error
    proxies = [] if proxy is None else [ProxyHandler({"http": proxy, "https": proxy})]
    return build_opener(HTTPSHandler(context=context), *proxies)


def part_of(path: Path) -> Path:
    """Where the beginning of `path` is kept until it is whole."""
    return path.with_name(path.name + ".part")


def has_sha256(path: Path, sha256: str) -> bool:
    """Whether `path` is a file with this content."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError:
        return False


def require_space(folder: Path, num_bytes: int) -> None:
    """Raise DiskError unless `folder`'s disk has room for `num_bytes` more."""
    num_free = shutil.disk_usage(folder).free
    if num_free < num_bytes:
        raise DiskError(
            f"{folder} has room for {in_words(num_free)} but {in_words(num_bytes)} are needed; "
            "free some space, or set MINIGEN_HOME to a folder on another disk."
        )


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError of writing below `folder` into a DiskError that says what would help."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            trouble = "The disk is full"
        else:
            trouble = f"Writing failed ({error.strerror or error})"
        raise DiskError(
            f"{trouble} at {folder}; free some space or fix its permissions, "
            "or set MINIGEN_HOME to another folder."
        ) from error


def shown(url: str) -> str:
    """A URL fit to be printed: without user, password, query and fragment."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def in_words(num_bytes: int) -> str:
    """
    >>> in_words(98362432)
    '98.4 MB'
    """
    if num_bytes < 1e6:
        return f"{num_bytes / 1e3:.0f} kB"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.2f} GB"


def _is_complete(path: Path, sha256: str | None) -> bool:
    return sha256 is not None and has_sha256(path, sha256)


def _stream_patiently(
    url: str, part: Path, *, opener: OpenerDirector, progress: Progress, label: str
) -> None:
    furthest, num_pauses = 0, 0
    while True:
        try:
            return _stream(url, part, opener=opener, progress=progress, label=label)
        except InterruptedDownloadError:
            reached = _size(part)
            num_pauses = 0 if reached > furthest else num_pauses + 1
            furthest = max(furthest, reached)
            if num_pauses > len(PAUSES_SECONDS):
                raise
            time.sleep(PAUSES_SECONDS[max(num_pauses - 1, 0)])


def _stream(
    url: str, part: Path, *, opener: OpenerDirector, progress: Progress, label: str
) -> None:
    """Append what is missing, or everything if the server ignores or refuses the range."""
    start = _size(part)
    with _connect(opener, url, start) as response:
        if response.status == 416:  # nothing from here on: the part is too long
            part.unlink()
            raise InterruptedDownloadError(f"{shown(url)} is shorter than what was kept of it.")
        continues = (response.headers["Content-Range"] or "").startswith(f"bytes {start}-")
        num_done = start if response.status == 206 and continues else 0
        length = response.headers["Content-Length"]
        total = None if length is None else num_done + int(length)
        progress(label, num_done, total)
        with disk_errors(part.parent), part.open("ab" if num_done else "wb") as file:
            for chunk in _chunks(response, url):
                file.write(chunk)
                num_done += len(chunk)
                progress(label, num_done, total)
    if total is None:
        progress(label, num_done, num_done)
    elif num_done < total:
        raise InterruptedDownloadError(
            f"The connection to {shown(url)} was lost after {in_words(num_done)} of "
            f"{in_words(total)}; what arrived is kept, so pull again to continue."
        )


def _connect(opener: OpenerDirector, url: str, start: int) -> HTTPResponse | HTTPError:
    try:
        return opener.open(_request(url, start), timeout=TIMEOUT_SECONDS)
    except HTTPError as error:
        if error.code == 416 and start > 0:
            return error
        error.close()
        kind = InterruptedDownloadError if error.code in BUSY_STATUSES else DownloadError
        raise kind(f"{shown(url)} answered {error.code} {error.reason}.") from error
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        host = urlsplit(shown(url)).netloc
        raise InterruptedDownloadError(f"{host} could not be reached ({reason}).") from error


def _request(url: str, start: int) -> Request:
    parts = urlsplit(url)
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    request = Request(bare, headers={"User-Agent": "minigen"})
    if parts.username is not None:
        account = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        token = base64.b64encode(account.encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {token}")
    if start > 0:
        request.add_header("Range", f"bytes={start}-")
    return request


def _chunks(response: HTTPResponse | HTTPError, url: str) -> Iterator[bytes]:
    """The body; a network error becomes ours here, so that a writer's OSError is the disk's."""
    try:
        while chunk := response.read(CHUNK_BYTES):
            yield chunk
    except (OSError, HTTPException) as error:
        raise InterruptedDownloadError(
            f"The connection to {shown(url)} was lost ({error!r}); "
            "what arrived is kept, so pull again to continue."
        ) from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
