"""Run a chapter's checks on a learner's part, in a separate process.

A part that loops forever, uses up the memory or kills Python ends only that process, and never
counts as passed.
"""

import ctypes
import inspect
import io
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import cloudpickle
import psutil

from minigen_course.grading.exercise import exercises
from minigen_course.grading.stub import STILL_EMPTY, is_stub

SECONDS = 30.0  # of processor time
_WATCHED_EVERY = 0.1
_SIGNAL_OF_A_PARENT_THAT_ENDS = 1  # PR_SET_PDEATHSIG of prctl(2)
_WAITING_SHARE = 0.01  # of a core: a process that uses less is waiting


@dataclass(frozen=True)
class Result:
    """The result of checking one part; `message` says what is wrong, or what passed.

    `each` says of every check that was run whether it passed; it is empty if the process ended.
    """

    name: str
    passed: bool
    message: str
    each: tuple[bool, ...] = ()

    def __str__(self) -> str:
        return f"{'✓' if self.passed else '✗'} {self.name}: {self.message}"


def check(chapter: int | str, *, hint: int = 0, seconds: float = SECONDS, **parts: Any) -> Any:
    """Check your own parts of a chapter: `mine = check(16, keep_top_p=my_keep_top_p)`.

    Prints what passed, or the first thing that is wrong; `hint=1` adds a hint to it, `hint=2` a
    second and clearer one, and so on. Returns your part if it passed, otherwise the package's own,
    so that the next cells run either way (several parts are returned as a tuple). Raises
    `ValueError` for a name that the chapter does not have.
    """
    known = exercises(f"{int(chapter):02}")
    if not parts:
        raise ValueError(f"Name the part to check, for example {next(iter(known))}=mine.")
    for name in parts:
        if name not in known:
            raise ValueError(f"Chapter {chapter} has no {name}; it has {', '.join(known)}.")
    usable = []
    for name, part in parts.items():
        result = judge(f"{int(chapter):02}", name, part, seconds)
        print(result)
        if not result.passed:
            print_hints(known[name].hints, hint)
        usable.append(part if result.passed else known[name].solution)
    return usable[0] if len(usable) == 1 else tuple(usable)


def judge(
    chapter: str, name: str, part: Any, seconds: float = SECONDS, which: str = "first"
) -> Result:
    """Run an exercise's checks on `part` in another process, for at most `seconds` of CPU time.

    `name` is that of an exercise of the chapter, or of its hunt. `which` is `first` (up to the
    first check that fails), `each`, or a course's seed as text, for the cases that it draws.
    """
    if is_stub(part):  # there is nothing to run
        return Result(name, False, STILL_EMPTY)
    word = secrets.token_hex()  # a part that does not know it cannot forge a pass
    with tempfile.TemporaryDirectory() as folder:
        verdict = Path(folder) / "verdict.json"
        try:
            sent = pickled(part)
        except Exception as error:
            return Result(name, False, f"cannot be sent to the checking process: {error}")
        given, said = Path(folder) / "part.pickle", Path(folder) / "stderr.txt"
        given.write_bytes(sent)
        command = [sys.executable, "-m", "minigen_course.grading.judge", chapter, name]
        with given.open("rb") as stdin, said.open("wb") as stderr:
            process = subprocess.Popen(
                [*command, str(verdict), word, which],
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
            finished = _finishes(process, seconds)
        if not finished:
            message = f"did not finish within {seconds:g} s; is there a loop that never ends?"
            return Result(name, False, message)
        found = _read(verdict)
        if found.get("word") != word:
            tail = said.read_text("utf-8", errors="replace").strip().splitlines()[-1:]
            message = f"ended Python (exit status {process.returncode}) {' '.join(tail)}".rstrip()
            return Result(name, False, message)
    return Result(name, found["passed"] is True, found["message"], tuple(found["each"]))


def _finishes(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Wait for a process, and return whether it ended by itself.

    It is killed once it has computed for `seconds`, or has waited for `seconds` without computing.
    Time in which other programs use the processor counts for neither.
    """
    used, used_since = 0.0, time.monotonic()
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_WATCHED_EVERY)
                return True
            now = _cpu_seconds(process.pid)
            if now > used + _WAITING_SHARE * (time.monotonic() - used_since):
                used, used_since = now, time.monotonic()
            if used > seconds or time.monotonic() - used_since > seconds:
                return False
    finally:
        kill_all(process.pid)
        process.wait()


def kill_all(leader: int) -> None:
    """Kill a session's first process, those below it, and those that it left behind."""
    with suppress(psutil.Error):
        process = psutil.Process(leader)
        for each in (*process.children(recursive=True), process):
            with suppress(psutil.Error):
                each.kill()
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def end_with_parent() -> None:
    """Let Linux kill this process when the one that started it ends, also if that is killed.

    So no part runs on without a process that limits it. Linux takes the thread that started it for
    the parent, so that thread must wait for it. It does nothing on other systems.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_SIGNAL_OF_A_PARENT_THAT_ENDS, signal.SIGKILL)


def _cpu_seconds(process_id: int) -> float:
    """Return the processor time of a process and its children, in seconds."""
    try:
        process = psutil.Process(process_id)
        times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    except psutil.Error:  # one of them ended meanwhile
        return 0.0
    ended = times[0].children_user + times[0].children_system
    return ended + sum(each.user + each.system for each in times)


class _Unwrapping(cloudpickle.Pickler):
    """Pickles functions as they were written, without shape checks or `triton.jit` around them."""

    def reducer_override(self, found: Any) -> Any:
        if isinstance(found, FunctionType) and hasattr(found, "__wrapped__"):
            found = inspect.unwrap(found)
        elif type(found).__module__.startswith("triton.runtime"):  # a kernel
            found = found.fn
        return super().reducer_override(found)


def pickled(part: Any) -> bytes:
    """Return a part and all that it uses of its notebook, as the checking process gets it."""
    buffer = io.BytesIO()
    _Unwrapping(buffer).dump(part)
    return buffer.getvalue()


def _read(verdict: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(verdict.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def print_hints(hints: Sequence[str], level: int) -> None:
    """Print hints up to a level, and say whether there are more."""
    for number, text in enumerate(hints[:level], 1):
        print(f"  hint {number}: {text}")
    if level < len(hints):
        print(f"  (hint={level + 1} shows the next hint)")
