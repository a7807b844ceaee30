"""Downloads a URL to a file: streams it, resumes after a break, checks it, and then renames it.

    url --> name.part  (grows; stays if the process is killed; the next fetch requests the rest)
            name.part --sha256 right--> name      (one rename, so the file is whole or absent)
            name.part --sha256 wrong--> deleted

The content of a `.part` file is trusted only if its hash is right; where the hash is unknown, the
caller of `fetch` must check the content. For http, https and file URLs, over one connection,
without mirrors.
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
# The pause before each retry after tries without new bytes. After new bytes it is the first one.
PAUSES_SECONDS = (0.2, 1.0, 3.0)
BUSY_STATUSES = frozenset({408, 429, 500, 502, 503, 504})  # HTTP statuses that may pass


@runtime_checkable
class Progress(Protocol):
    """A callback for the progress of the work named `label`.

    It is called at the start, after every chunk, and at the end, when `num_bytes` equals
    `num_total_bytes`. The total is None while it is unknown.
    """

    def __call__(self, label: str, num_bytes: int, num_total_bytes: int | None) -> None: ...


class Lines:
    """A `Progress` for logs: prints a line on stderr when work begins and one when it ends."""

    def __init__(self) -> None:
        self._started: dict[str, tuple[float, int]] = {}  # label -> time, bytes already there

    def __call__(self, label: str, num_bytes: int, num_total_bytes: int | None) -> None:
        if label not in self._started:
            self._started[label] = (time.monotonic(), num_bytes)
            size = "" if num_total_bytes is None else f": {format_bytes(num_total_bytes)}"
            there = f", {format_bytes(num_bytes)} already there" if num_bytes > 0 else ""
            print(f"{label}{size}{there}", file=sys.stderr, flush=True)
        if num_bytes == num_total_bytes:
            started, num_before = self._started.pop(label)
            seconds = max(time.monotonic() - started, 1e-3)
            speed = format_bytes(int((num_bytes - num_before) / seconds))
            print(f"{label}: done in {seconds:.1f} s, {speed}/s", file=sys.stderr, flush=True)


class DiskError(DownloadError):
    """The disk is full or not writable, so another way of downloading would not help."""


class InterruptedDownloadError(DownloadError):
    """The connection broke, or the server was busy or unreachable: trying again may succeed.

    The partial file is kept if it can be resumed.
    """


def fetch(
    url: str,
    to: Path,
    *,
    sha256: str | None,
    opener: OpenerDirector,
    progress: Progress,
    label: str,
) -> None:
    """Download `url` to the file `to`, and resume `to`'s part file if there is one.

    Retries as long as tries bring new bytes, and at most three times in a row without new bytes.
    Without a `sha256` (in hexadecimal) the caller must check the content. Only one process may call
    this for a file at a time: the caller holds a lock.

    Raises `DiskError`, `InterruptedDownloadError` when the retries are used up, and `DownloadError`
    if the server refuses or the content has another hash.
    """
    if _is_complete(to, sha256):
        return
    part = part_of(to)
    resumed = part.exists()
    if not _is_complete(part, sha256):
        _stream_with_retries(url, part, opener=opener, progress=progress, label=label)
    if resumed and sha256 is not None and not _is_complete(part, sha256):
        part.unlink()  # the part file was the beginning of other content
        _stream_with_retries(url, part, opener=opener, progress=progress, label=label)
    if sha256 is not None and not _is_complete(part, sha256):
        part.unlink()
        raise DownloadError(
            f"The content of {_redacted(url)} is not what its index promised (the sha256 differs), "
            "so the file was deleted; pull again, perhaps from another network."
        )
    with disk_errors(to.parent):
        os.replace(part, to)


def make_opener(*, proxy: str | None = None, cert: str | None = None) -> OpenerDirector:
    """Return an opener with the proxies and the CA certificates of the environment.

    `proxy`, a URL, replaces the proxies; `cert`, a file or a folder, adds certificates. Raises
    `DownloadError` if the certificates cannot be read.
    """
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
    """Return the path of the partial file of `path`."""
    return path.with_name(path.name + ".part")


def has_sha256(path: Path, sha256: str) -> bool:
    """Return whether `path` is a readable file whose content has this sha256 (in hexadecimal)."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError:
        return False


