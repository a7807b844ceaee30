"""Messages to a prompt, by the program that a model brings along.

A chat template is a Jinja program from a stranger, so it runs in Jinja's sandbox, with the settings
and names that Hugging Face's transformers gives it, since it is written for those.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minigen.errors import ChatTemplateError, PromptError
from minigen.text.gguf_vocab import special_tokens as special_tokens_of_gguf
from minigen.text.tokenizer import read_json, special_tokens

_END_OF_FINAL_MESSAGE = "CONTINUE_FINAL_MESSAGE_TAG "  # with the space, to see whether it is kept


class ChatTemplate:
    """A model's own way of writing a conversation as one text."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a Jinja template; `special_tokens` holds `bos_token` and whatever it may name.

        Raises `ChatTemplateError` if the source is no Jinja.
        """
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except (TemplateSyntaxError, SyntaxError) as error:
            raise ChatTemplateError(
                f"The chat template is no Jinja, at its line {error.lineno}: {_sentence(error)}"
            ) from None

    @classmethod
    def from_directory(cls, directory: Path) -> "ChatTemplate | None":
        """The template of a model's directory, if it has one.

        Source: `chat_template.jinja`, or else `tokenizer_config.json` (of several templates, the
        one named "default"), or else `chat_template.json`. Raises `TokenizerError` for files that
        are not JSON and `ChatTemplateError` for a template that cannot be used.
        """
        source = _source_in(directory)
        return None if source is None else cls(source, special_tokens(directory))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "ChatTemplate | None":
        """The template of a GGUF (`tokenizer.chat_template`), if it has one."""
        source = _default(metadata.get("tokenizer.chat_template"))
        return None if source is None else cls(source, special_tokens_of_gguf(metadata))

    def render(
        self,
        messages: object,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: object,
    ) -> str:
        """The prompt for messages of the form `{"role": ..., "content": ...}`.

        With `add_generation_prompt` the prompt ends where an answer begins. With
        `continue_final_message` it ends within the last message instead, for the model to go on
        with. `variables` are given to the template. Raises `PromptError` for messages of another
        form (see `check_messages`) and `ChatTemplateError` if the template refuses or fails.
        """
        checked = check_messages(messages)
        if not continue_final_message:
            return self._run(checked, variables, add_generation_prompt)
        final = checked[-1]["content"]
        checked[-1]["content"] = final + _END_OF_FINAL_MESSAGE
        return _up_to_the_end_of(final, self._run(checked, variables, False))

    def _run(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, object],
        add_generation_prompt: bool,
    ) -> str:
        names: dict[str, object] = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **variables,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(names)
        except _Refusal as error:
            raise ChatTemplateError(
                f"The chat template refuses these messages: {_sentence(error)}"
            ) from None
        except Exception as error:  # a stranger's program may fail in any way
            raise ChatTemplateError(
                f"The chat template fails with {type(error).__name__}: {_sentence(error)}"
            ) from None


def check_messages(messages: object) -> list[dict[str, Any]]:
    """A copy of well-formed messages, each with its text in one string.

    Well-formed is a non-empty list of dictionaries with a "role" (str) and a "content": a str, or
    a list of `{"type": "text", "text": ...}` whose texts are joined without anything between.
    Other keys are kept for the template. Raises `PromptError` naming the first wrong message.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise PromptError('The messages should be a list of at least one {"role", "content"}.')
    return [_check_message(i, message) for i, message in enumerate(messages)]


def _check_message(index: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise PromptError(
            f"Message {index} should be a dictionary, not a {type(message).__name__}."
        )
    if not isinstance(message.get("role"), str):
        raise PromptError(f'Message {index} should have a "role" that is a string.')
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "".join(_check_part(index, part) for part in content)
    if not isinstance(content, str):
        raise PromptError(f'Message {index} should have a "content" of text or text parts.')
    return {**message, "content": content}


def _check_part(index: int, part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise PromptError(
            f'Message {index} has content that is not {{"type": "text", "text": ...}}, '
            "but minigen's models read text only."
        )
    return text


def _up_to_the_end_of(final: str, rendered: str) -> str:
    """The text up to the mark behind the final message, as transformers cuts it."""
    mark = _END_OF_FINAL_MESSAGE
    end = rendered.rfind(mark.strip())
    if end < 0 or final.strip() not in rendered:
        raise ChatTemplateError(
            "The chat template changes the final message, so it cannot be continued."
        )
    kept_spaces = rendered.startswith(mark, end)
    return rendered[:end] if kept_spaces else rendered[:end].rstrip()


def _source_in(directory: Path) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ChatTemplateError(f"{path} cannot be read: {error}.") from None
    config = read_json(directory / "tokenizer_config.json")
    processor = read_json(directory / "chat_template.json")
    return _default(config.get("chat_template") or processor.get("chat_template"))


def _default(template: object) -> str | None:
    """The template itself, or the default of several named ones; none if it is empty."""
    if isinstance(template, list):
        named = {e.get("name"): e.get("template") for e in template if isinstance(e, dict)}
        if "default" not in named:
            raise ChatTemplateError(
                f"The model has the chat templates {', '.join(map(str, named))}, but no default."
            )
        template = named["default"]
    if template is not None and not isinstance(template, str):
        raise ChatTemplateError(
            f"The model's chat template should be a string, not a {type(template).__name__}."
        )
    return template or None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
    return environment


class _GenerationBlocks(Extension):
    """`{% generation %}` marks what the model writes, for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration of it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Refusal(TemplateError):
    """A template called `raise_exception`."""


def _refuse(message: str) -> NoReturn:
    raise _Refusal(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML; templates expect plain JSON."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _sentence(error: Exception) -> str:
    """An error's message on one line, ending in a full stop."""
    message = error.message if isinstance(error, TemplateSyntaxError) else str(error)
    return " ".join(str(message).split()).rstrip(".") + "."
