"""Chat templates: convert chat messages to a prompt with the program that comes with the model.

A chat template is an untrusted Jinja program. It runs in Jinja's sandbox, in a separate process
with limits on time, memory and output. Jinja's settings and the predefined names are those of
Hugging Face's transformers, because templates are written for that library.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from minigen.errors import ChatTemplateError, PromptError
from minigen.tokenizer.gguf import special_tokens as special_tokens_of_gguf
from minigen.tokenizer.template_process import TemplateProcess
from minigen.tokenizer.template_sandbox import TemplateLimits, names_read, sentence
from minigen.tokenizer.tokenizer import read_json, special_tokens

_END_OF_FINAL_MESSAGE = "CONTINUE_FINAL_MESSAGE_TAG "  # the space shows if the template strips it
_LIMITS = TemplateLimits()
_OWN_NAMES = {"self", "messages", "tools", "add_generation_prompt", "continue_final_message"}
_TOKEN_NAMES = {f"{each}_token" for each in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}


class ChatTemplate:
    """A model's template that writes a conversation as one text.

    `settable_names` are the variables that a client may set: the template reads them, and they are
    neither the conversation, its tools, nor the model's special tokens. `takes_tools` tells whether
    it reads `tools`.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], limits: TemplateLimits = _LIMITS
    ) -> None:
        """Check a Jinja template; `special_tokens` maps names such as `bos_token` to their texts.

        Raises `ChatTemplateError` if the source is not Jinja, or longer than the limit.
        """
        self._special_tokens = dict(special_tokens)
        if len(source) > limits.source_length:
            raise ChatTemplateError(
                f"The chat template has {len(source):,} characters, but the limit is "
                f"{limits.source_length:,}."
            )
        try:
            read = names_read(source)
        except (TemplateSyntaxError, SyntaxError) as error:
            raise ChatTemplateError(
                f"The chat template is not valid Jinja at line {error.lineno}: {sentence(error)}"
            ) from None
        except (ValueError, RecursionError, MemoryError) as error:  # a huge number, deep nesting
            raise ChatTemplateError(
                f"The chat template is not valid Jinja: {sentence(error)}"
            ) from None
        self.source, self.takes_tools = source, "tools" in read
        self.settable_names = read - _OWN_NAMES - _TOKEN_NAMES - self._special_tokens.keys()
        self._process = TemplateProcess(source, limits)

    @classmethod
    def from_directory(cls, directory: Path) -> "ChatTemplate | None":
        """Read the template of a model's directory; return None if it has none.

        The source is `chat_template.jinja`, or else `tokenizer_config.json` (of several templates,
        the one named "default"), or else `chat_template.json`. Raises `TokenizerError` for files
        that are not JSON and `ChatTemplateError` for a template that cannot be used.
        """
        source = _source_in(directory)
        return None if source is None else cls(source, special_tokens(directory))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "ChatTemplate | None":
        """Read the template of a GGUF (`tokenizer.chat_template`); return None if it has none."""
        source = _default(metadata.get("tokenizer.chat_template"))
        return None if source is None else cls(source, special_tokens_of_gguf(metadata))

    def render(
        self,
        messages: object,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: object,
    ) -> str:
        """Return the prompt for messages of the form `{"role": ..., "content": ...}`.

        With `add_generation_prompt` the prompt ends where an answer begins. With
        `continue_final_message` it ends inside the last message, so that the model continues that
        message. The template also gets `variables`, which must be plain data. Raises `PromptError`
        for messages of another form (see `check_messages`) and `ChatTemplateError` if the template
        refuses, fails, or exceeds the time, memory or output of `TemplateLimits`.
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
        return self._process.render(names)


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Check messages, and return a copy in which each content is one string.

    The messages must be a non-empty list of dictionaries with a "role" (str) and a "content": a
    str, or a list of `{"type": "text", "text": ...}` whose texts are joined without a separator.
    Other keys are passed on to the template. Raises `PromptError` naming the first wrong message.
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
        content = text_of_parts(content, f"Message {index}")
    if not isinstance(content, str):
        raise PromptError(f'Message {index} should have a "content" of text or text parts.')
    return {**message, "content": content}


def text_of_parts(parts: Iterable[object], where: str) -> str:
    """Return the joined texts of `{"type": "text", "text": ...}`.

    Raises `PromptError` for another part; its message begins with `where`.
    """
    return "".join(_text_of_part(part, where) for part in parts)


def _text_of_part(part: object, where: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise PromptError(
            f'{where} has content that is not {{"type": "text", "text": ...}}, '
            "but minigen's models read text only."
        )
    return text


def _up_to_the_end_of(final: str, rendered: str) -> str:
    """Return the text before the mark after the final message, cut as transformers cuts it."""
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
    """Return the template, or the default of several named ones; None if it is empty."""
    if isinstance(template, list):
        named = {str(e.get("name")): e.get("template") for e in template if isinstance(e, dict)}
        if "default" not in named:
            raise ChatTemplateError(
                f'The model has the chat templates {", ".join(named)}, but none is named "default".'
            )
        template = named["default"]
    if template is not None and not isinstance(template, str):
        raise ChatTemplateError(
            f"The model's chat template should be a string, not a {type(template).__name__}."
        )
    return template or None
