"""What tools.platforms refuses, and what it would run; the platforms themselves take an hour."""

import os
import platform
import re
import shutil
from pathlib import Path

import pytest

from tools import platforms
from tools.platforms import PLATFORMS, STEPS, Platform, what_lacks

DOCUMENT = platforms.ROOT / "docs" / "platforms.md"


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has everything."""
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(os, "geteuid", lambda: 0, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/sbin/{name}")
    monkeypatch.setattr(platforms, "_emulated", lambda machine: True)


@pytest.mark.usefixtures("linux")
def test_a_missing_requirement_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    amd64, arm64 = Platform("trixie", "amd64"), Platform("trixie", "arm64")
    assert (what_lacks(amd64), what_lacks(arm64)) == (None, None)
    monkeypatch.setattr(platforms, "_emulated", lambda machine: False)
    assert what_lacks(amd64) is None
    said = what_lacks(arm64)
    assert said is not None
    assert said.startswith("This machine cannot run programs for aarch64")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert what_lacks(amd64) == "debootstrap is not installed; run apt-get install debootstrap."
    monkeypatch.setattr(os, "geteuid", lambda: 1000, raising=False)
    assert what_lacks(amd64) == "Platforms need Linux and root: run this on Linux with sudo."


@pytest.mark.usefixtures("linux")
def test_an_unknown_step_is_refused_before_anything_is_created(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "platforms"
    monkeypatch.setattr("sys.argv", ["platforms", str(folder), "trixie", "pull", "push"])
    with pytest.raises(SystemExit):
        platforms.main()
    assert "there is no step push; choose from install," in capsys.readouterr().err
    assert not folder.exists()


def test_a_platform_gets_its_own_environment_and_the_settings_of_registries() -> None:
    variables = {"PIP_CERT": "a file", "HTTPS_PROXY": "proxy", "PYTHONPATH": "ours", "SECRET": "x"}
    *unshare, script = platforms._inside(Path("a folder/trixie"), "echo 'it'", variables.items())
    assert unshare == ["unshare", "--mount", "sh", "-c"]
    assert "chroot 'a folder/trixie' env -i 'PIP_CERT=a file' HTTPS_PROXY=proxy HOME=" in script
    assert "ours" not in script
    assert "SECRET" not in script


def test_the_document_lists_every_platform_and_only_steps_that_exist() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    commands = re.findall(r"tools\.platforms FOLDER ([\w-]+)((?: [\w-]+)*)", text)
    assert {name for name, _ in commands} == set(PLATFORMS)
    assert {step for _, steps in commands for step in steps.split()} <= set(STEPS)
