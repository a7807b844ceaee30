"""Runs a chat template in a separate process, and ends the process if it exceeds its limits."""

import marshal
import os
import queue
import subprocess
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO

import psutil

from minigen.child_process import start_module
from minigen.errors import ChatTemplateError, PromptError, StartError
from minigen.tokenizer.template_sandbox import MAX_MESSAGE, TemplateLimits
from minigen.tokenizer.template_worker import ENCODING, Reply, frame, opening, read_frame

_START_SECONDS = 60.0  # time for a new process to start on a busy machine
_WATCHED_AFTER = 0.05  # seconds; nearly every rendering is finished by then
_WATCHED_EVERY = 0.01
_CHARACTER_BYTES = 4  # at most, in UTF-8


class TemplateProcess:
    """Renders one template, one request at a time; may be called from any thread.

    The process starts with the first request (in about 0.1 s), and again after it was ended for
    exceeding a limit. It ends when this object is deleted, or when the parent process ends.
    """

    def __init__(self, source: str, limits: TemplateLimits) -> None:
        self._source, self._limits = source, limits
        self._lock = threading.Lock()
        self._running: _Running | None = None

    def render(self, variables: Mapping[str, object]) -> str:
        """Return the template's text with these variables.

        Raises `ChatTemplateError` if the template refuses, fails or reaches a limit, `PromptError`
        for variables that are not plain data.
        """
        request = frame(_packed(variables))
        with self._lock:
            if self._running is None or not self._running.is_usable():
                self._running = _Running(self._source, self._limits)
            try:
                return self._running.ask(request)
            except _LimitError as error:
                self._running.close()
                raise ChatTemplateError(f"The chat template {error}, so it was stopped.") from None


class _LimitError(Exception):
    """A rendering exceeded a limit; the message states which one."""


class _Running:
    """A process that has started."""

    def __init__(self, source: str, limits: TemplateLimits) -> None:
        self._limits, self._owner = limits, os.getpid()
        try:
            self._process = start_module(
                "minigen.tokenizer.template_worker",
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise StartError(
                f"The chat template cannot run: its process could not be started ({error})."
            ) from None
        self.close = weakref.finalize(self, _end, self._process, self._owner)
        self._replies: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        longest = 1 + _CHARACTER_BYTES * (limits.output_length + 2 * MAX_MESSAGE)
        threading.Thread(
            target=_read_replies,
            args=(self._process.stdout, self._replies, longest),
            name="chat template",
            daemon=True,
        ).start()
        self._wait_for_start()
        self._idle_bytes = psutil.Process(self._process.pid).memory_info().rss
        self._send(opening(source, limits))

    def is_usable(self) -> bool:
        """Return whether the process runs, and was started by this process, not before a fork."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, request: bytes) -> str:
        """Return the text of one rendering. Raises `ChatTemplateError` or `_LimitError`."""
        self._send(request)
        wait, cpu_seconds_before = _WATCHED_AFTER, None
        while True:
            try:
                return self._text(self._replies.get(timeout=wait))
            except queue.Empty:
                cpu_seconds = self._check_memory_and_time(cpu_seconds_before)
                wait, cpu_seconds_before = _WATCHED_EVERY, cpu_seconds_before or cpu_seconds

    def _wait_for_start(self) -> None:
        try:
            started = self._replies.get(timeout=_START_SECONDS)
        except queue.Empty:
            started = None
        if started is None:
            self.close()
            raise StartError(
                "The chat template cannot run: its process does not start "
                "(`python -m minigen.tokenizer.template_worker` should wait for input)."
            )

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except OSError:
            raise self._broken() from None

    def _text(self, reply: bytes | None) -> str:
        if reply is None:
            raise self._broken()
        try:
            kind, text = Reply(reply[:1]), reply[1:].decode(*ENCODING)
        except ValueError:
            raise self._broken() from None
        if kind is Reply.PROMPT:
            return text
        if kind is Reply.REFUSED:
            raise ChatTemplateError(f"The chat template refuses these messages: {text}")
        if kind is Reply.FAILED:
            raise ChatTemplateError(f"The chat template fails with {text}")
        if kind is Reply.TOO_LONG:
            raise _LimitError(f"writes more than {self._limits.output_length:,} characters")
        raise self._beyond_memory()

    def _check_memory_and_time(self, cpu_seconds_before: float | None) -> float:
        """Return the processor time used so far, in seconds; raise if a limit is exceeded."""
        try:
            process = psutil.Process(self._process.pid)
            used_bytes, times = process.memory_info().rss, process.cpu_times()
        except psutil.Error:
            raise self._broken() from None
        if used_bytes > self._idle_bytes + self._limits.memory_bytes:
            raise self._beyond_memory()
        cpu_seconds = times.user + times.system
        if cpu_seconds - (cpu_seconds_before or cpu_seconds) > self._limits.cpu_seconds:
            raise _LimitError(f"computes for more than {self._limits.cpu_seconds:g} seconds")
        return cpu_seconds

    def _beyond_memory(self) -> _LimitError:
        return _LimitError(f"takes more than {self._limits.memory_bytes // 2**20:,} MiB of memory")

    def _broken(self) -> ChatTemplateError:
        self.close()
        return ChatTemplateError(
            f"The chat template broke the process that renders it "
            f"(exit status {self._process.returncode})."
        )


def _read_replies(
    stream: BinaryIO, replies: "queue.SimpleQueue[bytes | None]", longest: int
) -> None:
    with stream:
        while (reply := read_frame(stream, longest)) is not None:
            replies.put(reply)
    replies.put(None)


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    if os.getpid() == owner:
        process.kill()
        process.wait()
        assert process.stdin is not None
        with suppress(OSError):  # unsent data is discarded
            process.stdin.close()


def _packed(variables: Mapping[str, object]) -> bytes:
    """Return variables in `marshal`'s format, which holds plain data only."""
    try:
        return marshal.dumps(dict(variables))
    except ValueError:
        pass
    try:
        return marshal.dumps(_plain(variables))
    except (ValueError, RecursionError):
        wrong = next((name for name in variables if not _is_packable(variables[name])), "")
        raise PromptError(
            f"Variables of a chat template must be text, numbers, lists and dictionaries, but "
            f"{wrong!r} is something else."
        ) from None


def _plain(value: Any) -> Any:
    """Return the value with its dictionaries, lists and strings converted to built-in types."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _is_packable(value: object) -> bool:
    try:
        marshal.dumps(_plain(value))
    except (ValueError, RecursionError):
        return False
    return True
