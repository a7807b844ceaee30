"""The comparison with other engines: its loads, its counts, and the failures of a peer."""

import json
import shlex
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import comparing
from benchmarks.peers import loads as asked
from benchmarks.peers.answers import share_agreeing
from benchmarks.peers.builds import Build, llama_cpp_build
from benchmarks.peers.comparing import Comparison
from benchmarks.peers.engines import ENGINES, chosen
from benchmarks.peers.environments import (
    OWN,
    Environments,
    SetupError,
    own_requirements,
    recipes,
    requirements_of,
)
from benchmarks.peers.loads import DECODE, MEMORY_ALONE, MIXED, START, UNITS, loads
from benchmarks.peers.preparing import started_once
from benchmarks.peers.processes import Moment, family, peak_memory
from benchmarks.peers.processor import LEVEL_OF, PRETENDED, VARIABLES, Processor, features_in
from benchmarks.peers.record import Record, RecordError, Round
from benchmarks.peers.running import Turn, gathered, last_words, take_turn
from benchmarks.peers.summary import best_peer, figures, ratios, summary, values
from benchmarks.peers.table import LEVELS, peers_in_short, peers_page, peers_table, title
from benchmarks.peers.workers.static import in_batches
from tools import results
from tools.chapters import ROOT

EPYC = Processor(
    "AMD EPYC", features_in("flags\t: fma f16c bmi2 avx avx2 avx512f avx512_vnni avx512_bf16\n")
)
XEON = Processor("Intel Xeon", EPYC.features | {"avx_vnni", "amx_int8", "amx_bf16"})
ARM = Processor("Neoverse-V2", features_in("Features\t: fp asimd asimddp i8mm bf16 sve\n"))

SURE = [{"prompt": [5, 6], "tokens": [6, 6]}, {"prompt": [7], "tokens": [7]}]
RIGHT = [each["tokens"] for each in SURE] * 2


def test_loads_are_the_same_for_the_same_seed_and_plain_data() -> None:
    assert loads(3) == loads(3) == json.loads(json.dumps(loads(3)))
    assert loads(3) != loads(4)


def test_no_two_prompts_share_a_prefix_that_a_cache_could_use() -> None:
    prompts = [
        tuple(request["prompt"][:16])
        for load in loads(3)
        for sample in [load["warm_up"], *load["samples"]]
        for request in sample
    ]
    assert len(set(prompts)) == len(prompts)


def test_loads_have_the_sizes_that_they_are_named_after() -> None:
    by_name = {load["name"]: load["samples"] for load in loads(0)}
    sizes = {
        name: {(len(each["prompt"]), each["num_tokens"]) for sample in samples for each in sample}
        for name, samples in by_name.items()
    }
    assert sizes[DECODE] == {(64, 128)}
    assert sizes[asked.PREFILL_512] == {(512, 1)}
    assert sizes[asked.PREFILL_1024] == {(1024, 1)}
    assert sizes[asked.TOGETHER] == {(64, 64)}
    assert all(len(sample) == 32 for sample in by_name[asked.TOGETHER])
    assert len(by_name[MIXED][0]) == 128
    assert all(16 <= prompt <= 512 and 16 <= answer <= 128 for prompt, answer in sizes[MIXED])
    assert set(by_name) < set(UNITS)


def sample(load: str, seconds: float, foreign: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"sample": load, "seconds": seconds, "foreign": foreign, **more}


def turn(*rates: float, foreign: float = 0.0, load: str = DECODE, agreeing: float = 1.0) -> Turn:
    samples = [sample(load, 1 / rate, foreign, tokens=1) for rate in rates]
    return Turn(samples, {MEMORY_ALONE: 5_000_000}, agreeing=agreeing, packages={"thing": "1.0"})


def rounds_of(*turns: dict[str, Turn]) -> list[dict[str, Any]]:
    """Return rounds as in a record."""
    common = {"started": "2026-01-02 03:04 UTC", "code": "abc", "speed": []}
    return [{**common, "engines": list(each), "turns": each} for each in turns]


