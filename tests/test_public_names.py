"""The names that users rely on: docs/api.md lists them, and they change only on purpose."""

import inspect
from dataclasses import fields

import pytest

from minigen.cli.options import engine_options
from minigen.config import EngineConfig
from minigen.llm import LLM
from tools.public_names import PAGE, page


def test_the_page_of_public_names_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tools.public_names"


def test_a_change_of_a_public_name_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM, "complete", LLM.generate, raising=False)
    assert PAGE.read_text(encoding="utf-8") != page()


def test_an_option_has_the_same_name_and_default_in_every_place() -> None:
    config = {each.name: each.default for each in fields(EngineConfig) if each.init}
    load = inspect.signature(LLM.load).parameters
    flags = inspect.signature(engine_options).parameters
    assert {name: load[name].default for name in config} == config
    assert {name: flags[name].default for name in config} == config
