"""Conversations are rendered as transformers renders them, with any model's template."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from minigen.checkpoint.gguf import read_gguf
from minigen.errors import ChatTemplateError, PromptError, TokenizerError
from minigen.tokenizer.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """\
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{{- system_message + "<|eot_id|>" }}
{%- if tools is not none %}{{- tools | tojson(indent=4) }}{% endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("Roles must alternate\\n  user/assistant.") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}
"""

QWEN = """\
{%- set ns = namespace(seen=0, last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if loop.index0 < ns.last and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + (' ' + message.name if message.name else '') + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- content }}{%- endgeneration %}
    {%- else %}
        {{- content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
    {%- set ns.seen = ns.seen + 1 %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "qwen": QWEN}

USER = {"role": "user", "content": "  Hi <&> \"there\" 'é' 🙂 \n"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "a question": [USER],
    "with a system": [{"role": "system", "content": " Be brief. "}, USER],
    "two turns": [
        USER,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello {{ 1 }} {% x %}"},
        {"role": "user", "content": "And now?"},
    ],
    "to go on with": [USER, {"role": "assistant", "content": "It is"}],
    "to go on with after a space": [USER, {"role": "assistant", "content": "It is "}],
    "a key of its own": [{"role": "user", "content": "x", "name": "Ann"}],
}

TOOL = {"type": "function", "function": {"name": "find", "description": "größer <b> & 'x'"}}


def _theirs(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    library = tokenizers.Tokenizer(models.BPE())
    theirs = PreTrainedTokenizerFast(tokenizer_object=library, **SPECIAL)
    return theirs.apply_chat_template(messages, chat_template=template, tokenize=False, **options)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_is_written_as_transformers_writes_it(name: str, conversation: str) -> None:
    template, messages = TEMPLATES[name], CONVERSATIONS[conversation]
    ours = ChatTemplate(template, SPECIAL)
    for prompt in (True, False):
        assert ours.render(messages, add_generation_prompt=prompt) == _theirs(
            template, messages, add_generation_prompt=prompt
        )
    assert ours.render(messages) != ours.render(messages, add_generation_prompt=False) or (
        name == "mistral"  # it has no system prompt of its own
    )


@pytest.mark.parametrize("conversation", ["to go on with", "to go on with after a space"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_final_message_is_left_open_as_transformers_leaves_it(
    name: str, conversation: str
) -> None:
    template, messages = TEMPLATES[name], CONVERSATIONS[conversation]
    text = ChatTemplate(template, SPECIAL).render(messages, continue_final_message=True)
    assert text == _theirs(template, messages, continue_final_message=True)
    assert text.endswith("It is ") or text.endswith("It is")
    assert messages[-1]["content"].startswith("It is")  # the caller's messages are untouched
    assert "TAG" not in messages[-1]["content"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_variables_reach_the_template(name: str) -> None:
    messages = CONVERSATIONS["a question"]
    options = {"tools": [TOOL], "enable_thinking": False, "date_string": "1 Jan 2030"}
    ours = ChatTemplate(TEMPLATES[name], SPECIAL).render(messages, **options)
    theirs = _theirs(TEMPLATES[name], messages, add_generation_prompt=True, **options)
    assert ours == theirs


def test_a_variable_may_stand_for_a_special_token_but_not_for_the_messages() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", SPECIAL)
    assert template.render([{"role": "user", "content": "x"}], bos_token="<B>") == "<B>x"
    with pytest.raises(TypeError):
        template.render([USER], messages=[])


def test_undefined_variables_render_as_nothing_as_in_transformers() -> None:
    template = "[{{ nothing }}{{ messages[0].nothing }}]"
    assert ChatTemplate(template, SPECIAL).render([USER]) == _theirs(template, [USER]) == "[]"


def test_json_is_written_as_transformers_writes_it() -> None:
    template = (
        "{{ tool | tojson }}{{ tool | tojson(indent=2) }}{{ tool | tojson(sort_keys=true) }}"
        "{{ tool | tojson(ensure_ascii=true) }}{{ tool | tojson(separators=(',', ':')) }}"
    )
    ours = ChatTemplate(template, SPECIAL).render([USER], tool=TOOL)
    assert ours == _theirs(template, [USER], tool=TOOL)
    assert "größer <b> & 'x'" in ours


def test_the_date_is_todays() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", SPECIAL)
    before, rendered, after = datetime.now(), template.render([USER]), datetime.now()
    assert rendered in {before.strftime("%d %b %Y"), after.strftime("%d %b %Y")}


def test_parts_of_text_are_joined_without_anything_between() -> None:
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "world"}]
    template = ChatTemplate(CHATML, SPECIAL)
    joined = template.render([{"role": "user", "content": "Hello, world"}])
    assert template.render([{"role": "user", "content": parts}]) == joined
    assert template.render([{"role": "user", "content": tuple(parts)}]) == joined


# ---- templates that fail ------------------------------------------------------------------------


FAILING = {
    "an undefined object": ("{{ nothing.more }}", "UndefinedError: 'nothing' is undefined."),
    "a sum of unlike things": ("{{ 'a' + 1 }}", "TypeError"),
    "a division by zero": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "a range without end": ("{% for i in range(10**9) %}x{% endfor %}", "OverflowError: Range too"),
    "a way out": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError.*unsafe"),
    "a way out by format": ("{{ '{0.__class__.__mro__}'.format('') }}", "SecurityError.*unsafe"),
    "a way out by a filter": (
        "{{ ('{0.__class__.__mro__}' | attr('format'))('') }}",
        "SecurityError.*unsafe",
    ),
    "a way out by a kept method": (
        "{% set write = '{0.__class__.__mro__}'.format %}{{ write('') }}",
        "SecurityError.*unsafe",
    ),
    "a way out by a mapped method": (
        "{{ (['{0.__class__.__mro__}'] | map(attribute='format') | first)('') }}",
        "SecurityError.*unsafe",
    ),
    "a changed message": ("{{ messages.append(1) }}", "SecurityError"),
    "another file": ("{% include 'etc/passwd' %}", "TypeError"),
    "a recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_template_that_fails_is_reported_in_one_sentence(name: str) -> None:
    source, message = FAILING[name]
    template = ChatTemplate(source, SPECIAL)
    with pytest.raises(ChatTemplateError, match=f"fails with {message}") as caught:
        template.render([USER])
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_a_template_may_refuse_and_its_reason_is_one_line() -> None:
    messages = [USER, USER]
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(MISTRAL, SPECIAL).render(messages)
    assert str(caught.value) == (
        "The chat template refuses these messages: Roles must alternate user/assistant."
    )


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("{% if %}", 1),
        ("\n{{ x | nofilter }}", 2),
        ("\n\n{% for x in y %}", 3),
        ("{% unknown %}", 1),
        ("{% generation %}x", 1),
        ("{{ 'x }}", 1),
    ],
)
def test_invalid_jinja_is_refused_with_its_line(source: str, line: int) -> None:
    with pytest.raises(ChatTemplateError, match=f"not valid Jinja at line {line}: "):
        ChatTemplate(source, SPECIAL)


def test_a_break_outside_a_loop_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="not valid Jinja"):
        ChatTemplate("{% break %}", SPECIAL)


def test_a_final_message_that_is_continued_gets_no_prompt_for_another() -> None:
    template = "{% if add_generation_prompt %}prompt{% endif %}{{ messages[-1].content }}"
    ours = ChatTemplate(template, SPECIAL)
    assert ours.render([USER, {"role": "assistant", "content": "It"}]) == "promptIt"
    messages = [USER, {"role": "assistant", "content": "It"}]
    assert ours.render(messages, continue_final_message=True) == "It"
    assert _theirs(template, messages, continue_final_message=True) == "It"


def test_a_final_message_that_the_template_drops_cannot_be_continued() -> None:
    for source in ("nothing", "{{ messages[0].content }}", "{{ messages[-1].content | upper }}"):
        with pytest.raises(ChatTemplateError, match="changes the final message"):
            ChatTemplate(source, SPECIAL).render(
                [USER, {"role": "assistant", "content": "It is"}], continue_final_message=True
            )


# ---- messages that are wrong --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "part_error"),
    [
        ([], "list of at least one"),
        ("hello", "list of at least one"),
        (None, "list of at least one"),
        (USER, "list of at least one"),
        (["hello"], "Message 0 should be a dictionary, not a str"),
        ([USER, None], "Message 1 should be a dictionary, not a NoneType"),
        ([USER, {"content": "x"}], 'Message 1 should have a "role"'),
        ([{"role": 1, "content": "x"}], 'Message 0 should have a "role"'),
        ([USER, USER, {"role": "user"}], 'Message 2 should have a "content"'),
        ([{"role": "user", "content": None}], 'Message 0 should have a "content"'),
        ([{"role": "user", "content": 7}], 'Message 0 should have a "content"'),
        ([{"role": "user", "content": ["x"]}], "Message 0 has content that is not"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "Message 0 has content that is not",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "Message 0 has content"),
    ],
)
def test_wrong_messages_are_refused_by_number(messages: object, part_error: str) -> None:
    with pytest.raises(PromptError, match=part_error):
        ChatTemplate(CHATML, SPECIAL).render(messages)


# ---- where templates come from ------------------------------------------------------------------


def _write(directory: Path, **files: object) -> Path:
    for name, content in files.items():
        stem, _, suffix = name.rpartition("_")
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / f"{stem}.{suffix}").write_text(text, encoding="utf-8")
    return directory