def test_disturbed_samples_are_set_aside_and_counted() -> None:
    quiet, loud = sample(START, 0.5, foreign=0.04), sample(START, 9.0, foreign=0.06)
    kept, set_aside = values([Turn([quiet, loud])])
    assert kept[START] == [0.5]
    assert set_aside == {**dict.fromkeys(UNITS, 0), START: 1}


def test_a_disturbed_sample_counts_in_no_figure_and_no_ratio() -> None:
    disturbed = turn(10)
    disturbed.samples += turn(9000, foreign=0.5).samples
    found = summary(rounds_of({"minigen auto": disturbed, "llama.cpp bf16": turn(5)}))
    assert found["engines"]["minigen auto"]["loads"][DECODE]["most"] == 10
    assert found["engines"]["minigen auto"]["loads"][DECODE]["set_aside"] == 1
    assert found["ratios_of_minigen_to"]["minigen auto"]["llama.cpp bf16"][DECODE]["most"] == 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_other_processes_time_is_distinguished_from_ones_own() -> None:
    before = Moment.now()
    deadline = before.clock + 0.3
    while time.monotonic() < deadline:
        pass
    own = before.foreign_since()
    earlier = Moment(before.clock, before.others - 0.3)  # as if other processes had worked as long
    assert earlier.foreign_since() > own


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_and_time_are_those_of_the_children_too() -> None:
    alone, before = family(), peak_memory()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert set(family()) == {*alone, child.pid}
        assert peak_memory() > before
        child.kill()


def test_figures_are_medians_with_ranges_in_the_loads_unit() -> None:
    found = figures([turn(10, 30), turn(20)])
    assert found["loads"][DECODE] == {
        "unit": "tokens/s",
        "median": 20.0,
        "least": 10.0,
        "most": 30.0,
        "samples": 3,
        "set_aside": 0,
    }
    assert found["loads"][MEMORY_ALONE]["median"] == 5.0
    assert found["loads"][MIXED] == {"unit": "tokens/s", "samples": 0, "set_aside": 0}


def test_ratios_are_taken_within_rounds() -> None:
    """A round in which the machine is ten times as slow changes no ratio."""
    taken = [
        {"minigen x": turn(20), "peer": turn(10)},
        {"peer": turn(1), "minigen x": turn(2)},
        {"minigen x": turn(30), "peer": turn(10)},
    ]
    assert ratios(taken)["minigen x"]["peer"][DECODE] == {
        "median": 2.0,
        "least": 2.0,
        "most": 3.0,
        "rounds": 3,
    }


def test_a_round_in_which_one_of_two_has_no_undisturbed_sample_gives_no_ratio() -> None:
    taken = [
        {"minigen x": turn(20), "peer": turn(10)},
        {"minigen x": turn(20), "peer": turn(1, foreign=0.5)},
        {"minigen x": turn(20)},
        {"minigen x": turn(20), "peer": Turn(turn(1).samples, failure="It broke.")},
    ]
    assert ratios(taken)["minigen x"]["peer"][DECODE]["rounds"] == 1


def test_headlines_name_the_best_peer_and_leave_out_what_was_not_measured() -> None:
    start = Turn([sample(START, 4.0)], agreeing=1.0)
    slow_start = Turn([sample(START, 8.0)], agreeing=1.0)
    found = summary(
        rounds_of(
            {"minigen auto": turn(30), "llama.cpp bf16": turn(10), "vLLM bf16": turn(20)},
            {"minigen auto": start, "llama.cpp bf16": slow_start, "vLLM bf16": start},
        )
    )
    assert found["best_peers"] == {
        DECODE: "vLLM bf16",
        START: "vLLM bf16",
        MEMORY_ALONE: "llama.cpp bf16",
    }
    decode, start_ratio, _ = found["headlines"]
    assert (decode["load"], decode["peer"], decode["median"]) == (DECODE, "vLLM bf16", 1.5)
    assert decode["best_of_all_peers"]
    assert (start_ratio["load"], start_ratio["peer"]) == (START, "vLLM bf16")


