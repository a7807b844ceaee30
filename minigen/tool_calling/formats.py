"""The forms in which model families write tool calls, chosen by the model's chat template.

Sources: the chat templates of Qwen 2.5 and 3 and of Hermes (`<tool_call>`), of Llama 3.1 to 3.3
(bare JSON with `parameters`), and of Mistral (`[TOOL_CALLS]`, later with `[ARGS]`).
"""

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass

_JSON_HEAD = re.compile(
    r'\s*+\[?+\s*+\{\s*+"name"\s*+:\s*+"(?P<name>[^"\\]*+)"\s*+,'
    r'\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)'
)
_NAME_HEAD = re.compile(r"\s*+(?P<name>[\w.-]++)(?:\[CALL_ID\]\w*+)?(?:\[ARGS\])?\s*+(?=\{)")


@dataclass(frozen=True)
class ToolFormat:
    """How one family writes a call.

    `begin` and `end` are the marks around a call; without `begin`, only an answer that begins with
    a brace is a call. `head` matches a call after `begin`, up to its arguments. `fillers` are the
    characters that may stand between the arguments and `end`, or the next call.

    A forced call is `begin`, `before_name`, its name, `before_arguments`, its arguments,
    `after_arguments` and `end`; `between` joins two. With `one_list`, all calls stand in one pair
    of brackets after one `begin`; with `names_come_bare`, a name is no JSON.
    """

    name: str
    begin: str
    end: str
    head: re.Pattern[str]
    fillers: str
    before_name: str
    before_arguments: str
    after_arguments: str
    between: str
    one_list: bool = False
    names_come_bare: bool = False
    make_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"


def _nine_characters() -> str:
    return secrets.token_hex(5)[:9]  # Mistral's templates refuse ids of another length


HERMES = ToolFormat(
    name="hermes",
    begin="<tool_call>",
    end="</tool_call>",
    head=_JSON_HEAD,
    fillers=" \t\r\n}",
    before_name='\n{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}\n",
    between="\n",
)
LLAMA = ToolFormat(
    name="llama",
    begin="",
    end="",
    head=_JSON_HEAD,
    fillers=" \t\r\n};,",
    before_name='{"name": "',
    before_arguments='", "parameters": ',
    after_arguments="}",
    between="; ",
)
MISTRAL = ToolFormat(
    name="mistral",
    begin="[TOOL_CALLS]",
    end="",
    head=_JSON_HEAD,
    fillers=" \t\r\n}],",
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}",
    between=", ",
    one_list=True,
    make_id=_nine_characters,
)
MISTRAL_ARGS = ToolFormat(
    name="mistral with [ARGS]",
    begin="[TOOL_CALLS]",
    end="",
    head=_NAME_HEAD,
    fillers=" \t\r\n",
    before_name="",
    before_arguments="[ARGS]",
    after_arguments="",
    between="",
    names_come_bare=True,
    make_id=_nine_characters,
)


def format_of(template: str) -> ToolFormat | None:
    """Return the form that a chat template teaches, or None for one that minigen does not know.

    >>> format_of("{% if tools %}... <tool_call> ...{% endif %}").name
    'hermes'
    """
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if '"parameters"' in template and "ipython" in template:
        return LLAMA
    return None
