"""Judge one answer in a forked process with limits, away from the network and from other answers.

The process that forks never runs an answer's code: a part that hangs, forks, exits, kills Python or
takes the memory ends only its own box. Where Linux allows namespaces, a box has its own processes
and no network; elsewhere `isolation` says what is missing.
"""

import ast
import ctypes
import json
import linecache
import os
import resource
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import psutil

from minigen_course.grading.check import end_with_parent, kill_all
from minigen_course.grading.exercise import Check, Wrong
from minigen_course.grading.hunt import Caught
from minigen_course.grading.namespaces import first_change, namespaces_now
from minigen_course.grading.stub import STILL_EMPTY, find_object, is_stub
from minigen_course.handout.answers import defined_by
from minigen_course.kit.collect import Cell
from minigen_course.kit.screen import OWN, first_name

FILE = "<answer"  # how the file names of an answer's code begin
WATCHED_SECONDS = 2  # of computing, for what is done with an answer after its checks
MOST_SAID = 20_000  # characters of what is said about it: a pipe that is not read holds 64 KiB
TOO_MUCH_MEMORY = "takes more memory than it may"
NEW_USERS, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
BARRED = {  # events of sys.audit that an answer may not cause
    "os.fork": "starts a process",
    "os.forkpty": "starts a process",
    "os.posix_spawn": "starts a process",
    "os.system": "starts a process",
    "os.exec": "starts a process",
    "os.kill": "ends a process",
    "os.killpg": "ends a process",
    "subprocess.Popen": "starts a process",
    "socket.__new__": "opens a socket",
    "ctypes.dlopen": "calls into C",
    "sys._getframe": "reads the grading process",
    "gc.get_objects": "reads the grading process",
    "gc.get_referrers": "reads the grading process",
    "gc.get_referents": "reads the grading process",
    "sys.settrace": "reads the grading process",
    "sys.setprofile": "reads the grading process",
    "sys.addaudithook": "reads the grading process",
}
CHECKED = ("builtins", "torch", "torch._tensor")  # with all of minigen: what may not be changed
THROUGH = set(  # modules of Python that do what their caller asks for
    "os io pathlib shutil glob tempfile codecs posixpath genericpath subprocess socket ctypes pty "
    "multiprocessing concurrent asyncio threading inspect linecache tokenize".split()
)
FILES = {"open", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.listdir", "shutil.rmtree"}


OUT_OF_TIME = "did not finish within"  # how the reason begins


@dataclass(frozen=True)
class Limits:
    """What one answer may use: processor seconds, bytes of memory beyond ours, bytes of a file.

    `submission_seconds` is what the answers of one submission that were stopped may use together;
    answers after that are not run.
    """

    seconds: float = 10.0
    memory: int = 2 << 30
    file: int = 10 << 20
    submission_seconds: float = 60.0

    def has_time(self, num_stopped: int) -> bool:
        """Return whether another answer may run after this number was stopped."""
        return num_stopped == 0 or (num_stopped + 1) * self.seconds <= self.submission_seconds


@dataclass(frozen=True)
class Outcome:
    """What happened to an answer: the number of checks passed, and a sentence per failed check.

    `ended` says why the box ended before the last check; it is empty if it did not. `seen` is what
    `watch` returned after the checks; if that failed, `unseen` says why. Neither can be trusted.
    """

    num_checks: int
    passed: tuple[int, ...]
    failed: dict[int, str] = field(default_factory=dict)
    ended: str = ""
    seen: str = ""
    unseen: str = ""


class Barred(BaseException):
    """An answer did what no answer may do; not an `Exception`, so that it cannot be swallowed."""


@cache
def isolation() -> str:
    """Return what keeps a box from others, as a sentence for the instructor."""
    if _in_fork(lambda: _unshare(NEW_PROCESSES | NEW_NETWORK)):
        return "own processes, no network"
    return (
        "this system allows no namespaces: answers are stopped from opening sockets and starting "
        "processes by Python's audit hook alone"
    )


def judge_in_box(
    cells: Sequence[Cell],
    take: Callable[[ModuleType], Any],
    checks: Sequence[Check],
    dotted: str,
    limits: Limits,
    watch: Callable[[Any], str] | None = None,
) -> Outcome:
    """Run an answer's definitions and all checks on the part that `take` finds; return the outcome.

    `dotted` is the full name of the package's own part, which an answer may not call. `watch` gets
    the part after the last check; what happens then changes nothing about the checks.

    `cells` are run in order in an empty module; only the marked one must succeed. The caller's
    process is forked, so it should have imported what the checks need, and have no other threads.
    """
    word = secrets.token_hex()
    read, write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="minigen-box-") as home:
        box = os.fork()
        if box == 0:
            os.close(read)
            _box(write, word, home, limits, cells, take, checks, dotted, watch)
        os.close(write)
        try:
            why = _watch(box, limits)
        except BaseException:  # Ctrl-C, perhaps: the box is in a session of its own
            kill_all(box)
            os.waitpid(box, 0)
            os.close(read)
            raise
        with os.fdopen(read, encoding="utf-8", errors="replace") as pipe:
            lines = pipe.read().splitlines()
    return _outcome(lines, word, len(checks), why)


