"""The doctor's report follows one schema; a comparison of two shows exactly their differences."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minigen import hub
from minigen.cli import main as cli
from minigen.doctor import compare as comparing
from minigen.doctor import facts as looking
from minigen.doctor.compare import Agreement, compare
from minigen.doctor.facts import PACKAGES, VARIABLES, examine
from minigen.doctor.findings import with_findings
from minigen.doctor.fingerprint import fingerprints, pattern
from minigen.doctor.report import Gpu, Model, Report, read_report, to_json
from minigen.errors import FileFormatError
from minigen.hub import verdicts
from tests.test_hub import TINY

ROOT = Path(__file__).parent.parent
KEYS = {
    "": """schema_version minigen system processor threads memory torch gpu packages environment
        text model kernels speed fingerprints findings""",
    "minigen": "version commit",
    "system": "python implementation platform compiler",
    "processor": "name architecture features multiplies_bfloat16 cores",
    "threads": "torch torch_interop kernels",
    "memory": "total available limit",
    "torch": """cpu_capability git_version compiler blas onednn onednn_enabled openmp cuda mps
        float32_matmul_precision""",
    "packages": " ".join(PACKAGES),
    "environment": " ".join(VARIABLES),
    "text": "locale encoding file_names utf8_mode",
    "model": "name status path sha256 auto",
    "kernels": "compiled compiled_for_int8_cache instructions",
    "speed": "read matmul weights",
}


@pytest.fixture(scope="module")
def report() -> Report:
    """This machine's report, measured once, with short timings."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("minigen.doctor.measures._BUFFER_BYTES", 2**20)
        patched.setattr("minigen.doctor.measures._PATIENCE_SECONDS", 0.0)
        return examine()