def test_a_peer_with_wrong_answers_is_never_the_best() -> None:
    engines = {"fast": figures([turn(99, agreeing=0.1)]), "sound": figures([turn(9)])}
    assert best_peer(engines, DECODE) == "sound"


def test_an_engine_with_other_answers_is_marked() -> None:
    assert share_agreeing(RIGHT, SURE) == 1.0
    assert share_agreeing([[1, 1], [7], [1, 1], [1]], SURE) == 0.25
    assert figures([Turn(agreeing=1.0)])["computes_the_model"]
    found = figures([Turn(agreeing=1.0), Turn(agreeing=0.25)])
    assert found["sure_answers_given"] == 0.25
    assert not found["computes_the_model"]


def test_an_engine_that_fails_in_one_round_keeps_the_others() -> None:
    found = figures([turn(10), Turn(turn(90).samples, failure="It broke."), turn(20)])
    assert found["loads"][DECODE]["median"] == 15
    assert (found["turns"], found["failures"]) == (2, ["It broke."])
    assert figures([Turn(failure="It broke.")]) == {"left_out": "It broke."}


def test_versions_that_changed_between_runs_are_all_listed() -> None:
    newer = turn(10)
    newer.packages = {"thing": "2.0"}
    assert figures([turn(10), newer, turn(10)])["packages"] == {"thing": "1.0, 2.0"}


def test_static_batches_give_every_request_its_own_answer() -> None:
    requests = [{"prompt": [index] * (index % 3 + 1), "num_tokens": 1} for index in range(7)]
    sizes = []

    def answer(batch: list[asked.Request]) -> list[list[int]]:
        sizes.append(len(batch))
        return [each["prompt"][:1] for each in batch]

    assert in_batches(requests, 3, answer) == [[index] for index in range(7)]
    assert sizes == [3, 3, 1]


SETTINGS = {"seed": 1, "scale": 0.05, "threads": 1}


