"""Kernels are compiled once, by one process, at the first load that needs them."""

import inspect
import os
import signal
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("numba")

from filelock import FileLock

from minigen.assembly import cpu, cpu_kernels
from minigen.checkpoint.checkpoint import Checkpoint, open_checkpoint
from minigen.child_process import environment, start_module
from minigen.cli import main
from minigen.cli.compile import compile_forms
from minigen.config import EngineConfig
from minigen.engine.model_runner import Packed
from minigen.errors import OptionError, SlowPathWarning
from minigen.hub import Progress
from minigen.kernels.cpu import compile as compile_module
from minigen.kernels.jit import code_cache, compile_process
from minigen.kernels.jit.compile_once import Kernels, compile_once
from minigen.kernels.jit.machine_code import CompiledFunction, Flat
from tests.tiny import save_model, save_tokenizer
from tests.waiting import wait_until

SIZES: dict[str, Any] = {  # what the vectors need: widths of 32, a vocabulary of 16
    "vocab_size": 304,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "head_dim": 32,
}
WORKS = "time.sleep(0.2); Path(folder, 'compiled').touch()"
CRASHES = "os.abort()"
FAILS = "sys.exit('no LLVM here')"
HANGS = "sys.stdin.read()"
COMPILER = """
import os, sys, time
from pathlib import Path
folder = sys.argv[1]
with open(Path(folder, "started"), "a") as file:
    file.write("x")
"""


