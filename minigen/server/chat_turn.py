"""A model's next turn in a conversation, with or without tools, in whichever API it was asked for.

All chat APIs turn their requests into OpenAI's messages and a `ToolUse`, and write the `Part`s of
the answer in their own form.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from minigen.llm import LLM
from minigen.sampling.structured_outputs import StructuredOutputsParams
from minigen.tokenizer.chat_template import ChatTemplate
from minigen.tool_calling.call_grammar import form_of_answer
from minigen.tool_calling.formats import HERMES, ToolFormat, format_of
from minigen.tool_calling.parser import END_OF_THINK, THINK, AnswerParser, Reasoning
from minigen.tool_calling.prompt import for_plain_template, for_template
from minigen.tool_calling.tools import NO_TOOLS, ToolUse

_TAIL = 16  # tokens of a prompt that show whether the answer begins within a thought


@dataclass(frozen=True)
class ChatTurn:
    """What the engine and the response need to know of a turn.

    `params` are further fields of `SamplingParams`. `new_parser` creates what reads one answer;
    it is None where all text is content.
    """

    prompt_ids: list[int]
    params: Mapping[str, Any]
    new_parser: Callable[[], AnswerParser] | None


def chat_turn(
    llm: LLM,
    messages: SequenceOf[Mapping[str, Any]],
    use: ToolUse = NO_TOOLS,
    form: StructuredOutputsParams | None = None,
    **variables: Any,
) -> ChatTurn:
    """Return the next turn of a conversation in OpenAI's messages.

    `form` is the form of its text, and `variables` go to the chat template. Raises a
    `MinigenError` for messages, tools or a form that cannot be used.
    """
    template = llm.chat_template
    style, native = _style_of(template)
    shown = use.tools if use.callable else ()
    if native:
        written = for_template(messages)
        if shown:
            variables["tools"] = [tool.described for tool in shown]
    else:
        written = for_plain_template(messages, shown, use.choice.mode == "required")
    prompt_ids = llm.chat_prompt(written, **variables)
    reasoning = _reasoning(llm, prompt_ids)

    def special(text: str) -> int | None:
        token_ids = llm.tokenizer.encode(text, add_special_tokens=False)
        found = len(token_ids) == 1 and token_ids[0] in llm.tokenizer.special_ids
        return token_ids[0] if found else None

    params: dict[str, Any] = {
        "structured_outputs": form_of_answer(use, style, form, reasoning, special)
    }
    if use.callable and style.begin and special(style.begin) is not None:
        params["skip_special_tokens"] = False  # else the mark of a call would not be seen
    if not use.callable and reasoning == "none":
        return ChatTurn(prompt_ids, params, None)
    names = frozenset(tool.name for tool in use.callable)
    read = style if names else None
    return ChatTurn(prompt_ids, params, lambda: AnswerParser(read, names, reasoning))


def _style_of(template: ChatTemplate | None) -> tuple[ToolFormat, bool]:
    """Return the form of a model's calls, and whether its template itself describes tools.

    A template without tools, or with calls in a form that minigen does not know, gets minigen's
    own description.
    """
    found = format_of(template.source) if template is not None and template.takes_tools else None
    return (HERMES, False) if found is None else (found, True)


def _reasoning(llm: LLM, prompt_ids: SequenceOf[int]) -> Reasoning:
    """Return whether an answer to this prompt begins with the model's reasoning."""
    if llm.chat_template is None or END_OF_THINK not in llm.chat_template.source:
        return "none"
    end = llm.tokenizer.decode(prompt_ids[-_TAIL:], skip_special_tokens=False).rstrip()
    if end.endswith(THINK):
        return "open"
    return "none" if end.endswith(END_OF_THINK) else "possible"