def fake_jobs(**weights: str) -> dict[str, dict[str, Any]]:
    """Return jobs of fakes that act as `weights` ask; names with a space get mixed requests."""
    return {
        name: {
            "command": [sys.executable, "-m", "tests.fake_peer"],
            "variables": {},
            "versions": {"fake": "1.0"},
            "model": "none",
            "weights": each,
            "at_once": 2,
            "threads": 1,
            "mixed": " " in name,
        }
        for name, each in weights.items()
    }


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Two rounds of five fakes, with small loads."""
    if sys.platform != "linux":
        pytest.skip("workers read /proc")
    jobs = fake_jobs(
        **{
            "minigen fake": "good",
            "minigen odd": "refuse",
            "broken": "crash",
            "lazy": "short",
            "good": "good",
        }
    )
    made = Record(tmp_path_factory.mktemp("peers") / "peers.json", SETTINGS)
    comparison = Comparison(made, jobs, SURE, {"absent": "It could not be installed."})
    for _ in range(2):
        comparison.run_round()
    return made


def stored(record: Record) -> dict[str, Any]:
    return json.loads(record.path.read_text(encoding="utf-8"))


def test_a_fake_engine_goes_through_all_its_loads(record: Record) -> None:
    engines = stored(record)["summary"]["engines"]
    found = engines["minigen fake"]
    assert found["computes_the_model"]
    assert (found["packages"], found["versions"]) == ({"fake": "1.0"}, {"mode": "fake"})
    counts = {load: each["samples"] + each["set_aside"] for load, each in found["loads"].items()}
    assert counts == {
        DECODE: 6,
        asked.PREFILL_512: 4,
        asked.PREFILL_1024: 4,
        asked.TOGETHER: 4,
        MIXED: 2,
        START: 2,
        MEMORY_ALONE: 2,
        asked.MEMORY_ALL: 2,
    }
    without = engines["good"]["loads"][MIXED]
    assert without["samples"] + without["set_aside"] == 0


def test_an_engine_that_fails_is_reported_in_a_sentence_and_the_others_go_on(
    record: Record,
) -> None:
    measured = stored(record)
    found = measured["summary"]
    left_out = {
        name: each["left_out"] for name, each in found["engines"].items() if "left_out" in each
    }
    assert left_out == {
        "broken": "It ended with exit code 1: ValueError: the fake engine broke.",
        "minigen odd": "There are no such weights.",
        "lazy": "It ended with exit code 1: it answered with 1 tokens instead of 2.",
        "absent": "It could not be installed.",
    }
    first, second = (set(each["turns"]) for each in measured["rounds"])
    assert second == {"minigen fake", "good"}
    assert first == {*second, *left_out}
    assert list(found["ratios_of_minigen_to"]) == ["minigen fake"]
    assert list(found["ratios_of_minigen_to"]["minigen fake"]) == ["good"]
    assert found["cut_off"] == 0
    assert "There are no such weights." in peers_table("peers-x-avx2", measured)


def test_a_run_that_was_cut_off_keeps_its_turns_and_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third turn is interrupted: the file has two, and the next run adds a round to it."""
    seeds: list[int] = []

    def turn_or_end(command: Any, job: dict[str, Any], folder: Path) -> Turn:
        seeds.append(job["loads"][0]["warm_up"][0]["prompt"][0])
        if len(seeds) == 3:
            raise KeyboardInterrupt
        return turn(10)

    monkeypatch.setattr(comparing, "take_turn", turn_or_end)
    monkeypatch.setattr(comparing, "calibrate", dict)
    path, jobs = tmp_path / "peers.json", fake_jobs(minigen="good", a="good", b="good")
    with pytest.raises(KeyboardInterrupt):
        Comparison(Record(path, SETTINGS), jobs, SURE, {}).run_round()
    resumed = Record.opened(path, SETTINGS, resume=True, replace=False)
    assert [len(each.turns) for each in resumed.rounds] == [2]
    Comparison(resumed, jobs, SURE, {}).run_round()
    found = stored(resumed)
    assert [len(each["turns"]) for each in found["rounds"]] == [2, 3]
    assert (found["summary"]["rounds"], found["summary"]["cut_off"]) == (2, 1)
    assert all(each["started"] and each["machine"]["cpu"] for each in found["rounds"])
    assert seeds[0] == seeds[1] != seeds[3] == seeds[4]
    assert [each.name for each in tmp_path.iterdir()] == ["peers.json"]


