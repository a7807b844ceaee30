"""Measures part by part, so that a failing part does not cost the results of another.

A part that raises is recorded as failed. A part that ends its process, makes the device unusable,
or takes too long, ends only its process: the remaining parts are measured in a new one. This module
knows nothing about GPUs or torch.
"""

import faulthandler
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Results = dict[str, Any]
Part = Callable[[Results], Any]  # takes the results so far and returns its own
ENDED = {"failed": "its process ended; its stderr may say why"}
NO_TIME = {"left out": "there was no time left"}
LAST_SECONDS = 60  # the time after which the last started part is cut off


def read(path: Path) -> Results:
    """Return the results in a file; empty if there is no file."""
    found: Results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def write(path: Path, name: str, result: Any) -> None:
    """Write one part's result into the file; the others stay as they are."""
    results = read(path) | {name: result}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def measure(
    path: Path,
    parts: Mapping[str, Part],
    until: float,
    most_seconds: float,
    tidy: Callable[[], None],
) -> None:
    """Measure each part in this process and record it; parts already in the file are done.

    A part that takes more than `most_seconds` ends the process. No part starts after `until` (in
    `time.time`), or runs more than a minute longer. `tidy` is called after each part, and may raise
    if the process is no longer usable.
    """
    for name in (name for name in parts if name not in read(path)):
        if time.time() > until:
            write(path, name, NO_TIME)
            continue
        print(f"{name} ...", flush=True)
        started = time.perf_counter()
        write(path, name, ENDED)
        left = until - time.time() + LAST_SECONDS
        faulthandler.dump_traceback_later(min(most_seconds, left), exit=True)
        result = _outcome(parts[name], read(path))
        faulthandler.cancel_dump_traceback_later()
        write(path, name, result)
        print(f"{name} ({time.perf_counter() - started:.0f} s): {json.dumps(result)}", flush=True)
        tidy()


def _outcome(part: Part, results: Results) -> Any:
    try:
        return part(results)
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"[:2000]}


def supervise(path: Path, names: list[str], start: Callable[[], int]) -> list[str]:
    """Call `start`, which measures in its own process, until all parts are in the file.

    `start` returns the process's exit status. Returns the names of the parts that failed. Earlier
    contents of the file are dropped.
    """
    path.unlink(missing_ok=True)
    missing = names
    while missing:
        status = start()
        still = [name for name in names if name not in read(path)]
        if len(still) == len(missing):
            for name in still:
                write(path, name, {"failed": f"its process ended at once, with status {status}"})
            break
        missing = still
    failed = [name for name in names if _has_failed(read(path)[name])]
    print(f"{len(names) - len(failed)} of {len(names)} parts measured: {path}", file=sys.stderr)
    return failed


def _has_failed(result: Any) -> bool:
    return isinstance(result, dict) and "failed" in result