def _outcome(lines: list[str], word: str, num_checks: int, why: str) -> Outcome:
    """Return what the lines of a box say; those after its end tell of no checks."""
    passed, failed, ended = [], {}, why
    seen, unseen = "", ""
    is_complete = False
    for line in lines:
        with suppress(ValueError, TypeError, AttributeError):
            said = json.loads(line)
            if said.get("word") != word:
                continue
            if said["number"] == "seen":
                seen = said["message"]
            elif said["number"] == "unseen":
                unseen = said["message"]
            elif is_complete:
                continue
            elif said["number"] == "end":
                is_complete, ended = True, said["message"]
            elif said["message"]:
                failed[said["number"]] = said["message"]
            else:
                passed.append(said["number"])
    if not is_complete and not ended:
        ended = "ended Python"
    return Outcome(num_checks, tuple(passed), failed, ended, seen, unseen)


def _box(
    pipe: int,
    word: str,
    home: str,
    limits: Limits,
    cells: Sequence[Cell],
    take: Callable[[ModuleType], Any],
    checks: Sequence[Check],
    dotted: str,
    watch: Callable[[Any], str] | None,
) -> None:
    """Isolate this process, and judge in a process below it; never return."""
    status = 1
    try:
        os.setsid()
        _unshare(NEW_PROCESSES | NEW_NETWORK)
        end_with_parent()
        inner = os.fork()  # the first process of its namespace: when it ends, all in it end
        if inner:
            os.close(pipe)
            _, status = os.waitpid(inner, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        end_with_parent()
        _enter(home, limits)
        if "torch" in sys.modules:  # it makes a new pool after a fork: not twice, in two threads
            sys.modules["torch"].set_num_threads(1)
        own = find_object(dotted)
        _close(dotted)
        take = partial(_taken, take, (own, find_object(dotted)))

        def say(number: int | str, message: str) -> None:
            line = json.dumps({"word": word, "number": number, "message": message})
            os.write(pipe, f"{line}\n".encode())

        part = _judge(say, cells, take, checks, Path(home))
        if part is not None and watch is not None:
            _watched(say, watch, part)
        status = 0
    finally:
        os._exit(status)


def _enter(home: str, limits: Limits) -> None:
    """Give this process its home and its limits."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    os.chdir(home)
    os.environ |= {"HOME": home, "TMPDIR": home}
    tempfile.tempdir = home  # it may be known from before: a check's files belong to the answer's
    used = psutil.Process().memory_info().vms
    whole = int(limits.seconds) + 1
    for kind, limit in {
        resource.RLIMIT_CPU: whole,
        resource.RLIMIT_AS: used + limits.memory,
        resource.RLIMIT_FSIZE: limits.file,
        resource.RLIMIT_CORE: 0,
    }.items():
        resource.setrlimit(kind, (limit, limit))


def _close(dotted: str) -> None:
    """Let the package's own part raise `Barred` when an answer calls it, under whatever name."""
    own = find_object(dotted)
    if isinstance(own, type):
        own.__init__ = _closed(own.__init__)  # type: ignore[misc]
    elif isinstance(own, FunctionType):
        closed = _closed(own)
        for name, module in list(sys.modules.items()):
            if first_name(name) in OWN:
                for key in [key for key, value in vars(module).items() if value is own]:
                    setattr(module, key, closed)


def _closed(own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_code.co_filename.startswith(FILE):
            raise Barred("uses the package's own part")
        return own(*args, **kwargs)

    del call.__wrapped__
    return call


def _taken(take: Callable[[ModuleType], Any], own: Sequence[Any], module: ModuleType) -> Any:
    """Return an answer's part. Raises `Barred` for the package's own, also as a base or wrapped."""
    part = take(module)
    for each in part if isinstance(part, Caught) else [part]:
        while hasattr(each, "__wrapped__") or isinstance(each, partial):
            each = each.func if isinstance(each, partial) else each.__wrapped__
        bases = each.__mro__ if isinstance(each, type) else [each, getattr(each, "__func__", None)]
        if any(base is its for base in bases for its in own):
            raise Barred("uses the package's own part")
    return part


def _judge(
    say: Callable[[int | str, str], None],
    cells: Sequence[Cell],
    take: Callable[[ModuleType], Any],
    checks: Sequence[Check],
    home: Path,
) -> Any:
    """Say what each check finds, and the end; return the part, None if something ended it early."""
    before = namespaces_now(CHECKED)
    module = ModuleType("__main__")
    sys.addaudithook(_guard(home))
    try:
        _define(cells, module)
        part = take(module)
        if part is None or is_stub(part):
            say("end", STILL_EMPTY if part is not None else "is not defined.")
            return None
        for number, check in enumerate(checks, 1):
            say(number, _verdict(check, part))
            changed = first_change(before)
            if changed:
                say("end", f"changes minigen itself: {changed}")
                return None
    except Barred as barred:
        say("end", str(barred))
        return None
    except MemoryError:
        say("end", TOO_MUCH_MEMORY)
        return None
    except BaseException as error:
        say("end", f"raised {type(error).__name__}: {str(error)[:300]}")
        return None
    say("end", "")
    return part


def _watched(say: Callable[[int | str, str], None], watch: Callable[[Any], str], part: Any) -> None:
    """Say what `watch` returns, from a process of its own with a limit of its own."""
    child = os.fork()
    if child == 0:
        try:
            end_with_parent()
            resource.setrlimit(resource.RLIMIT_CPU, (WATCHED_SECONDS, WATCHED_SECONDS))
            text = watch(part)
            if len(text) > MOST_SAID:
                say("unseen", "did more than can be shown")
            else:
                say("seen", text)
        except BaseException as error:
            say("unseen", f"raised {type(error).__name__}: {str(error)[:300]}")
        finally:
            os._exit(0)
    until = time.monotonic() + 2 * WATCHED_SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if os.waitstatus_to_exitcode(status) != 0:
                say("unseen", f"did not finish within {WATCHED_SECONDS} s")
            return
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    say("unseen", f"did not finish within {WATCHED_SECONDS} s")


def _define(cells: Sequence[Cell], module: ModuleType) -> None:
    """Run the cells; forgive what is wrong in any but the marked one, whose definitions stay."""
    answer: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        name = f"{FILE} {number}>"
        lines = cell.source.splitlines(keepends=True)
        linecache.cache[name] = (len(cell.source), None, lines, name)  # Triton reads sources
        try:
            exec(compile(cell.source, name, "exec"), vars(module))
        except Exception:
            if cell.marked:
                raise
        if cell.marked:
            answer = {each: vars(module)[each] for each in defined_by(ast.parse(cell.source).body)}
    vars(module).update(answer)


def _verdict(check: Check, part: Any) -> str:
    """Return an empty text if the check passes, and otherwise what it says."""
    aim = (check.__doc__ or check.__name__).strip().splitlines()[0].rstrip(":.")
    try:
        check(part)
    except Wrong as wrong:
        return f"({aim}): {str(wrong)[:2000]}"
    except NotImplementedError:
        return STILL_EMPTY
    except (Barred, MemoryError):
        raise
    except BaseException as error:
        return f"({aim}) raised {type(error).__name__}: {str(error)[:500]}"
    return ""


def _guard(home: Path) -> Callable[[str, tuple[Any, ...]], None]:
    """Return an audit hook that raises `Barred` if an answer's own code causes a barred event."""
    get_frame = sys._getframe
    busy = [False]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if busy[0] or (event not in BARRED and event not in FILES):
            return
        busy[0] = True
        try:
            if not _caused_by_an_answer(get_frame(1)):
                return
            if event in BARRED:
                raise Barred(f"{BARRED[event]} ({event})")
            path = arguments[0] if arguments else ""
            if isinstance(path, str | bytes) and not _inside(os.fsdecode(path), home):
                raise Barred("opens files outside its own folder")
        finally:
            busy[0] = False

    return hook


def _caused_by_an_answer(frame: Any) -> bool:
    """Return whether an answer's code is the caller, directly or through Python's own modules.

    What other libraries do for it does not count: torch reads frames, imports open files.
    """
    while frame is not None and first_name(frame.f_globals.get("__name__", "")) in THROUGH:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(FILE)


def _inside(path: str, home: Path) -> bool:
    return Path(path).resolve().is_relative_to(home.resolve())


def _watch(box: int, limits: Limits) -> str:
    """Wait for a box; kill it if it computes or waits too long. Return why it was killed."""
    used, used_since = 0.0, time.monotonic()
    why = ""
    while True:
        ended, status = os.waitpid(box, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            if code == (-signal.SIGXCPU & 0xFF) or code == (-signal.SIGKILL & 0xFF):
                why = why or f"{OUT_OF_TIME} {limits.seconds:g} s of computing"
            return why
        now = _cpu_seconds(box)
        if now > used + 0.01 * (time.monotonic() - used_since):
            used, used_since = now, time.monotonic()
        if used > limits.seconds or time.monotonic() - used_since > limits.seconds:
            why = f"{OUT_OF_TIME} {limits.seconds:g} s; is there a loop that never ends?"
            kill_all(box)
        time.sleep(0.02)


def _cpu_seconds(process_id: int) -> float:
    total = 0.0
    with suppress(psutil.Error):
        process = psutil.Process(process_id)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                times = each.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
    return total


def _unshare(flags: int) -> bool:
    """Leave the caller's namespaces; return whether the system allows it."""
    if not sys.platform.startswith("linux"):
        return False
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    if unshare(flags) == 0:
        return True
    return bool(unshare(flags | NEW_USERS) == 0)


def _in_fork(call: Callable[[], bool]) -> bool:
    """Return what a call returns in a forked process."""
    child = os.fork()
    if child == 0:
        os._exit(0 if call() else 1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0