def test_results_are_neither_overwritten_unasked_nor_mixed_with_others(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    made = Record(path, SETTINGS, [Round.new([])])
    made.save()
    with pytest.raises(RecordError, match="1 rounds already: --resume adds to them, and --replace"):
        Record.opened(path, SETTINGS, resume=False, replace=False)
    with pytest.raises(RecordError, match="measured with seed 1, not 2"):
        Record.opened(path, {**SETTINGS, "seed": 2}, resume=True, replace=False)
    assert Record.opened(path, SETTINGS, resume=True, replace=False).rounds == made.rounds
    assert Record.opened(path, {}, resume=False, replace=True).rounds == []
    path.write_text(
        path.read_text("utf-8").replace(made.rounds[0].machine["cpu"], "another"), encoding="utf-8"
    )
    with pytest.raises(RecordError, match="measured with cpu 'another'"):
        Record.opened(path, SETTINGS, resume=True, replace=False)


def test_engines_are_started_once_before_a_start_is_measured(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("workers read /proc")
    jobs = fake_jobs(good="good", broken="crash")
    failed = {"broken": "It ended with exit code 1: ValueError: the fake engine broke."}
    assert started_once(jobs, SURE, tmp_path) == failed
    assert [each.name for each in tmp_path.iterdir()] == ["good.json"]
    jobs["good"]["weights"] = "crash"  # would fail, but was started with these versions
    assert started_once(jobs, SURE, tmp_path) == failed
    jobs["good"]["versions"] = {"fake": "2.0"}
    assert list(started_once(jobs, SURE, tmp_path)) == ["good", "broken"]


def test_results_of_a_worker_before_it_broke_are_read() -> None:
    output = '{"sample": "start", "seconds": 1, "foreign": 0}\n{"versions": {"a": "1"}}\n'
    found = gathered(output, SURE)
    assert found.versions == {"a": "1"}
    assert len(found.samples) == 1


def test_last_words_name_no_place_of_this_machine(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"first\ncannot open {Path.home()}/models/x.\n\n", encoding="utf-8")
    assert last_words(log) == "cannot open ~/models/x"
    log.write_text("", encoding="utf-8")
    assert last_words(log) == "no reason was printed"


def test_engines_can_be_chosen_by_a_prefix_of_their_names() -> None:
    assert {each.name for each in ENGINES} - {each.name for each in chosen(None, EPYC)} == {
        *("vLLM float32", "transformers float32")
    }
    both = chosen("llama.cpp, vLLM", EPYC)
    assert {engine.environment for engine in both} == {"llama_cpp", "vllm_cpu"}
    assert {engine.environment for engine in ENGINES} == set(recipes(EPYC))
    assert len({engine.name for engine in ENGINES}) == len(ENGINES)


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("avx2 avx512f avx512_vnni avx512_bf16", "bfloat16"),
        ("avx2 avx512f avx512_vnni", "float32"),
        ("avx2", "float32"),
        ("avx2 amx_int8 amx_bf16", "bfloat16"),
        ("asimd asimddp i8mm bf16", "bfloat16"),
        ("asimd asimddp", "float32"),
    ],
)
def test_torch_computes_in_the_faster_type_of_the_processor(flags: str, dtype: str) -> None:
    engines = chosen("vLLM, transformers", Processor("one", frozenset(flags.split())))
    short = {"bfloat16": "bf16", "float32": "float32"}[dtype]
    names = [f"vLLM {short}", "vLLM W8A8", f"transformers {short}"]
    assert [engine.name for engine in engines] == names
    assert [engine.dtype for engine in engines] == [dtype, "bfloat16", dtype]


