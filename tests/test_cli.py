"""The command line: answers on stdout alone, one sentence for every mistake, no traceback."""

import errno
import io
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from minigen import __version__, hardware, hub
from minigen.cli import main as cli
from minigen.config import written
from minigen.errors import OptionError
from tests.waiting import PATIENCE


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run `python -m minigen ...` in a separate process."""
    command = [sys.executable, "-m", "minigen", *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120, **options)  # type: ignore[call-overload]


def main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Run the same in this process; return exit status, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["minigen", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err


def test_generate_writes_only_the_answer_to_stdout(tiny_directory: Path) -> None:
    done = run("generate", "abc", "--model", str(tiny_directory), "--max-tokens", "5")
    assert done.returncode == 0
    assert done.stderr == ""
    again = run("generate", "abc", "-m", str(tiny_directory), "--max-tokens", "5")
    assert again.stdout == done.stdout != ""


def test_a_terminal_without_a_character_gets_a_question_mark_for_it(tiny_directory: Path) -> None:
    arguments = ("generate", "abc", "--model", str(tiny_directory), "--max-tokens", "20")
    whole = run(*arguments)
    assert not whole.stdout.isascii(), "random bytes are no ASCII"
    poor = run(*arguments, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (poor.returncode, poor.stderr) == (0, "")
    assert poor.stdout == whole.stdout.encode("ascii", "replace").decode()


def test_generate_prints_several_answers_in_the_order_of_the_prompts(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["-m", str(tiny_directory), "--max-tokens", "6", "--weights", "float32"]
    alone = [
        main(monkeypatch, capsys, "generate", prompt, *options)[1].removesuffix("\n")
        for prompt in ("first", "second")
    ]
    _, both, _ = main(monkeypatch, capsys, "generate", "first", "second", *options)
    assert both == "\n\n".join(alone) + "\n"
    _, twice, _ = main(
        monkeypatch, capsys, "generate", "first", *options, "-n", "2", "--temperature", "1"
    )
    assert twice.count("\n\n") >= 1


def test_generate_reads_stdin_where_a_dash_stands(tiny_directory: Path) -> None:
    options = ["--model", str(tiny_directory), "--max-tokens", "5"]
    assert (
        run("generate", "-", *options, input="abc").stdout
        == run("generate", "abc", *options).stdout
    )


def test_bytes_on_stdin_that_are_not_text_get_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abc\xff"), encoding="utf-8"))
    status, _, err = main(monkeypatch, capsys, "generate", "-")
    assert status == 1
    assert err == "minigen: stdin is not valid utf-8: byte 3 is an invalid start byte.\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "x", "--model", "no/such/model/at/all"], "not a file or folder here"),
        (["generate", "x", "--model", "./nowhere"], "nowhere"),
        (["generate", "x", "--model", "smollm"], "did you mean smollm2-135m"),
        (["generate", "", "--model", "TINY", "--temperature", "-1"], "temperature"),
        (["generate", "x", "--top-p", "0"], "top_p"),
        (["generate", "x", "--top-k", "0"], "top_k"),
        (["generate", "x", "--n", "0"], "n must be"),
        (["generate", "x", "--weights", "int3"], "float32"),
        (["generate", "x", "--threads", "0"], "threads"),
        (["generate", "x" * 400, "--model", "TINY"], "context holds 128"),
        (["generate", "--chat", "x" * 400, "--model", "TINY"], "context holds 128"),
        (["info", "./nowhere"], "nowhere"),
        (["pull", "./nowhere"], "nowhere"),
        (["pull", "--from", "./nowhere.whl"], "nowhere.whl"),
        (["chat", "--model", "./nowhere"], "nowhere"),
    ],
)
def test_a_mistake_gets_one_sentence_and_status_1(
    arguments: list[str],
    words: str,
    tiny_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [str(tiny_directory) if each == "TINY" else each for each in arguments]
    status, out, err = main(monkeypatch, capsys, *arguments)
    assert (status, out) == (1, "")
    assert err.startswith("minigen: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["generate"], ["generate", "x", "--max-tokens", "many"], ["dance"], ["--what"]]
)
def test_a_wrong_option_is_explained_with_status_2(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = main(monkeypatch, capsys, *arguments)
    assert (status, out) == (2, "")
    assert "Traceback" not in err


def test_help_starts_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['minigen', '--help']\n"
        "from minigen.cli import main as cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert done.stderr.strip() == "False False"
    for command in ("generate", "chat", "demo", "pull", "info", "doctor"):
        assert command in done.stdout


def test_the_default_model_and_the_version_are_named_consistently() -> None:
    assert cli.DEFAULT_MODEL == hub.DEFAULT_MODEL
    assert run("--version").stdout.split() == ["minigen", __version__]


def test_a_closed_pipe_causes_no_error_message(tiny_directory: Path) -> None:
    command = [sys.executable, "-m", "minigen", "generate", "abc", "--model", str(tiny_directory)]
    with subprocess.Popen(
        [*command, "--max-tokens", "100", "--temperature", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def closed_pipe() -> int:
    """Return the end of a pipe that nothing reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    ("opened", "said"),
    [
        (closed_pipe, ""),
        (
            partial(os.open, "/dev/full", os.O_WRONLY),
            "minigen: the output could not be written: No space left on device.\n",
        ),
    ],
    ids=["closed pipe", "full disk"],
)
def test_output_that_cannot_be_written_ends_with_status_1_and_no_traceback(
    opened: Callable[[], int],
    said: str,
    buffered: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = os.fdopen(opened(), "wb", buffering=-1 if buffered else 0)
    with io.TextIOWrapper(file, encoding="utf-8", write_through=not buffered) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", sys.stderr)  # click replaces both
        status, _, err = main(monkeypatch, capsys, "--version")
        assert (status, err) == (1, said)


@pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
def test_an_interrupt_ends_with_status_130_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "minigen", "generate", "-", "--model", "./nowhere"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Programs in a shell's background ignore interrupts, and so do their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        time.sleep(3)  # it imports, then waits for its prompt
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE) == 130
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()


