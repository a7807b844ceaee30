"""Checks a file's hash once, and remembers a right result until the file changes.

    model.gguf   98 MB, 0.1 to 0.2 s to hash
    .verified    a line of JSON: the file's hash, size, times and inode when its hash was right

Every start reads this line; a file with another size, time or inode is hashed again. Disk errors
change none of these, so `minigen pull` and `minigen doctor` always compute the hash.
"""

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

CLOCK_STEP_SECONDS = 2.0  # coarsest time stamps of a file system; later changes may be invisible


def has_sha256(path: Path, sha256: str) -> bool:
    """Return whether `path` is a readable file whose content has this sha256 (in hexadecimal)."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError:
        return False


def is_right(path: Path, sha256: str, memory: Path) -> bool:
    """Return whether the file has this hash; an unchanged file is not hashed again."""
    facts = _facts(path)
    if facts is not None and _remembered(memory) == {"sha256": sha256, **facts}:
        return True
    return is_right_now(path, sha256, memory)


def is_right_now(path: Path, sha256: str, memory: Path) -> bool:
    """Hash the file, and record a right hash in the file `memory` if that is writable."""
    before = _facts(path)
    if not has_sha256(path, sha256):
        return False
    if before is not None and before == _facts(path) and not _is_fresh(before):
        _remember(memory, {"sha256": sha256, **before})
    return True


def _facts(path: Path) -> dict[str, int | str] | None:
    """Return the attributes that show a change of the file: path, size, times and inode."""
    try:
        found = path.stat()
    except OSError:
        return None
    return {
        "path": str(path.absolute()),
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "inode": found.st_ino,
    }


def _is_fresh(facts: dict[str, int | str]) -> bool:
    """Return whether the file changed so recently that a new change may get the same time."""
    newest = max(int(facts["mtime_ns"]), int(facts["ctime_ns"]))
    return time.time_ns() - newest < CLOCK_STEP_SECONDS * 1e9


def _remembered(memory: Path) -> object:
    try:
        return json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _remember(memory: Path, facts: dict[str, int | str]) -> None:
    """Write the record atomically; if that fails, the next start hashes the file again."""
    part = memory.with_name(f"{memory.name}.{os.getpid()}.part")
    with contextlib.suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(json.dumps(facts) + "\n", encoding="utf-8")
            os.replace(part, memory)
        finally:
            part.unlink(missing_ok=True)
