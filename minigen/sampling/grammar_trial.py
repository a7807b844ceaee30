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
from typing import BinaryIO

import psutil

from minigen.child_process import start_module
from minigen.errors import GrammarError, ParamsError
from minigen.sampling.grammar_compiler import Vocabulary, refused
from minigen.sampling.structured_outputs import StructuredOutputsParams

MOST_SECONDS = 0.7  # of processor time for one form
MOST_BYTES = 512 * 2**20  # of memory for one form
_MOST_WAITED = 30.0  # seconds, on a machine whose processors are busy with other things
_START_SECONDS = 60.0
_WATCHED_EVERY = 0.02


class GrammarTrial:
    """Tries forms out for one vocabulary, one at a time.

    The process starts with the first form, and again after a form has ended it. It ends when this
    object is deleted, or when the parent process ends.
    """

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._running: _Running | None = None

    def check(self, params: StructuredOutputsParams) -> None:
        """Raise `ParamsError` for a form that cannot be compiled within the limits."""
        if self._running is None or not self._running.is_usable():
            self._running = _Running(self._vocabulary)
        error = self._running.ask(params)
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
            raise GrammarError(
                f"No form can be tried out, because its process could not be started ({error})."
            ) from None
        self.close = weakref.finalize(self, _end, self._process, self._owner)
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(
            target=_read_answers,
            args=(self._process.stdout, self._answers),
            name="minigen-grammar-trial",
            daemon=True,
        ).start()
        sent = {**asdict(vocabulary), "tokens": [each.hex() for each in vocabulary.tokens]}
        self._send(sent)
        if self._answer(_START_SECONDS) is None:
            self.close()
            raise GrammarError(
                "No form can be tried out, because its process does not start "
                "(`python -m minigen.sampling.grammar_compiler` should wait for input)."
            )
        self._idle_bytes = psutil.Process(self._process.pid).memory_info().rss

    def is_usable(self) -> bool:
        """Return whether the process runs, and was started by this process, not before a fork."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, params: StructuredOutputsParams) -> str:
        """Return the error that the form gives, or nothing. Raises `ParamsError` past a limit."""
        seconds_before = self._used()[0]
        self._send({name: value for name, value in asdict(params).items() if value is not None})
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
            if num_bytes > self._idle_bytes + MOST_BYTES:
                raise self._ended(params, f"it takes more than {MOST_BYTES // 2**20} MiB")
            if seconds - seconds_before > MOST_SECONDS:
                break
        raise self._ended(params, f"it takes more than {MOST_SECONDS:g} seconds to compile")

    def _answer(self, timeout: float) -> str | None:
        try:
            return self._answers.get(timeout=timeout)
        except queue.Empty:
            return None

    def _send(self, value: object) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # the process has ended, and so do its answers
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()

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


def _read_answers(stream: BinaryIO, answers: "queue.SimpleQueue[str | None]") -> None:
    with stream:
        for line in stream:
            answers.put(json.loads(line))
    answers.put(None)


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    if os.getpid() == owner:
        process.kill()
        process.wait()
        assert process.stdin is not None
        with suppress(OSError):  # unsent data is discarded
            process.stdin.close()