def test_minigen_is_measured_with_what_its_users_install(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text(
        """[project]
dependencies = ["numpy>=1.26", "torch>=2.6; python_version < '3'", "safetensors[torch]>=0.5"]
[project.optional-dependencies]
cpu = ["numba>=0.60"]
test = ["pytest"]
""",
        encoding="utf-8",
    )
    found = own_requirements(project)
    assert found == tuple(f"{name}=={version(name)}" for name in ("numpy", "safetensors", "numba"))
    real = [each.partition("==")[0] for each in recipes(EPYC)[OWN].requirements]
    assert {"torch", "numba", "tokenizers"} < set(real)
    assert not {"pytest", "nbval", "fastapi"} & set(real)


def test_a_wheels_requirements_are_read_without_its_extras(tmp_path: Path) -> None:
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        text = 'Name: thing\nRequires-Dist: numpy>=1\nRequires-Dist: pandas; extra == "more"\n'
        archive.writestr("thing-1.0.dist-info/METADATA", text)
    assert requirements_of(wheel) == ["numpy>=1"]


def test_the_page_of_results_shows_what_was_measured() -> None:
    text = results.PAGE.read_text(encoding="utf-8")
    shown = text.split(results.PEERS_BEGIN)[1].split(results.PEERS_END)[0].strip()
    assert shown == peers_page(results.peers()), "run python -m tools.results"


def test_the_table_has_a_row_for_each_engine_its_ratios_and_who_is_left_out() -> None:
    rounds = rounds_of(
        {
            "minigen auto": turn(2468),
            "peer": turn(1234),
            "slower": turn(7),
            "odd": Turn(failure="There are no such weights."),
        },
        {"minigen auto": turn(1234), "peer": turn(1234), "slower": turn(7)},
    )
    measured = {
        "environment": {"cpu": "a processor", "cores": 2},
        "settings": {"threads": 2, "scale": 1.0},
        "summary": summary(rounds),
    }
    table = peers_table("peers-x-avx2", measured)
    lines = table.splitlines()
    assert lines[0] == "2 threads of a processor with 2 cores, 2 rounds, 2026-01-02"
    assert "[peers-x-avx2.json](../benchmarks/results/peers-x-avx2.json)" in lines[1]
    row = "| peer | **1,234** (1,234–1,234) | - | - | - | - | - | **5.00** (5.00–5.00) | 100% |"
    assert row in lines
    assert "- decode, minigen auto / peer (best peer): **1.50** (1.00–2.00, 2 rounds)" in lines
    assert "shortened" not in table
    measured["summary"]["engines"]["peer"]["turns"] = 1
    fewer = "2 threads of a processor with 2 cores, 2 rounds (1 for peer), 2026-01-02"
    assert peers_table("peers-x-avx2", measured).startswith(fewer)
    measured["settings"]["scale"] = 0.2
    assert "shortened to 0.2" in peers_table("peers-x-avx2", measured)
    assert "Versions: thing 1.0 (commit abc)." in table
    assert lines[-1] == "- odd is left out: There are no such weights."


def test_results_are_named_after_the_processor_and_what_it_has() -> None:
    assert [each.short_name for each in (EPYC, XEON, ARM)] == [
        "amd-epyc-avx512bf16",
        "intel-xeon-amx",
        "neoverse-i8mm",
    ]
    names = {
        "13th Gen Intel(R) Core(TM) i7-1365U": "intel-core-avx2",
        "AMD Ryzen 7 7840U w/ Radeon 780M Graphics": "amd-ryzen-avx2",
        "aarch64": "aarch64-avx2",
    }
    avx2 = frozenset({"avx", "avx2"})
    assert {name: Processor(name, avx2).short_name for name in names} == names
    assert Processor("x", frozenset()).instructions == []
    assert "AVX-512 VNNI" in EPYC.instructions
    assert ARM.instructions[0] == "SVE"
    assert {*LEVEL_OF.values(), *PRETENDED} <= set(LEVELS)


def test_a_pretended_processor_has_no_more_than_its_own_instructions() -> None:
    pretended = Processor(XEON.name, XEON.features, "avx2")
    assert pretended.short_name == "intel-xeon-amx-avx2"
    assert pretended.instructions == ["AVX2"]
    assert pretended.variables == VARIABLES["avx2"] != XEON.variables == {}
    assert pretended.can_pretend
    assert not Processor("old", frozenset({"avx"}), "avx2").can_pretend
    assert {engine.environment for engine in chosen(None, pretended)} == {OWN, "llama_cpp"}
    assert [engine.name for engine in chosen("vLLM", pretended)] == []


def test_llama_cpp_is_built_for_the_processor_and_its_report_is_checked() -> None:
    native, with_amx, arm = map(llama_cpp_build, (EPYC, XEON, ARM))
    old = llama_cpp_build(Processor(XEON.name, XEON.features, "avx2"))
    assert len({build.name for build in (native, with_amx, old)}) == 3
    assert native.problem(report_of(*native.wanted)) == ""
    assert native.problem(report_of("AVX2", "AVX512")).startswith("the build lacks F16C, FMA, ")
    assert with_amx.problem(report_of(*native.wanted)) == "the build lacks AVX_VNNI, AMX_INT8"
    assert arm.wanted == ("NEON", "DOTPROD", "MATMUL_INT8", "SVE")
    assert old.problem(report_of("F16C", "FMA", "BMI2", "AVX", "AVX2")) == ""
    excess = old.problem(report_of(*with_amx.wanted))
    assert excess.startswith("the build has AVX_VNNI, AVX512, ")
    assert "AMX_INT8" in excess
    assert "AVX512" not in old.variables["CMAKE_ARGS"]
    assert "-DGGML_AVX2=ON" in old.variables["CMAKE_ARGS"]
    oldest = llama_cpp_build(Processor(XEON.name, XEON.features, "sse4"))
    assert "-DGGML_AVX=OFF" in oldest.variables["CMAKE_ARGS"]
    assert oldest.about.endswith("its system info names no AVX")
    assert oldest.problem(report_of("SSSE3")) == ""
    assert oldest.problem(report_of("SSSE3", "AVX")) == "the build has AVX"
    assert "-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse" in shlex.split(
        with_amx.variables["CMAKE_ARGS"]
    )


def report_of(*features: str) -> str:
    """Return llama.cpp's system info of a build with these features."""
    return "CPU : SSE3 = 1 | " + "".join(f"{each} = 1 | " for each in features)


def test_a_build_that_lacks_what_it_should_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip is not called, and the environment's Python is this one, whose report is canned."""
    build = Build("slow", (), wanted=("AVX2",), report="print('CPU : AVX = 1 | ')")
    recipe = replace(recipes(EPYC)["llama_cpp"], build=build)
    environments = Environments(tmp_path, {"llama_cpp": recipe})
    assert environments.place("llama_cpp") == tmp_path / "llama_cpp-slow"
    monkeypatch.setattr(environments, "python", lambda name: Path(sys.executable))
    calls: list[dict[str, str]] = []
    monkeypatch.setattr(environments, "_pip", lambda *_, variables=None: calls.append(variables))
    with pytest.raises(SetupError, match="llama_cpp was compiled, but the build lacks AVX2"):
        environments.set_up("llama_cpp")
    assert calls == [build.variables, None]


def test_an_engine_that_a_signal_ends_is_named_with_the_signal(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("workers read /proc")
    (job,) = fake_jobs(killed="none").values()
    dying = [sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"]
    found = take_turn(dying, {**job, "answers": SURE, "build": "compiled by hand"}, tmp_path)
    assert found.failure == "It ended with signal SIGSEGV: no reason was printed."
    assert found.versions == {"build": "compiled by hand"}


def test_the_table_says_what_is_pretended_and_how_a_peer_was_built() -> None:
    built = turn(1234)
    built.versions = {"build": "compiled for AVX2"}
    measured = {
        "environment": {"cpu": "a processor", "cores": 2, "instructions": ["AVX2", "AVX"]},
        "settings": {"threads": 2, "scale": 1.0, "pretended": "avx2"},
        "summary": summary(rounds_of({"minigen auto": turn(2468), "llama.cpp Q4_0": built})),
    }
    name = "peers-x-avx512-avx2"
    assert title(name, measured) == "a processor, pretended: AVX2 and no more"
    table = peers_table(name, measured)
    assert "**pretended**" in table
    assert "The processor has AVX2, AVX." in table
    assert table.splitlines()[-1] == "- llama.cpp is compiled for AVX2."
    assert peers_page({name: measured}).startswith(f"### {title(name, measured)}\n\n2 threads")
    assert peers_page({}) == peers_in_short({name: measured}) == ""
    del measured["settings"]["pretended"]
    short = "- a processor with AVX2: decode 2.00; memory 1.00"
    assert peers_in_short({name: measured}) == short


def test_the_table_says_where_torch_emulates_bfloat16() -> None:
    measured = {
        "environment": {"cpu": "a processor", "cores": 2, "instructions": ["AVX-512"]},
        "settings": {"threads": 2, "scale": 1.0},
        "summary": summary(rounds_of({"minigen auto": turn(2), "vLLM bf16": turn(1)})),
    }
    said = "- vLLM bf16: no instruction of this processor multiplies bfloat16"
    assert peers_table("peers-x-avx512", measured).splitlines()[-1].startswith(said)
    measured["environment"]["instructions"].append("AVX-512 BF16")
    assert "emulates" not in peers_table("peers-x-avx512", measured)


def test_help_shows_how_to_divide_a_run() -> None:
    command = [sys.executable, "-m", "benchmarks.peers", "--help"]
    output = subprocess.run(
        command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True
    ).stdout
    assert "--resume --rounds 3" in output
    assert all(engine.name in " ".join(output.split()) for engine in ENGINES)