def kernels_in(folder: Path, work: str = WORKS) -> Kernels:
    """Return kernels whose compiler counts its starts, and then does `work`."""
    return Kernels(
        "toy kernels",
        "once",
        folder / ".lock",
        (folder / "compiled").exists,
        lambda log: subprocess.Popen(
            [sys.executable, "-c", COMPILER + work, str(folder)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        ),
    )


def num_starts(folder: Path) -> int:
    """Return how often the compiler of `kernels_in` was started."""
    return len((folder / "started").read_text("utf-8")) if (folder / "started").exists() else 0


class Said(list[str]):
    """A `Progress` that keeps its lines."""

    def __call__(self, label: str, num_bytes: int, num_total_bytes: int | None) -> None:
        assert (num_bytes, num_total_bytes) == (0, None)
        self.append(label)


def test_the_first_use_compiles_and_says_how_long_it_took(tmp_path: Path) -> None:
    said = Said()
    assert compile_once(kernels_in(tmp_path), said) is None
    assert len(said) == 2
    assert said[0].startswith("compiling toy kernels: about")
    assert said[0].endswith("once")
    assert said[1].startswith("compiled toy kernels in ")


def test_a_second_use_compiles_nothing_and_says_nothing(tmp_path: Path) -> None:
    compile_once(kernels_in(tmp_path), Said())
    said = Said()
    assert compile_once(kernels_in(tmp_path), said) is None
    assert (num_starts(tmp_path), said) == (1, [])


def test_threads_that_begin_at_once_compile_once(tmp_path: Path) -> None:
    said, found = Said(), []
    threads = [
        threading.Thread(target=lambda: found.append(compile_once(kernels_in(tmp_path), said)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (found, num_starts(tmp_path)) == ([None] * 4, 1)
    assert said.count("waiting for another process that is compiling CPU kernels") == 3


def test_one_that_begins_later_waits_for_the_compiler(tmp_path: Path) -> None:
    said: list[Said] = [Said(), Said()]
    work = "\nwhile not Path(folder, 'go').exists():\n    time.sleep(0.01)\n" + WORKS
    threads = [
        threading.Thread(target=compile_once, args=(kernels_in(tmp_path, work), each))
        for each in said
    ]
    threads[0].start()
    wait_until(lambda: num_starts(tmp_path) == 1)
    threads[1].start()
    wait_until(lambda: len(said[1]) == 1)
    (tmp_path / "go").touch()
    for thread in threads:
        thread.join()
    assert num_starts(tmp_path) == 1


_ASKS = """
import subprocess, sys
from pathlib import Path
from minigen.hub import Lines
from minigen.kernels.jit.compile_once import Kernels, compile_once
folder, compiler = sys.argv[1:]
command = [sys.executable, "-c", compiler, folder]
start = lambda log: subprocess.Popen(command, stderr=log)
is_compiled = Path(folder, "compiled").exists
kernels = Kernels("toy kernels", "once", Path(folder, ".lock"), is_compiled, start)
print(compile_once(kernels, Lines()))
"""


def test_processes_that_begin_at_once_compile_once(tmp_path: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _ASKS, str(tmp_path), COMPILER + WORKS],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            env=environment(),
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=300) for process in started]
    assert [out.strip() for out, _ in said] == ["None", "None"], said
    assert num_starts(tmp_path) == 1


@pytest.mark.parametrize(
    ("work", "reason"), [(FAILS, "failed: no LLVM here"), (CRASHES, "failed: ")]
)
def test_a_compiler_that_fails_is_a_reason_and_delays_no_other(
    work: str, reason: str, tmp_path: Path
) -> None:
    found = compile_once(kernels_in(tmp_path, work), Said())
    assert found is not None
    assert reason in found
    assert compile_once(kernels_in(tmp_path), Said()) is None
    assert num_starts(tmp_path) == 2


def test_a_compiler_that_ends_without_kernels_has_failed(tmp_path: Path) -> None:
    found = compile_once(kernels_in(tmp_path, ""), Said())
    assert found == "compiling its kernels failed: status 0"


def test_a_compiler_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    found = compile_once(kernels_in(tmp_path, HANGS), Said(), seconds=0.5)
    assert found is not None
    assert "took more than" in found


def test_another_process_that_takes_too_long_is_not_waited_for(tmp_path: Path) -> None:
    with FileLock(tmp_path / ".lock"):
        found = compile_once(kernels_in(tmp_path), Said(), seconds=0.2)
    assert found is not None
    assert found.startswith("another process has been compiling")
    assert num_starts(tmp_path) == 0


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_a_process_that_was_killed_leaves_no_lock(tmp_path: Path) -> None:
    """The operating system releases it."""
    holds = "import sys, time; from filelock import FileLock; FileLock(sys.argv[1]).acquire(); "
    command = [sys.executable, "-c", f"{holds}print('held', flush=True); time.sleep(600)"]
    process = subprocess.Popen([*command, str(tmp_path / ".lock")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert compile_once(kernels_in(tmp_path), Said()) is None


def test_a_compiler_that_cannot_be_started_is_a_reason(tmp_path: Path) -> None:
    def fails(log: object) -> "subprocess.Popen[bytes]":
        raise PermissionError("no more processes")

    found = compile_once(replace(kernels_in(tmp_path), start=fails), Said())
    assert found == "its kernels cannot be compiled here: no more processes"


def test_the_compiler_ends_with_the_process_that_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIGEN_HOME", str(tmp_path))  # no kernels yet, so there is work for long
    with (tmp_path / "log").open("wb") as log:
        child = start_module(
            "minigen.kernels.jit.compile_process", "int8", "bfloat16", stdout=log, stderr=log
        )
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(300) == 1


_WAITS = """
import time
from threading import Thread
from minigen.child_process import wait_for_starter

Thread(target=wait_for_starter, daemon=True).start()
time.sleep(0.3)  # it waits in a read
"""


def test_a_process_that_waits_for_its_starter_ends_in_peace() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _WAITS],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as child:
        assert child.wait(60) == 0
        assert child.stderr is not None
        assert child.stderr.read() == b""


@pytest.mark.parametrize("breaks", [False, True])
def test_a_numba_without_what_the_fast_way_needs_compiles_the_whole(
    breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_step(form: str, kv_dtype: str) -> None:
        if breaks:
            raise AttributeError("codegen")

    whole: list[tuple[str, str]] = []

    def compile_whole(form: str, kv_dtype: str) -> int:
        whole.append((form, kv_dtype))
        return 0

    monkeypatch.setattr(compile_process, "compile_step", compile_step)
    monkeypatch.setattr(compile_process, "_compile_whole", compile_whole)
    assert compile_process.compile_kernels("int8", "bfloat16") == 0
    assert whole == ([("int8", "bfloat16")] if breaks else [])


# ---- where the machine code is kept


def test_a_folder_that_can_be_written_is_used(tmp_path: Path) -> None:
    wanted = tmp_path / "cache" / "kernels" / "abc"
    assert code_cache.usable_folder(wanted, tmp_path) == wanted


def test_a_read_only_cache_is_used_from_a_private_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tmp_path / "cache" / "abc"
    wanted.mkdir(parents=True)
    (wanted / "int4.compiled.json").write_text("{}", "utf-8")
    wanted.chmod(0o555)
    can_write = code_cache._can_write
    monkeypatch.setattr(
        code_cache,
        "_can_write",
        lambda folder, mode=0o777: folder != wanted and can_write(folder, mode),
    )
    found = code_cache.usable_folder(wanted, tmp_path / "tmp")
    assert found is not None
    assert found.name == "abc"
    assert (found / "int4.compiled.json").exists()
    if os.name != "nt":
        modes = [stat.S_IMODE(each.stat().st_mode) for each in (found.parent, found)]
        assert modes == [0o700, 0o700]
    (found / "int4.compiled.json").write_text("more", "utf-8")
    assert code_cache.usable_folder(wanted, tmp_path / "tmp") == found
    assert (found / "int4.compiled.json").read_text("utf-8") == "more", "it was copied once"


def test_without_a_cache_the_code_is_kept_in_a_temporary_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = code_cache.usable_folder(tmp_path / "file" / "abc", tmp_path / "tmp")
    assert found is not None
    assert found.is_relative_to(tmp_path / "tmp")


def test_there_may_be_no_folder_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert code_cache.usable_folder(tmp_path / "file" / "abc", tmp_path / "file") is None


@pytest.mark.skipif(os.name == "nt", reason="on Windows each user has a temporary folder")
def test_a_temporary_folder_that_others_can_write_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wanted = tmp_path / "file" / "abc"
    own = code_cache.usable_folder(wanted, tmp_path)
    assert own is not None
    own.parent.chmod(0o777)
    assert code_cache.usable_folder(wanted, tmp_path) is None


@pytest.mark.parametrize("changed", ["package", "processor", "source", "argument"])
def test_another_version_or_processor_has_other_machine_code(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_cache, "SOURCES", tmp_path)
    (tmp_path / "step.py").write_text("one", "utf-8")
    beside = tmp_path / "beside.txt"
    beside.write_text("one", "utf-8")
    monkeypatch.setattr(code_cache, "BESIDE", (beside,))
    before = code_cache.fingerprint()
    assert code_cache.fingerprint() == before
    if changed == "package":
        monkeypatch.setattr(code_cache, "version", lambda package: "99.9")
    elif changed == "processor":
        monkeypatch.setattr(code_cache, "cpu_name", lambda: "z80")
    else:
        changed_file = tmp_path / "step.py" if changed == "source" else beside
        changed_file.write_text("two", "utf-8")
    assert code_cache.fingerprint() != before


def test_machine_code_depends_on_the_order_of_the_fields_that_a_step_gets() -> None:
    assert Path(inspect.getfile(Packed)) in code_cache.BESIDE


_ONLY_OUTERMOST = """
import numpy as np
from numba import njit
from numba.core.codegen import JITCodeLibrary
from minigen.kernels.jit.outermost import only_outermost_code

written = []
finalize = JITCodeLibrary._finalize_specific
def counted(self):
    written.append(self.name)
    finalize(self)
JITCodeLibrary._finalize_specific = counted

@njit
def inner(x):
    return x * 2.5

@njit
def middle(x):
    return inner(x) + 1.0

@njit
def outer(numbers):
    total = 0.0
    for number in numbers:
        total += middle(number)
    return total

with only_outermost_code():
    assert outer(np.ones(3)) == 10.5
assert [name for name in written if name in ("outer", "middle", "inner")] == ["outer"], written
try:
    inner(1.0)
except SystemError:
    pass
else:
    raise AssertionError("a callee has no machine code of its own")

@njit
def later(x):
    return inner(x) - 1.0

assert later(2.0) == 4.0  # after the block, a callee's code is still there to be linked
"""


def test_only_the_outermost_function_gets_machine_code() -> None:
    run_python("-c", _ONLY_OUTERMOST)


_STORED = """
import sys
import numpy as np
from minigen.kernels.jit.machine_code import CompiledFunction

fast = CompiledFunction("functions", "total")
numbers, found = np.arange(4.0), np.zeros(1)
fast(numbers, found)
print(found[0], "numba" in sys.modules)
"""
_TOTAL = """
def total(numbers, found):
    for number in numbers:
        found[0] += number
"""


def test_stored_machine_code_runs_without_the_compiler(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_STORED, "utf-8")
    (tmp_path / "functions.py").write_text(_TOTAL, "utf-8")
    home = {"MINIGEN_HOME": str(tmp_path / "home")}
    assert run_python(str(program), **home).split() == ["6.0", "True"], "it is compiled"
    (code,) = (tmp_path / "home").rglob("functions.total-*.code")
    whole = code.read_bytes()
    assert run_python(str(program), **home).split() == ["6.0", "False"], "it is found"
    for damaged in (b"", whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        code.write_bytes(damaged)
        assert run_python(str(program), **home).split() == ["6.0", "True"], "it is compiled again"
        assert len(code.read_bytes()) > 1000, "and stored again"


class _Pair(NamedTuple):
    left: np.ndarray
    right: Any


def every_type(numbers: Any, pair: Any, whole: Any, yes: Any, half: Any, third: Any) -> None:
    """What a compiled function reads, written to `numbers`; it is compiled, and called as it is."""
    numbers[0] = pair.left[1, 2] + pair.right[0].left[3]
    numbers[1] = pair.right[1] + whole
    numbers[2] = half if yes else third
    numbers[3] = pair.left.shape[0] * 10 + pair.left.shape[1]


@pytest.fixture
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Store the code of this file's functions where no later version of them finds it."""
    monkeypatch.setattr(code_cache, "FOLDER", tmp_path)


@pytest.mark.usefixtures("_own_folder")
def test_a_compiled_function_reads_numbers_and_arrays_of_every_kind() -> None:
    def arguments() -> list[Any]:
        left = np.arange(6, dtype=np.int32).reshape(2, 3)
        inner = _Pair(np.arange(4, dtype=np.uint16), 0.5)
        return [_Pair(left, (inner, -7)), 2**40, False, np.float32(0.1), 0.2]

    compiled = CompiledFunction("tests.test_34_compile_once", "every_type")
    found, expected = np.zeros(4), np.zeros(4)
    compiled(found, *arguments())
    every_type(expected, *arguments())
    np.testing.assert_array_equal(found, expected)
    kept = Flat(*arguments())
    again = np.zeros(4)
    compiled(again, kept)
    np.testing.assert_array_equal(again, expected)
    read_only = np.ones(4)
    read_only.setflags(write=False)
    assert Flat(read_only).layout == Flat(np.ones(4)).layout, "one machine code for both"


@pytest.mark.parametrize(
    ("argument", "said"),
    [(np.zeros((4, 4))[:, 1], "contiguous arrays"), ("text", "not str"), (None, "not NoneType")],
)
def test_a_compiled_function_refuses_what_it_cannot_read(argument: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        Flat(argument)


def divide(numbers: Any, divisor: Any) -> None:
    numbers[0] = 1 // divisor


@pytest.mark.usefixtures("_own_folder")
def test_an_exception_in_machine_code_is_one_in_python() -> None:
    compiled = CompiledFunction("tests.test_34_compile_once", "divide")
    compiled(np.zeros(1), 1)
    with pytest.raises(RuntimeError, match="divide raised an exception"):
        compiled(np.zeros(1), 0)


def run_python(*arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        encoding="utf-8",
        env=environment() | variables,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- a load


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("model")
    save_model(directory, "llama", **SIZES)
    save_tokenizer(directory)
    return open_checkpoint(directory)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that sets what the compiler of the CPU kernels does."""
    monkeypatch.delenv(cpu_kernels.VARIABLE)
    monkeypatch.setattr(code_cache, "is_compiled", lambda *forms: (tmp_path / "compiled").exists())
    monkeypatch.setattr(
        code_cache, "speeds", lambda form: {"compiled": 2.0, "bfloat16": 1.0, "float32": 1.0}
    )

    def set_work(work: str) -> None:
        kernels = kernels_in(tmp_path, work)
        monkeypatch.setattr(cpu_kernels, "_step_kernels", lambda form, kv_dtype: kernels)

    return set_work


def plan(checkpoint: Checkpoint, progress: Progress | None = None, **options: Any) -> cpu.CpuPlan:
    return cpu.plan(checkpoint, EngineConfig(**options), progress)


@pytest.mark.parametrize("weights", ["auto", "bfloat16", "int8"])
def test_the_first_load_compiles_the_kernels_and_the_second_finds_them(
    weights: str, checkpoint: Checkpoint, compiler: Callable[[str], None], tmp_path: Path
) -> None:
    compiler(WORKS)
    said = Said()
    for _ in range(2):
        assert plan(checkpoint, said, weights=weights).compiled
    assert (num_starts(tmp_path), len(said)) == (1, 2)


def test_lines_about_compiling_go_to_stderr(
    checkpoint: Checkpoint, compiler: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    compiler(WORKS)
    plan(checkpoint)
    out, err = capfd.readouterr()
    assert out == ""
    assert [line.split()[0] for line in err.splitlines()] == ["compiling", "compiled"]


def test_the_option_switches_compiling_off(
    checkpoint: Checkpoint, compiler: Callable[[str], None], tmp_path: Path
) -> None:
    compiler(WORKS)
    found = plan(checkpoint, compile_kernels="never")
    assert "not compiled yet: minigen compile" in found.runner
    assert num_starts(tmp_path) == 0


def test_the_variable_switches_compiling_off(
    checkpoint: Checkpoint,
    compiler: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler(WORKS)
    monkeypatch.setenv(cpu_kernels.VARIABLE, "never")
    assert not plan(checkpoint).compiled
    assert num_starts(tmp_path) == 0


def test_an_unknown_setting_of_the_variable_is_one_sentence(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cpu_kernels.VARIABLE, "off")
    with pytest.raises(OptionError, match=r"COMPILE_KERNELS must be one of auto, never, not 'off'"):
        plan(checkpoint)


@pytest.mark.parametrize(
    "options", [{"weights": "float32"}, {"kv_cache_dtype": "int4"}, {"attention_backend": "own"}]
)
def test_what_the_user_chose_compiles_nothing_and_warns_of_nothing(
    options: dict[str, Any], checkpoint: Checkpoint, compiler: Callable[[str], None], tmp_path: Path
) -> None:
    compiler(WORKS)
    if "attention_backend" in options:
        options = {"attention_backend": lambda pool, batch, windows: []}
    assert not plan(checkpoint, **options).compiled
    assert num_starts(tmp_path) == 0


def test_a_slower_path_is_warned_of_once_with_its_reason(
    checkpoint: Checkpoint, compiler: Callable[[str], None]
) -> None:
    compiler(FAILS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            assert "no LLVM here" in plan(checkpoint).runner
    assert [each.category for each in caught] == [SlowPathWarning]
    assert str(caught[0].message) == (
        "torch runs this model layer by layer, several times slower than compiled kernels: "
        "compiling its kernels failed: no LLVM here."
    )


def test_a_missing_numba_is_warned_of_with_what_to_install(
    checkpoint: Checkpoint, compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "has_numba", lambda: False)
    with pytest.warns(SlowPathWarning, match=r"pip install 'minigen\[cpu\]'"):
        assert not plan(checkpoint).compiled


def test_weights_without_a_torch_twin_warn_if_each_process_compiles_them(
    checkpoint: Checkpoint, compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(WORKS)
    monkeypatch.setattr(cpu_kernels, "_step_kernels", lambda form, kv_dtype: None)
    with pytest.warns(SlowPathWarning, match="Each process .* MINIGEN_HOME to one that can"):
        assert plan(checkpoint, weights="int8").compiled


def test_the_command_names_why_nothing_is_compiled(compiler: Callable[[str], None]) -> None:
    compiler(FAILS)
    with pytest.raises(OptionError, match=r"weights=int4 is not compiled: .* no LLVM here"):
        compile_forms(["int4"])


def test_the_command_line_prints_a_slower_path_as_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Another warning looks as Python prints it."""
    main._print_warning(SlowPathWarning("torch runs this model."), SlowPathWarning, "a.py", 1)
    main._print_warning(UserWarning("other"), UserWarning, "b.py", 2)
    assert capsys.readouterr().err == (
        "minigen: torch runs this model.\nb.py:2: UserWarning: other\n"
    )


def test_the_speeds_that_auto_compares_are_those_of_undisturbed_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another program may have the cores for most of the runs, but hardly for all of them."""
    now, turns = [0.0], []

    def taking(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            turns.append(name)
            disturbed = len(turns) % 8 != 1 and len(turns) % 8 != 2
            now[0] += seconds * (10 if disturbed else 1)

        return run

    monkeypatch.setattr(compile_module.time, "perf_counter", lambda: now[0])
    runs = {"compiled": taking("compiled", 1.0), "torch": taking("torch", 2.0)}
    found = compile_module._fewest_seconds(runs)
    assert found == pytest.approx({"compiled": 1.0, "torch": 2.0})
    assert turns[:4] == ["compiled", "torch"] * 2


def test_an_empty_mark_means_that_nothing_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_cache, "FOLDER", tmp_path)
    code_cache.report_compiled("int4", "bfloat16", {"compiled": 1.0})
    assert code_cache.is_compiled("int4")
    assert code_cache.speeds("int4") == {"compiled": 1.0}
    next(tmp_path.iterdir()).write_bytes(b"")
    assert not code_cache.is_compiled("int4")
    assert code_cache.speeds("int4") == {}