@pytest.fixture
def file(report: Report, tmp_path: Path) -> Path:
    path = tmp_path / "other.json"
    path.write_text(to_json(report), encoding="utf-8")
    return path


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["minigen", "doctor", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


# ---- the report


def test_the_schema_has_these_keys(report: Report) -> None:
    found = json.loads(to_json(report))
    for section, keys in KEYS.items():
        assert list(found[section] if section else found) == keys.split(), section
    assert found["schema_version"] == 2
    assert {tuple(each) for each in found["findings"]} == {("topic", "found", "fine", "remedy")}


def test_a_report_is_unchanged_after_json(report: Report, tmp_path: Path) -> None:
    for encoding in (
        "ascii",
        "utf-8-sig",
        "utf-16",
    ):  # a console may add a mark
        (tmp_path / "report.json").write_text(to_json(report), encoding=encoding)
        assert read_report(tmp_path / "report.json") == report


def test_every_package_that_the_project_names_is_looked_up() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    named = {re.split(r"[;>\[ ]", line)[0].strip() for line in lines}
    assert named <= set(PACKAGES)


def test_installed_packages_have_their_versions(report: Report) -> None:
    assert report.packages["torch"] == torch.__version__
    assert report.packages["pytest"] == pytest.__version__
    assert looking._version("no-such-package") is None


def test_no_variable_that_may_hold_a_secret_is_reported() -> None:
    secret = ("KEY", "TOKEN", "SECRET", "PASS", "PROXY", "URL")
    assert not [each for each in VARIABLES if any(word in each for word in secret)]


def test_json_goes_to_stdout_alone(report: Report, monkeypatch, capsys) -> None:
    monkeypatch.setattr(looking, "examine", lambda: report)
    status, out, _ = run(monkeypatch, capsys, "--json")
    assert status == 0
    assert json.loads(out) == json.loads(to_json(report))


def test_text_shows_every_finding_and_every_remedy(report: Report, monkeypatch, capsys) -> None:
    missing = Model("smollm2-135m", "missing", None, "0", None)
    report = with_findings(replace(report, model=missing))
    monkeypatch.setattr(looking, "examine", lambda: report)
    _, out, _ = run(monkeypatch, capsys)
    for finding in report.findings:
        assert finding.topic in out
    assert "default model: minigen pull fetches smollm2-135m" in out


def test_a_gpu_is_reported_with_its_option(report: Report, monkeypatch) -> None:
    chip = SimpleNamespace(name="a chip", total_memory=80 * 10**9, major=9, minor=0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: chip)
    assert looking.gpu() == Gpu("a chip", 80 * 10**9, "9.0")
    findings = with_findings(replace(report, gpu=looking.gpu())).findings
    (gpu,) = [each.found for each in findings if each.topic == "gpu"]
    assert gpu.startswith("a chip, 80 GB")
    assert "--device cuda" in gpu


def test_an_apple_gpu_is_reported_with_its_option(report: Report, monkeypatch) -> None:
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert looking._torch().mps
    findings = with_findings(replace(report, torch=looking._torch())).findings
    assert "--device mps" in next(each.found for each in findings if each.topic == "gpu")


def test_a_damaged_default_model_is_found_despite_a_stored_hash(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIGEN_HOME", str(tmp_path))
    monkeypatch.setitem(hub.SHORT_NAMES, hub.DEFAULT_MODEL, TINY)
    assert looking._default_model().status == "missing"
    path = hub.pulled_file(hub.DEFAULT_MODEL)
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(TINY.size))
    found = verdicts._facts(path)
    assert found is not None
    verdicts._remember(path.parent / ".verified", {"sha256": TINY.sha256, **found})
    assert hub.find(hub.DEFAULT_MODEL) == path, "a start trusts the stored hash"
    model = looking._default_model()
    assert (model.status, model.path) == ("damaged", str(path))
    findings = with_findings(replace(report, model=model)).findings
    (finding,) = [each for each in findings if each.topic == "default model"]
    assert not finding.fine
    assert finding.remedy.startswith("minigen pull replaces it")


# ---- fingerprints


def test_fingerprints_are_the_same_twice(report: Report) -> None:
    again = fingerprints(report.threads.torch)
    assert again == report.fingerprints
    assert len(set(again["float32, torch"].values())) == len(again["float32, torch"])


def test_inputs_are_the_same_on_every_machine() -> None:
    def mixed(number: int, seed: int) -> float:
        number = (number + seed * 0x9E3779B1) % 2**32
        for shift in (16, 15):
            number = (number ^ (number >> shift)) * 0x45D9F3B % 2**32
        return ((number >> 8) - 2**23) / 2**24

    expected = [[mixed(row * 5 + column, 7) for column in range(5)] for row in range(3)]
    assert pattern((3, 5), 7).tolist() == expected
    many = pattern((1000, 1000), 2)
    assert abs(many.mean()) < 1e-2
    assert many.abs().max() <= 0.5


def test_other_kernels_of_torch_give_another_fingerprint(report: Report) -> None:
    if report.torch.cpu_capability in ("DEFAULT", "NO AVX"):
        pytest.skip("torch has no other kernels for this processor")
    code = (
        "import json; from minigen.doctor.fingerprint import fingerprints\n"
        f"print(json.dumps(fingerprints({report.threads.torch})))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        encoding="utf-8",
        check=True,
        env=os.environ | {"ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": str(ROOT)},
    )
    other = replace(report, fingerprints=json.loads(found.stdout))
    stages = {each.form: each.stages for each in compare(report, other).agreements}
    assert "softmax" in stages["float32, torch"]
    assert "inputs" not in stages["float32, torch"]


# ---- two reports


def test_a_report_has_no_difference_from_itself(report: Report) -> None:
    found = compare(report, report)
    assert found.numerics == found.others == []
    assert all(each.stages == [] for each in found.agreements)
    assert {each.ratio for each in found.speeds} == {1.0}


def test_two_reports_differ_in_exactly_the_fields_that_differ(report: Report) -> None:
    report = replace(report, fingerprints={"float32, torch": {"a": "1", "b": "2"}, "int4": None})
    other = replace(
        report,
        processor=replace(report.processor, features=[*report.processor.features[1:], "amx_int8x"]),
        threads=replace(report.threads, torch=report.threads.torch + 1),
        packages=report.packages | {"numba": "0.1", "ruff": None},
        environment=report.environment | {"MKL_CBWR": "AVX2", "LANG": "eo"},
        torch=replace(report.torch, cpu_capability="NONE"),
        model=replace(report.model, auto="float32: another"),
        speed=replace(report.speed, read=report.speed.read * 2),
        fingerprints={"float32, torch": {"a": "1", "b": "3"}, "int4": {"a": "1"}},
        findings=[],
    )
    found = compare(report, other)
    assert {each.key for each in found.numerics} == {
        "processor.features",
        "threads.torch",
        "packages.numba",
        "environment.MKL_CBWR",
        "torch.cpu_capability",
        "model.auto",
    }
    assert {each.key for each in found.others} == {"packages.ruff", "environment.LANG"}
    features = next(each for each in found.numerics if each.key == "processor.features")
    assert features.left == f"only here: {report.processor.features[0]}"
    assert features.right == "only here: amx_int8x"
    assert "sum in another order" in features.why
    assert "greedy float32 texts" in features.why
    assert [(each.key, each.ratio) for each in found.speeds if each.ratio != 1] == [
        ("speed.read", 2.0)
    ]
    assert found.agreements == [
        Agreement("float32, torch", ["b"], []),
        Agreement("int4", [], ["left"]),
    ]


def test_every_field_explains_why_a_difference_matters(report: Report) -> None:
    for key in comparing._flat(asdict(replace(report, gpu=Gpu("a chip", 1, "9.0")))):
        if not key.startswith(comparing.UNCOMPARED):
            assert comparing.reason(key)[1], key


def test_two_files_are_compared_without_measuring_anything(
    report: Report, file: Path, tmp_path: Path
) -> None:
    slow = replace(report, torch=replace(report.torch, cpu_capability="NONE"))
    (tmp_path / "slow.json").write_text(to_json(slow), encoding="utf-8")
    code = (
        "import sys; from minigen.cli import main as cli\n"
        f"sys.argv = ['minigen', 'doctor', '--compare', {str(file)!r}, 'slow.json']\n"
        "try: cli.main()\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        encoding="utf-8",
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.stderr == "0 False\n"
    assert "other.json  |  slow.json" in done.stdout
    assert f"torch.cpu_capability  {report.torch.cpu_capability}  |  NONE" in done.stdout
    assert "float32, torch: the same bits in every stage" in done.stdout


def test_reports_of_the_same_name_are_named_by_their_folders(
    file: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        shutil.copy(file, tmp_path / folder / "report.json")
    status, out, _ = run(monkeypatch, capsys, "--compare", "one/report.json", "other/report.json")
    assert status == 0
    assert f"{Path('one/report.json')}  |  {Path('other/report.json')}" in out


def test_one_file_is_compared_with_this_machine(
    report: Report, file: Path, monkeypatch, capsys
) -> None:
    here = replace(report, fingerprints={"float32, torch": {"a": "1", "b": "2", "c": "3"}})
    there = replace(report, fingerprints={"float32, torch": {"a": "1", "b": "0", "c": "0"}})
    file.write_text(to_json(there), encoding="utf-8")
    monkeypatch.setattr(looking, "examine", lambda: here)
    status, out, _ = run(monkeypatch, capsys, "--compare", str(file))
    assert status == 0
    assert "this machine  |  other.json" in out
    assert "float32, torch: different bits, first in b, also in c" in out
    assert "Differences that can change results: none" in out


# ---- files that are not a report


def cut(text: str) -> str:
    return text[: len(text) // 2]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda text: "hello", "is not JSON (line 1)"),
        (lambda text: "", "is not JSON (line 1)"),
        (lambda text: "[" * 100_000, "is not JSON"),
        (lambda text: f"[{'1' * 5000}]", "cannot be read: Exceeds the limit (4300 digits)"),
        (lambda text: re.sub('"read": [^,]*', f'"read": 1{"0" * 400}', text), "a finite number"),
        (lambda text: re.sub('"read": [^,]*', '"read": 1e999', text), "read should be a finite"),
        (lambda text: "[1]", "is JSON but not a report of minigen doctor"),
        (lambda text: "{}", "is JSON but not a report of minigen doctor"),
        (cut, "is cut short: its JSON has no end"),
        (lambda text: text[:-2], "is cut short: its JSON has no end"),
        (lambda text: text[: text.index("dirty") if "dirty" in text else 60], "is cut short"),
        (lambda text: text.replace('"schema_version": 2', '"schema_version": 3'), "has version 3"),
        (lambda text: text.replace('"cores"', '"kernels"'), "processor lacks cores"),
        (lambda text: text.replace('"cores"', '"x": 1, "cores"'), "processor has 'x', which it"),
        (lambda text: text.replace('"utf8_mode": ', '"utf8_mode": 1'), "is no"),
        (lambda text: text.replace('"features": [', '"features": [1,'), "features should be str"),
    ],
)
def test_a_file_that_is_not_a_report_is_one_sentence(
    file: Path, spoil: Callable[[str], str], words: str, monkeypatch, capsys
) -> None:
    file.write_text(spoil(file.read_text(encoding="utf-8")), encoding="utf-8")
    status, out, err = run(monkeypatch, capsys, "--compare", str(file))
    assert (status, out) == (1, "")
    assert err.startswith(f"minigen: {file} ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("length", range(1, 3000, 97))
def test_a_truncated_report_is_reported_as_truncated(file: Path, length: int) -> None:
    file.write_text(file.read_text(encoding="utf-8")[:length], encoding="utf-8")
    with pytest.raises(FileFormatError, match="is cut short"):
        read_report(file)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--compare", "none.json"], "none.json cannot be read: No such file or directory."),
        (["--compare", "."], "cannot be read: Is a directory."),
        (["--compare"], "takes one report, to compare it with this machine, or two, not 0"),
        (["--compare", "a", "b", "c"], "or two, not 3"),
        (["--compare", "--json", "a"], "give only one"),
        (["other.json"], "write --compare other.json"),
    ],
)
def test_conflicting_options_are_one_sentence(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(monkeypatch, capsys, *arguments)
    assert (status, out) == (1, "")
    assert words in err
    assert err.count("\n") == 1
