"""Tries each new form out in a separate process, and ends the process if it exceeds its limits.

Some forms take a library for grammars minutes or all memory, and some crash it, and with it the
whole process. A form that passes its trial is then compiled again, at the same small cost.
"""

import json
import os
import queue
import subprocess
import threading
import weakref
from contextlib import suppress
from dataclasses import asdict

import psutil

from minigen.child_process import start_module
from minigen.errors import ParamsError, StartError
from minigen.sampling.grammar_compiler import Vocabulary, refused
from minigen.sampling.structured_outputs import StructuredOutputsParams

MOST_SECONDS = 0.7  # of processor time for one form
MOST_BYTES = 512 * 2**20  # of memory for one form
_MOST_WAITED = 30.0  # seconds, on a machine whose processors are busy with other things
_START_SECONDS = 60.0
_WATCHED_EVERY = 0.02


class GrammarTrial:
    """Tries forms out for one vocabulary, one at a time.

    The process starts with this object, and again after a form has ended it. It ends when this
    object is deleted, or when the parent process ends.
    """

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._running = _Running(vocabulary)

    def check(self, params: StructuredOutputsParams) -> None:
        """Raise `ParamsError` for a form that cannot be compiled within the limits."""
        if not self._running.is_usable():
            self._running = _Running(self._vocabulary)
        try:
            error = self._running.ask(params)
        finally:
            if not self._running.is_usable():  # so that the next form need not wait for the start
                self._running = _Running(self._vocabulary)
        if error:
            raise ParamsError(error)


class _Running:
    """A process that has started."""

    def __init__(self, vocabulary: Vocabulary):
        self._owner = os.getpid()
        try:
            self._process = start_module(
                "minigen.sampling.grammar_compiler",
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise StartError(
                f"No form can be tried out, because its process could not be started ({error})."
            ) from None
        self.close = weakref.finalize(self, _end, self._process, self._owner)
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(
            target=_talk,
            args=(self._process, vocabulary, self._answers),
            name="minigen-grammar-trial",
            daemon=True,
        ).start()
        self._has_started = False

    def is_usable(self) -> bool:
        """Return whether the process runs, and was started by this process, not before a fork."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, params: StructuredOutputsParams) -> str:
        """Return the error that the form gives, or nothing. Raises `ParamsError` past a limit."""
        self._wait_for_start()
        seconds_before, bytes_before = self._used()
        _send(
            self._process,
            {name: value for name, value in asdict(params).items() if value is not None},
        )
        waited = 0.0
        while waited < _MOST_WAITED:
            try:
                answer = self._answers.get(timeout=_WATCHED_EVERY)
            except queue.Empty:
                waited += _WATCHED_EVERY
            else:
                if answer is None:
                    raise self._ended(params, "the library that compiles it fails on it")
                return answer
            seconds, num_bytes = self._used()
            if num_bytes > bytes_before + MOST_BYTES:
                raise self._ended(params, f"it takes more than {MOST_BYTES // 2**20} MiB")
            if seconds - seconds_before > MOST_SECONDS:
                break
        raise self._ended(params, f"it takes more than {MOST_SECONDS:g} seconds to compile")

    def _wait_for_start(self) -> None:
        if self._has_started:
            return
        with suppress(queue.Empty):
            self._has_started = self._answers.get(timeout=_START_SECONDS) is not None
        if not self._has_started:
            self.close()
            raise StartError(
                "No form can be tried out, because its process does not start "
                "(`python -m minigen.sampling.grammar_compiler` should wait for input)."
            )

    def _used(self) -> tuple[float, int]:
        """Return the processor time in seconds and the bytes of memory so far."""
        try:
            process = psutil.Process(self._process.pid)
            times = process.cpu_times()
            return times.user + times.system, process.memory_info().rss
        except psutil.Error:
            return 0.0, 0  # it has ended

    def _ended(self, params: StructuredOutputsParams, reason: str) -> ParamsError:
        self.close()
        return refused(params, reason)


def _talk(
    process: "subprocess.Popen[bytes]",
    vocabulary: Vocabulary,
    answers: "queue.SimpleQueue[str | None]",
) -> None:
    """Send the vocabulary, then collect the answers; None is the last one."""
    _send(process, {**asdict(vocabulary), "tokens": [each.hex() for each in vocabulary.tokens]})
    assert process.stdout is not None
    with process.stdout as stream:
        for line in stream:
            answers.put(json.loads(line))
    answers.put(None)


def _send(process: "subprocess.Popen[bytes]", value: object) -> None:
    assert process.stdin is not None
    with suppress(OSError, ValueError):  # the process has ended, and so do its answers
        process.stdin.write(json.dumps(value).encode() + b"\n")
        process.stdin.flush()


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    if os.getpid() == owner:
        process.kill()
        process.wait()
        assert process.stdin is not None
        with suppress(OSError):  # unsent data is discarded
            process.stdin.close()
