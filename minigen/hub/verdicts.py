"""A file's hash is computed once; that it was right is remembered until the file is touched.

    model.gguf   98 MB, 0.1 to 0.2 s to hash
    .verified    a line of JSON: the file's hash, size, times and inode when its hash was right

Every start looks at the line; a file of another size, time or inode is hashed again. Bytes that
rot on the disk change none of these: `minigen pull` and `minigen doctor` always hash.
"""

import contextlib
import json
import os
import time
from pathlib import Path

from minigen.hub.download import has_sha256

CLOCK_STEP_SECONDS = 2.0  # the coarsest file system's: changes within it may leave no trace


def is_right(path: Path, sha256: str, memory: Path) -> bool:
    """Whether the file has this hash, now or when it was last hashed and as it still is."""
    facts = _facts(path)
    if facts is not None and _remembered(memory) == {"sha256": sha256, **facts}:
        return True
    return is_right_now(path, sha256, memory)


def is_right_now(path: Path, sha256: str, memory: Path) -> bool:
    """Hash the file, and remember a right hash in the file `memory` where that can be written."""
    before = _facts(path)
    if not has_sha256(path, sha256):
        return False
    if before is not None and before == _facts(path) and not _is_fresh(before):
        _remember(memory, {"sha256": sha256, **before})
    return True


def _facts(path: Path) -> dict[str, int | str] | None:
    """What changes with the file: where it is, its size, its times, its inode."""
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
    """Whether the file changed so lately that another change might get the same time."""
    newest = max(int(facts["mtime_ns"]), int(facts["ctime_ns"]))
    return time.time_ns() - newest < CLOCK_STEP_SECONDS * 1e9


def _remembered(memory: Path) -> object:
    try:
        return json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _remember(memory: Path, facts: dict[str, int | str]) -> None:
    """Write whole or not at all; where nothing can be written, the next start hashes again."""
    part = memory.with_name(f"{memory.name}.{os.getpid()}.part")
    with contextlib.suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(json.dumps(facts) + "\n", encoding="utf-8")
            os.replace(part, memory)
        finally:
            part.unlink(missing_ok=True)