def _rendered(template: ChatTemplate | None) -> str:
    assert template is not None
    return template.render([{"role": "user", "content": "x"}])


def test_a_directory_without_a_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.from_directory(tmp_path) is None
    _write(tmp_path, tokenizer_config_json={"bos_token": "<s>"})
    assert ChatTemplate.from_directory(tmp_path) is None
    _write(tmp_path, tokenizer_config_json={"chat_template": None})
    assert ChatTemplate.from_directory(tmp_path) is None


def test_a_template_is_found_in_each_of_its_places_and_knows_the_special_tokens(
    tmp_path: Path,
) -> None:
    _write(tmp_path, special_tokens_map_json={"eos_token": {"content": "<E>"}})
    _write(tmp_path, chat_template_json={"chat_template": "old {{ eos_token }}"})
    assert _rendered(ChatTemplate.from_directory(tmp_path)) == "old <E>"
    config = {"bos_token": "<B>", "chat_template": "config {{ bos_token }}{{ eos_token }}"}
    _write(tmp_path, tokenizer_config_json=config)
    assert _rendered(ChatTemplate.from_directory(tmp_path)) == "config <B><E>"
    _write(tmp_path, chat_template_jinja="file {{ bos_token }} {{ messages[0].content }} é")
    assert _rendered(ChatTemplate.from_directory(tmp_path)) == "file <B> x é"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    _write(tmp_path, tokenizer_config_json={"chat_template": named})
    assert _rendered(ChatTemplate.from_directory(tmp_path)) == "D"
    _write(tmp_path, tokenizer_config_json={"chat_template": [*named[:1], {"name": ["odd"]}]})
    with pytest.raises(ChatTemplateError, match=r"templates rag, \['odd'\], but none is named"):
        ChatTemplate.from_directory(tmp_path)


