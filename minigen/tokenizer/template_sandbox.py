"""The Jinja sandbox of chat templates, with the settings of Hugging Face's transformers.

The sandbox denies a template access to Python's internals. It does not limit time or memory;
`template_process` and `template_worker` do.
"""

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MESSAGE = 1000  # characters shown of an error message that a template raises


@dataclass(frozen=True)
class TemplateLimits:
    """Limits on one rendering, and on the length of a template.

    `cpu_seconds` is processor time, so that a rendering does not fail on a busy machine.
    `memory_bytes` is the memory on top of an idle process. Lengths are in characters.
    """

    cpu_seconds: float = 2.0
    memory_bytes: int = 512 * 2**20
    output_length: int = 10_000_000
    source_length: int = 100_000


class Refusal(TemplateError):
    """A template called `raise_exception`."""


def environment() -> ImmutableSandboxedEnvironment:
    """Return the Jinja environment. Compiling evaluates nothing, not even `'a' * 1000000000`."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, loopcontrols],
        optimized=False,
        finalize=_at_run_time,
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
    return sandbox


def names_read(source: str) -> frozenset[str]:
    """Return the names of the variables that a template may read before it sets them.

    Raises `TemplateSyntaxError` or `SyntaxError` if the source is not Jinja.
    """
    sandbox = environment()
    tree = sandbox.parse(source)
    tracker = meta.TrackingCodeGenerator(sandbox)
    tracker.optimizer = None  # it would evaluate constant expressions
    tracker.visit(tree)
    sandbox.compile(tree)
    return frozenset(tracker.undeclared_identifiers)


def sentence(error: Exception) -> str:
    """Return an error's message on one line that ends with a full stop."""
    message = error.message if isinstance(error, TemplateSyntaxError) else str(error)
    line = " ".join(str(message)[:MAX_MESSAGE].split()).rstrip(".")
    return f"{line}{'...' if len(str(message)) > MAX_MESSAGE else '.'}"


@pass_context
def _at_run_time(context: Context, value: object) -> object:
    """Return the value unchanged; a context-dependent `finalize` prevents constant folding."""
    return value


class _GenerationBlocks(Extension):
    """`{% generation %}` marks the model's answers for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration of it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _refuse(message: str) -> NoReturn:
    raise Refusal(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> Any:
    """Return plain JSON, as templates expect; Jinja's filter would escape it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
