"""A chat template is untrusted code: its time and memory are limited, and it harms nothing else."""

import os
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest

from minigen.errors import ChatTemplateError, PromptError, StartError
from minigen.tokenizer.chat_template import ChatTemplate
from minigen.tokenizer.template_process import TemplateProcess
from minigen.tokenizer.template_sandbox import TemplateLimits
from minigen.tokenizer.template_worker import frame
from tests.waiting import wait_until

LIMITS = TemplateLimits(cpu_seconds=0.3, memory_bytes=128 * 2**20, output_length=100_000)
USER = [{"role": "user", "content": "x"}]


def render(source: str, limits: TemplateLimits = LIMITS, **variables: object) -> str:
    return ChatTemplate(source, {}, limits).render(USER, **variables)


HANGING = {
    "two loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "one long product": "{{ (7 ** 9999999) % 10 ** 9 }}",
    "a list that holds itself many times": (
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
        "{% endfor %}{{ ns.x == ns.x[::-1] }}{{ ns.x | tojson }}"
    ),
    "a loop that writes into a variable": (
        "{% set x %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        "{% endset %}"
    ),
}
HUGE = {
    "a repeated text": "{{ 'a' * 3000000000 }}",
    "a padded number": "{{ '%3000000000d' % 1 }}",
    "a padded format": "{{ '{:>3000000000}'.format(1) }}",
    "a centred text": "{{ 'a' | center(3000000000) }}",
    "a centred text that is not shown": "{% set x = 'a'.center(3000000000) %}",
    "bytes of a number": "{{ (1).to_bytes(3000000000, 'big') }}",
    "a text that doubles": (
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}"
        "{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
    ),
    "a repeated list": "{{ ([1] * 3000000000) | length }}",
}


@pytest.mark.parametrize("name", HANGING)
def test_a_template_that_computes_too_long_is_ended(name: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        render(HANGING[name])
    assert str(caught.value) == (
        "The chat template computes for more than 0.3 seconds, so it was stopped."
    )


@pytest.mark.parametrize("name", HUGE)
def test_a_template_that_takes_too_much_memory_is_ended(name: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        render(HUGE[name], replace(LIMITS, cpu_seconds=30.0))
    assert str(caught.value) == (
        "The chat template takes more than 128 MiB of memory, so it was stopped."
    )


def test_memory_is_watched_where_the_system_does_not_limit_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "sitecustomize.py"  # every Python reads it at startup
    package.write_text("import sys\nsys.platform = 'elsewhere'\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ChatTemplateError, match="takes more than 128 MiB of memory"):
        render(HUGE["a text that doubles"], replace(LIMITS, cpu_seconds=30.0))


def test_a_template_that_writes_too_much_is_ended() -> None:
    source = "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}"
    with pytest.raises(ChatTemplateError, match="writes more than 100,000 characters, so it was"):
        render(source, replace(LIMITS, cpu_seconds=30.0))
    assert len(render("{{ 'x' * 100000 }}")) == 100_000  # the limit itself


def test_padding_of_a_date_takes_no_memory_or_is_ended() -> None:
    with suppress(ChatTemplateError):
        assert len(render("{{ strftime_now('%2000000000d') }}")) <= LIMITS.output_length


def test_a_macro_that_recurses_endlessly_fails() -> None:
    with pytest.raises(ChatTemplateError, match="fails with RecursionError"):
        render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")


@pytest.mark.parametrize(
    "source", ["{{ 'a' * 3000000000 }}", "{{ 'a' | center(3000000000) }}", "{{ 7 ** 9999999 }}"]
)
def test_compiling_a_template_computes_nothing(source: str) -> None:
    work = "from minigen.tokenizer.template_sandbox import names_read; names_read({!r})"
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({2**30}, {2**30}));"
    limit += "resource.setrlimit(resource.RLIMIT_CPU, (20, 20));"
    subprocess.run([sys.executable, "-c", limit + work.format(source)], check=True)


def test_a_template_has_a_longest_length() -> None:
    limits = replace(LIMITS, source_length=10)
    assert render("0123456789", limits) == "0123456789"
    with pytest.raises(ChatTemplateError, match=r"has 11 characters, but the limit is 10\."):
        render("0123456789!", limits)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}",
        "{{ " + "9" * 5000 + " }}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "{{ " + "+".join("1" * 9999) + " }}",
    ],
)
def test_a_source_that_breaks_the_compiler_is_refused_in_one_sentence(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="is not valid Jinja: ") as caught:
        ChatTemplate(source, {})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_long_reason_is_cut() -> None:
    with pytest.raises(ChatTemplateError) as caught:
        render("{{ raise_exception('a' * 1000000) }}")
    assert str(caught.value).endswith("aaa...")
    assert len(str(caught.value)) < 1100


def test_after_a_limit_the_next_conversation_is_rendered() -> None:
    template = ChatTemplate("{{ 'a' * times }}", {}, replace(LIMITS, cpu_seconds=30.0))
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match="so it was stopped"):
            template.render(USER, times=3_000_000_000)
        assert template.render(USER, times=3) == "aaa"


def test_time_is_counted_for_each_rendering() -> None:
    source = "{% for a in range(10) %}{% for b in range(99999) %}{% endfor %}{% endfor %}done"
    template = ChatTemplate(source, {}, replace(LIMITS, cpu_seconds=2.0))
    process = template._process
    texts = [template.render(USER) for _ in range(10)]
    assert texts == ["done"] * 10
    assert process._running is not None
    times = psutil.Process(process._running._process.pid).cpu_times()
    assert times.user + times.system > 0.2  # ten of them take longer than a few limits


