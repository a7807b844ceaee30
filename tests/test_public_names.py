"""The names that users rely on: docs/api.md lists them, and they change only on purpose."""

import pytest

from minigen.llm import LLM
from tools.public_names import PAGE, page


def test_the_page_of_public_names_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tools.public_names"


def test_a_change_of_a_public_name_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM, "complete", LLM.generate, raising=False)
    assert PAGE.read_text(encoding="utf-8") != page()