def test_files_that_hold_no_template_are_refused(tmp_path: Path) -> None:
    _write(tmp_path, tokenizer_config_json={"chat_template": 7})
    with pytest.raises(ChatTemplateError, match="should be a string, not a int"):
        ChatTemplate.from_directory(tmp_path)
    _write(tmp_path, tokenizer_config_json="{")
    with pytest.raises(TokenizerError, match="cannot be read as JSON"):
        ChatTemplate.from_directory(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ChatTemplateError, match=r"chat_template.jinja cannot be read"):
        ChatTemplate.from_directory(tmp_path)


def test_a_gguf_brings_its_template_and_names_its_tokens_by_id() -> None:
    metadata: dict[str, Any] = {
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    assert ChatTemplate.from_gguf(metadata) is None
    assert ChatTemplate.from_gguf({**metadata, "tokenizer.chat_template": ""}) is None
    metadata["tokenizer.chat_template"] = (
        "{{ bos_token }}{{ eos_token }}{{ unk_token }}|{{ pad_token }}"
    )
    assert _rendered(ChatTemplate.from_gguf(metadata)) == "<s></s><unk>|"


@pytest.mark.model
def test_the_default_models_own_template_is_rendered_as_transformers_renders_it(
    default_model_path: Path,
) -> None:
    metadata = read_gguf(default_model_path).metadata
    template = ChatTemplate.from_gguf(metadata)
    assert template is not None
    source = metadata["tokenizer.chat_template"]
    for messages in CONVERSATIONS.values():
        theirs = _theirs(source, messages, add_generation_prompt=True)
        assert template.render(messages) == theirs
        assert theirs.endswith("<|im_start|>assistant\n")