# ---- the process --------------------------------------------------------------------------------


def process_of(template: ChatTemplate) -> psutil.Process:
    assert template.render(USER) == "x"
    running = template._process._running
    assert running is not None
    return psutil.Process(running._process.pid)


def echo() -> ChatTemplate:
    return ChatTemplate("{{ messages[0].content }}", {})


def test_a_process_starts_with_the_first_conversation_and_serves_all_others() -> None:
    template = echo()
    assert template._process._running is None
    assert process_of(template).pid == process_of(template).pid


def test_the_process_goes_with_its_template() -> None:
    template = echo()
    process = process_of(template)
    del template
    wait_until(lambda: not process.is_running())


def test_a_process_that_was_killed_is_replaced() -> None:
    template = echo()
    process = process_of(template)
    process.kill()
    wait_until(lambda: not template._process._running.is_usable())  # type: ignore[union-attr]
    assert process_of(template).pid != process.pid


@pytest.mark.parametrize("written", [b"", b"garbage", frame(b"?what"), frame(b"p\xff")])
def test_replies_of_a_broken_process_are_not_trusted(
    written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example if a template escapes from the sandbox."""
    code = f"import sys; sys.stdout.buffer.write({frame(b'') + written!r})"

    def start(module: str, **options: Any) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, **options)

    monkeypatch.setattr("minigen.tokenizer.template_process.start_module", start)
    with pytest.raises(ChatTemplateError, match="broke the process that renders it"):
        TemplateProcess("x", LIMITS).render({})


def test_a_process_that_cannot_start_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(StartError, match=r"its process could not be started .*No such file"):
        render("x")


def test_a_process_that_ends_at_once_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/no/such/folder")
    with pytest.raises(StartError, match="does not start"):
        render("x")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_renders_in_its_own_child_process() -> None:
    template = echo()
    mine = process_of(template)
    child = os.fork()
    if child == 0:
        try:
            theirs = process_of(template)
            os._exit(theirs.pid == mine.pid)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert process_of(template).pid == mine.pid


ENDING = """
import sys
from threading import Thread
from minigen.tokenizer.chat_template import ChatTemplate
user = [{"role": "user", "content": "x"}]
template = ChatTemplate("{% if n %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}x", {})
template.render(user, n=0)
print(template._process._running._process.pid, flush=True)
if sys.argv[1] == "busy":
    Thread(target=lambda: template.render(user, n=1)).start()
input()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("state", ["idle", "busy", "at its end"])
def test_the_process_ends_with_the_one_that_started_it(state: str) -> None:
    command = [sys.executable, "-c", ENDING, state]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        process = psutil.Process(int(caller.stdout.readline()))
        if state != "at its end":
            caller.send_signal(signal.SIGKILL)
        caller.communicate(b"\n")  # it ends by itself, if it still runs
    wait_until(lambda: not process.is_running(), seconds=60)


def test_many_threads_render_at_once() -> None:
    template, found = echo(), {}

    def work(name: str) -> None:
        for _ in range(20):
            found[name] = template.render([{"role": "user", "content": name}])

    threads = [threading.Thread(target=work, args=(f"{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {f"{i}": f"{i}" for i in range(8)}


# ---- what goes in and out -----------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "é🙂\0\n\r", "\ud83d", "x" * 70_000])
def test_any_text_goes_through_the_process_unchanged(text: str) -> None:
    message = [{"role": "user", "content": text}]
    assert ChatTemplate("{{ messages[0].content }}", {}).render(message) == text


def test_variables_keep_their_kinds() -> None:
    source = "{{ a is none }} {{ b is true }} {{ c + 1 }} {{ d / 2 }} {{ e }} {{ f }} {{ g[1] }}"
    variables = {"a": None, "b": True, "c": 2**70, "d": 1.0, "e": (1, "x"), "f": b"y", "g": {1: 2}}
    expected = f"True True {2**70 + 1} 0.5 (1, 'x') b'y' 2"
    assert render(source, **variables) == expected


class Text(str):
    __slots__ = ()


def test_kinds_of_dictionaries_lists_and_texts_are_taken_as_these() -> None:
    nested = OrderedDict(a=MappingProxyType({"b": [Text("c"), (1, 2)]}))
    assert render("{{ x }}", x=nested) == "{'a': {'b': ['c', [1, 2]]}}"


@pytest.mark.parametrize("wrong", [object(), print, [{"a": {print}}], Path("x")])
def test_a_variable_that_is_not_data_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(PromptError, match=r"dictionaries, but 'tools' is something else\."):
        render("x", fine=1, tools=wrong)


# ---- what a client may set ----------------------------------------------------------------------


def test_a_client_may_set_only_variables_that_a_template_reads() -> None:
    source = (
        "{{ bos_token }}{{ image_token }}{{ pad_token }}{{ messages }}{{ range(3) }}{{ loop }}"
        "{% set mine = 1 %}{{ mine }}{% if not date is defined %}{% set date = 'x' %}{% endif %}"
        "{% for each in documents %}{{ each }}{% endfor %}{{ enable_thinking }}{{ date }}"
        "{% if add_generation_prompt %}{{ raise_exception(reason) }}{% endif %}{{ namespace() }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>", "image_token": "<i>"})
    expected = {"date", "documents", "enable_thinking", "reason", "loop"}
    assert template.settable_names == expected
