"""The process that renders one chat template: `python -m minigen.tokenizer.template_worker`.

A template is an untrusted program. In this process it may hang, fill the memory or crash the
interpreter without harm: `TemplateProcess` starts this program, watches it and ends it.

stdin: a frame with (source, limits), then one frame per rendering with its variables, in the format
of `marshal`. stdout: an empty frame when the worker is ready, then one frame per rendering: a
letter (see `Reply`) and a text in UTF-8. A frame is the number of its bytes in eight bytes, then
these bytes.
"""

import marshal
import os
import sys
from dataclasses import astuple
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

if sys.platform != "win32":
    import resource

from jinja2 import Template

from minigen.tokenizer.template_sandbox import Refusal, TemplateLimits, environment, sentence

HEADER_BYTES = 8
ENCODING = ("utf-8", "surrogatepass")  # messages may hold lone surrogates


class Reply(Enum):
    """The outcome of a rendering; the text after it is the prompt or the reason."""

    PROMPT = b"p"
    REFUSED = b"r"
    FAILED = b"f"
    TOO_LONG = b"l"
    OUT_OF_MEMORY = b"m"


def opening(source: str, limits: TemplateLimits) -> bytes:
    """Return the first frame."""
    return frame(marshal.dumps((source, *astuple(limits))))


def frame(data: bytes) -> bytes:
    """Return the bytes with their length in front."""
    return len(data).to_bytes(HEADER_BYTES, "little") + data


def read_frame(stream: BinaryIO, max_bytes: int | None = None) -> bytes | None:
    """Read a frame's bytes; return None if the stream ends or the frame exceeds `max_bytes`."""
    header = stream.read(HEADER_BYTES)
    num_bytes = int.from_bytes(header, "little")
    if len(header) < HEADER_BYTES or (max_bytes is not None and num_bytes > max_bytes):
        return None
    data = stream.read(num_bytes)
    return data if len(data) == num_bytes else None


def main() -> None:
    """Render until stdin ends."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _write(replies, b"")
    first = read_frame(requests)
    if first is None:
        return
    source, *numbers = marshal.loads(first)
    limits = TemplateLimits(*numbers)
    _limit_memory(limits.memory_bytes)
    template = environment().from_string(source)
    while (data := read_frame(requests)) is not None:
        _limit_time(limits.cpu_seconds)
        reply, text = _render(template, marshal.loads(data), limits.output_length)
        _write(replies, reply.value + text.encode(*ENCODING))


def _write(replies: BinaryIO, data: bytes) -> None:
    replies.write(frame(data))
    replies.flush()


def _render(template: Template, variables: dict[str, Any], max_length: int) -> tuple[Reply, str]:
    pieces, length = [], 0
    try:
        for piece in template.generate(variables):
            length += len(piece)
            if length > max_length:
                return Reply.TOO_LONG, ""
            pieces.append(piece)
        return Reply.PROMPT, "".join(pieces)
    except Refusal as error:
        return Reply.REFUSED, sentence(error)
    except MemoryError:
        return Reply.OUT_OF_MEMORY, ""
    except Exception as error:  # an untrusted program may fail in any way
        return Reply.FAILED, f"{type(error).__name__}: {sentence(error)}"


def _limit_memory(num_bytes: int) -> None:
    """Set the address space limit of this process on Linux; elsewhere the parent watches it."""
    if sys.platform == "linux":
        held = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_at_most(held + num_bytes, hard), hard))


def _limit_time(seconds: float) -> None:
    """Let the system end this process if a rendering continues after the parent is gone."""
    if sys.platform != "win32":
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        soft = int(used + 2 * seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (_at_most(soft, hard), hard))


def _at_most(wanted: int, hard: int) -> int:
    return wanted if hard < 0 else min(wanted, hard)  # a negative number is "no limit"


if __name__ == "__main__":
    main()