def require_space(folder: Path, num_bytes: int) -> None:
    """Raise `DiskError` unless the disk of an existing folder has `num_bytes` bytes free."""
    num_free = shutil.disk_usage(folder).free
    if num_free < num_bytes:
        raise DiskError(
            f"{folder} has {format_bytes(num_free)} of free space, but {format_bytes(num_bytes)} "
            "are needed; free some space, or set MINIGEN_HOME to a folder on another disk."
        )


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn an `OSError` of the block, which writes below `folder`, into a `DiskError`."""
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


def _redacted(url: str) -> str:
    """Return a URL that is safe to print: without user, password, query and fragment."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def format_bytes(num_bytes: int) -> str:
    """Return a number of bytes with a decimal unit.

    >>> format_bytes(98362432)
    '98.4 MB'
    """
    if num_bytes < 1e6:
        return f"{num_bytes / 1e3:.0f} kB"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.2f} GB"


def _is_complete(path: Path, sha256: str | None) -> bool:
    return sha256 is not None and has_sha256(path, sha256)


def _stream_with_retries(
    url: str, part: Path, *, opener: OpenerDirector, progress: Progress, label: str
) -> None:
    furthest, num_without_bytes = 0, 0
    while True:
        try:
            return _stream(url, part, opener=opener, progress=progress, label=label)
        except InterruptedDownloadError:
            reached = _size(part)
            num_without_bytes = 0 if reached > furthest else num_without_bytes + 1
            furthest = max(furthest, reached)
            if num_without_bytes > len(PAUSES_SECONDS):
                raise
            time.sleep(PAUSES_SECONDS[max(num_without_bytes - 1, 0)])


def _stream(
    url: str, part: Path, *, opener: OpenerDirector, progress: Progress, label: str
) -> None:
    """Append the missing bytes, or start from zero if the server ignores the range.

    If the server refuses the range, the part file is deleted, so that the retry starts from zero.
    """
    start = _size(part)
    with _connect(opener, url, start) as response:
        if response.status == 416:  # range not satisfiable: no bytes come after the part file's
            part.unlink()
            raise InterruptedDownloadError(
                f"{_redacted(url)} is not longer than its partial file, which was deleted; "
                "pull again."
            )
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
            f"The connection to {_redacted(url)} was lost after {format_bytes(num_done)} of "
            f"{format_bytes(total)}; the partial file is kept, so pull again to continue."
        )


def _connect(opener: OpenerDirector, url: str, start: int) -> HTTPResponse | HTTPError:
    try:
        return opener.open(_request(url, start), timeout=TIMEOUT_SECONDS)
    except HTTPError as error:
        if error.code == 416 and start > 0:
            return error
        error.close()
        kind = InterruptedDownloadError if error.code in BUSY_STATUSES else DownloadError
        raise kind(f"{_redacted(url)} answered {error.code} {error.reason}.") from error
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        host = urlsplit(_redacted(url)).netloc
        raise InterruptedDownloadError(f"{host} could not be reached ({reason}).") from error


def _request(url: str, start: int) -> Request:
    parts = urlsplit(url)
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    request = Request(bare, headers={"User-Agent": "minigen"})
    if parts.username is not None:
        account = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        token = base64.b64encode(account.encode()).decode()
        # Another host to which the server redirects must not get the password.
        request.add_unredirected_header("Authorization", f"Basic {token}")
    if start > 0:
        request.add_header("Range", f"bytes={start}-")
    return request


def _chunks(response: HTTPResponse | HTTPError, url: str) -> Iterator[bytes]:
    """Yield the body; convert network errors, so that any other `OSError` is the disk's."""
    try:
        while chunk := response.read(CHUNK_BYTES):
            yield chunk
    except (OSError, HTTPException) as error:
        raise InterruptedDownloadError(
            f"The connection to {_redacted(url)} was lost ({error!r}); "
            "the partial file is kept, so pull again to continue."
        ) from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