def test_bench_prints_what_it_measured_and_writes_every_turn(
    tiny_directory: Path, tmp_path: Path
) -> None:
    numbers = tmp_path / "numbers.json"
    small = ["--requests", "3", "--input-tokens", "5", "--output-tokens", "4", "--turns", "2"]
    done = run("bench", "--model", str(tiny_directory), *small, "--json", str(numbers))
    assert done.returncode == 0, done.stderr
    assert "3 requests: output" in done.stdout
    found = json.loads(numbers.read_text("utf-8"))
    assert found["load"]["num_requests"] == 3
    assert len(found["turns"]) == 2
    assert all(value > 0 for turn in found["turns"] for value in turn.values())
    assert str(tiny_directory) not in numbers.read_text("utf-8")
    refused = run("bench", "--model", str(tiny_directory), "--turns", "0")
    assert refused.returncode == 1
    assert "--turns must be at least 1" in refused.stderr


def test_bench_refuses_lengths_beyond_the_context_and_files_that_cannot_be_written(
    tiny_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = ["--requests", "1", "--turns", "1", "--input-tokens", "5", "--model", str(tiny_directory)]
    long = [*few, "--output-tokens", "124"]
    status, _, err = main(monkeypatch, capsys, "bench", *long)
    assert status == 1
    assert "add up to 129 tokens, but this model's context holds 128." in err
    short = [*few, "--output-tokens", "4", "--json", str(tmp_path / "no" / "numbers.json")]
    status, _, err = main(monkeypatch, capsys, "bench", *short)
    assert status == 1
    assert "numbers.json cannot be written: its folder does not exist." in err


def test_a_file_stays_as_it_is_until_the_new_one_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    file.write_text("old", encoding="utf-8")

    def fill(text: str) -> None:
        with written("json", file) as part:
            part.write_text(text, encoding="utf-8")
            if text == "half":
                raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OptionError, match=r"--json .* cannot be written: No space left"):
        fill("half")
    assert file.read_text("utf-8") == "old"
    fill("new")
    assert [each.read_text("utf-8") for each in tmp_path.iterdir()] == ["new"]


def test_generate_records_a_trace_beside_its_text(tiny_directory: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    few = ["--model", str(tiny_directory), "--max-tokens", "3"]
    done = run("generate", "abc", *few, "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    assert json.loads(trace.read_text("utf-8"))["traceEvents"]
    assert "time to first token" in done.stderr
    assert done.stdout == run("generate", "abc", *few).stdout
    nowhere = run("generate", "abc", *few, "--trace", str(tmp_path / "no" / "trace.json"))
    assert nowhere.returncode == 1
    assert "cannot be written: its folder does not exist" in nowhere.stderr
    assert nowhere.stdout == ""
    assert "Traceback" not in nowhere.stderr


def test_info_shows_architecture_and_memory(tiny_directory: Path) -> None:
    done = run("info", str(tiny_directory))
    assert done.returncode == 0
    for words in ("llama", "6 query, 2 KV, of 8", "safetensors (F32)", "bfloat16"):
        assert words in done.stdout


def test_info_shows_what_a_rank_of_each_stage_holds(tiny_directory: Path) -> None:
    cut = ("--pipeline-parallel-size", "2", "--tensor-parallel-size", "2")
    done = run("info", str(tiny_directory), *cut)
    assert done.returncode == 0
    lines = [[each.strip() for each in line.split("│")] for line in done.stdout.splitlines()]
    stages = [line[1:4] for line in lines if len(line) == 7 and line[1] in ("0", "1")]
    assert stages == [["0", "0-1", "0-1"], ["1", "2-3", "2-2"]]
    assert "about equal work in a decode: --pipeline-layers" not in done.stdout
    done = run("info", str(tiny_directory), *cut, "--pipeline-layers", "1,2")
    assert "about equal work in a decode: --pipeline-layers 2,1" in done.stdout
    done = run("info", str(tiny_directory), "--pipeline-parallel-size", "4")
    assert done.returncode == 1
    assert "possible values are 1 to 3" in done.stderr


def test_chat_remembers_the_conversation_and_supports_its_commands(tiny_directory: Path) -> None:
    lines = "hi\n/what\n/help\n/clear\n/system be brief\nyo\n/retry\n/exit\nnot read\n"
    options = ["--model", str(tiny_directory), "--max-tokens", "4", "--seed", "1"]
    done = run("chat", *options, input=lines)
    assert done.returncode == 0
    assert "There is no command /what" in done.stderr
    assert done.stderr.count("\n4 tokens, ") == 3
    assert "Traceback" not in done.stderr


def test_chat_refuses_bytes_that_are_not_text_in_one_sentence(tiny_directory: Path) -> None:
    command = [sys.executable, "-m", "minigen", "chat", "--model", str(tiny_directory)]
    environment = {**os.environ, "PYTHONUTF8": "1"}
    done = subprocess.run(
        [*command, "--max-tokens", "2"],
        input=b"hi\nab\xff\n",
        capture_output=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 1
    errors = done.stderr.decode().splitlines()
    assert (
        errors[-1] == "minigen: stdin is not valid utf-8: the byte 0xff is an invalid start byte."
    )
    assert "Traceback" not in done.stderr.decode()


def test_chat_drops_the_oldest_turn_when_the_context_is_full(tiny_directory: Path) -> None:
    options = ["--model", str(tiny_directory), "--max-tokens", "3", "--seed", "1"]
    done = run("chat", *options, input="a" * 60 + "\n" + "b" * 60 + "\n" + "c" * 200 + "\n")
    assert done.returncode == 0
    assert "oldest turn is dropped" in done.stderr
    assert "context holds 128" in done.stderr


def test_chat_drops_the_oldest_turn_when_the_kv_cache_is_full(tiny_directory: Path) -> None:
    options = ["--model", str(tiny_directory), "--max-tokens", "3", "--seed", "1"]
    options += ["--num-blocks", "4"]
    done = run("chat", *options, input="a" * 30 + "\n" + "b" * 30 + "\n" + "c" * 80 + "\nd\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("oldest turn is dropped") == 2
    assert "fit into the KV cache, which holds 64 tokens" in done.stderr
    assert done.stderr.count("\n3 tokens, ") == 3, "the last question is answered again"


@pytest.mark.model
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_default_model_answers_within_900_megabytes(tmp_path: Path) -> None:
    """It uses its own copy of the file: pages that another process maps too are not freed.

    The smallest of three peaks counts: a busy system frees pages late, which only adds to a peak.
    """
    own = tmp_path / "own.gguf"
    shutil.copyfile(hub.resolve(hub.DEFAULT_MODEL), own)
    with own.open("rb+") as written:
        os.fsync(written)  # pages that are not on disk yet cannot be freed either
    for weights in ("auto", "float32"):
        peaks = (_peak_kilobytes(own, weights) for _ in range(3))
        assert next((peak for peak in peaks if 200_000 < peak < 900_000), None), weights


@pytest.mark.model
def test_a_start_on_compiled_kernels_imports_neither_the_compiler_nor_bars_nor_gguf() -> None:
    code = (
        "import sys; from minigen.cli import main as cli\n"
        "sys.argv = ['minigen', 'generate', 'The capital of France is', '--max-tokens', '4']\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "slow = 'numba', 'gguf', 'rich', 'minigen.progress'\n"
        "runner = 'minigen.kernels.cpu.runner'\n"
        "print(runner in sys.modules, [each for each in slow if each in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert done.stdout.endswith("True []\n"), done.stderr
    assert "Paris" in done.stdout


def _peak_kilobytes(model: Path, weights: str) -> int:
    """Return the peak resident memory; `ru_maxrss` would include the parent's memory."""
    code = (
        "import sys; from minigen.cli import main as cli\n"
        f"sys.argv = ['minigen', 'generate', 'The capital of France is', '--max-tokens', '8',"
        f" '--weights', '{weights}', '--model', {str(model)!r}]\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "lines = open('/proc/self/status').read().splitlines()\n"
        "print(*[line for line in lines if 'VmHWM' in line], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert "Paris" in done.stdout
    return int(done.stderr.split()[-2])


@pytest.mark.parametrize("command", ["generate -", "chat", "perplexity {} --text -"])
def test_a_closed_stdin_is_an_empty_one(tiny_directory: Path, command: str) -> None:
    words = command.format(tiny_directory).split()
    model = [] if "perplexity" in words else ["-m", str(tiny_directory)]
    ours = [sys.executable, "-m", "minigen", *words, *model]
    line = ["sh", "-c", '"$@" <&-', "sh", *ours]
    done = subprocess.run(line, capture_output=True, encoding="utf-8", timeout=120)
    assert "Traceback" not in done.stderr
    empty = subprocess.run(ours, capture_output=True, stdin=subprocess.DEVNULL, encoding="utf-8")
    assert (done.returncode, done.stdout, done.stderr) == (
        empty.returncode,
        empty.stdout,
        empty.stderr,
    )


def test_a_closed_stdout_takes_the_answer(tiny_directory: Path) -> None:
    ours = [sys.executable, "-m", "minigen", "generate", "abc", "-m", str(tiny_directory)]
    line = ["sh", "-c", '"$@" >&-', "sh", *ours, "--max-tokens", "2"]
    done = subprocess.run(line, capture_output=True, encoding="utf-8", timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_model_whose_path_has_brackets_is_shown_in_the_demo(
    tiny_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    path = tmp_path / "model[" / "b]"
    shutil.copytree(tiny_directory, path)
    model = ("-m", str(path), "--weights", "float32")
    code, out, err = main(monkeypatch, capsys, "demo", *model, "--max-tokens", "2")
    assert code == 0, err
    assert f"from {path}" in out


@pytest.mark.model
def test_doctor_and_demo_run_to_their_end() -> None:
    doctor = run("doctor")
    assert doctor.returncode == 0
    for topic in ("processor", "memory bandwidth", "gpu", "compiler", "triton", "default model"):
        assert topic in doctor.stdout
    demo = run("demo", "--max-tokens", "4")
    assert demo.returncode == 0
    assert "0 of 6 running" in demo.stdout


@pytest.mark.parametrize(
    ("capabilities", "name"),
    [
        ({}, "aarch64"),
        ({"cpu_name": "Unknown"}, "aarch64"),
        ({"cpu_name": "Neoverse-V2"}, "Neoverse-V2"),
    ],
)
def test_a_processor_without_a_name_is_called_by_its_architecture(
    capabilities: dict[str, object], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "_capabilities", lambda: capabilities)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert hardware.cpu_name() == name
