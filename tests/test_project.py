"""The project agrees with itself: chapters, modules, tests, and imports."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tools.chapters import ROOT, read_chapters

PACKAGES = ("minigen", "minigen_course")
VOCABULARY = {
    *(
        "minigen.errors",
        "minigen.renamed",
        "minigen.child_process",
        "minigen.hardware",
        "minigen.config",
        "minigen.fields",
    ),
    *("minigen.sequence", "minigen.protocols", "minigen.sampling.params"),
    *("minigen.sampling.structured_outputs", "minigen.sampling.processors"),
    *("minigen.sampling.closed_schemas", "minigen.sampling.json_schemas"),
    *("minigen.sampling.grammar_trial", "minigen.sampling.grammar_compiler"),  # by a library
    *("minigen.checkpoint.model_config", "minigen.checkpoint.config_json"),
    *("minigen.trace.events", "minigen.trace.counters", "minigen.trace.summary"),
    *("minigen.trace.timeline", "minigen.trace.chrome"),
}
ASSEMBLY = {
    *("minigen", "minigen.__main__", "minigen.llm", "minigen.progress"),
    *("minigen.checkpoint.checkpoint", "minigen.engine.request_processor"),
    *("minigen.kernels.cpu.compile", "minigen.kernels.cpu.runner", "minigen.kernels.triton.runner"),
    *("minigen.kernels.jit.compile_once", "minigen.kernels.jit.compile_process"),
    *("minigen.kernels.jit.outermost", "minigen.kernels.triton.kernel_model"),
    "minigen.parallel.gpu",
    *("minigen.parallel.launch", "minigen.parallel.stopped", "minigen.parallel.worker"),
}
ASSEMBLY_PACKAGES = (
    "assembly",
    "bench",
    "cli",
    "doctor",
    "export",
    "hub",
    "sockets",
)
SERVER = "minigen.server."  # chapters based on the assembled engine, as the command line is
MAX_LINES = 500
FOLDERS = (*PACKAGES, "tests", "tools", "benchmarks")


@cache
def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }


def imports_of(path: Path) -> set[str]:
    """Return the modules of this project that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules().keys()


@cache
def order_of_chapters() -> dict[str, int]:
    return {
        module: place for place, chapter in enumerate(read_chapters()) for module in chapter.modules
    }


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_only_earlier_chapters(module: str) -> None:
    order, imported = order_of_chapters(), imports_of(modules()[module])
    if module in order:
        late = {each for each in imported if order.get(each, -1) > order[module]}
        assert not late, f"{module} imports {late}, which later chapters build"
        if not module.startswith(SERVER) and not module.startswith("minigen.bench."):
            assert not imported & ASSEMBLY, "a chapter's module must not import the assembly"
    elif module in VOCABULARY:
        assert not imported - VOCABULARY, "the vocabulary imports no chapter"
    elif module in ASSEMBLY:
        on_top = {each for each in imported if each.startswith(SERVER)}
        assert not on_top, "the engine is assembled without a server"


def test_every_module_has_its_place() -> None:
    placed = VOCABULARY | ASSEMBLY | set(order_of_chapters()) | {"minigen.server.local"}
    homeless = {
        module
        for module in modules()
        if module not in placed
        and modules()[module].name != "__init__.py"
        and module.split(".")[0] != "minigen_course"
        and module.split(".")[1] not in ASSEMBLY_PACKAGES
    }
    assert not homeless, "name them in notebooks/chapters.toml, or in this test's lists"


def test_every_built_chapter_has_its_tests() -> None:
    for chapter in read_chapters():
        if chapter.built:
            assert list((ROOT / "tests").glob(f"test_{chapter.number}_*.py")), chapter


def test_chapters_are_in_order_and_named_once() -> None:
    numbers = [chapter.number for chapter in read_chapters()]
    assert numbers == sorted(set(numbers))
    stems = [chapter.stem for chapter in read_chapters()]
    assert len(stems) == len(set(stems))


def test_no_module_exceeds_the_line_limit() -> None:
    lengths = {name: len(path.read_text("utf-8").splitlines()) for name, path in modules().items()}
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_LINES}


def test_every_text_has_an_encoding_and_no_test_reads_ps() -> None:
    """Covers what ruff's PLW1514 cannot see: methods of a path of unknown type, and pipes."""
    guilty = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(call, ast.Call) and (goes_by_the_locale(call) or starts_ps(call))
    ]
    assert not guilty, "give an encoding; read other processes with psutil"


@pytest.mark.parametrize(
    "code",
    [
        *("p.read_text()", "p.read_text(errors='replace')", "p.write_text('a')"),
        *("run(c, text=True)", "run(c, universal_newlines=True)", "run(['ps', '-e'])"),
        *("run('ps -e', shell=True)", "check_output(('ps',))"),
    ],
)
def test_machine_dependent_code_is_found(code: str) -> None:
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call)
    assert goes_by_the_locale(call) or starts_ps(call)


def goes_by_the_locale(call: ast.Call) -> bool:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in given:
        return False
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("read_text", "write_text"):
        return len(call.args) < (1 if call.func.attr == "read_text" else 2)
    switches = (given.get("text"), given.get("universal_newlines"))
    return any(isinstance(each, ast.Constant) and each.value is True for each in switches)


def starts_ps(call: ast.Call) -> bool:
    first = call.args[0] if call.args else None
    if isinstance(first, ast.List | ast.Tuple) and first.elts:
        first = first.elts[0]
    is_text = isinstance(first, ast.Constant) and isinstance(first.value, str)
    return is_text and first.value.split()[:1] == ["ps"]


def test_conda_installs_what_the_package_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = (ROOT / "environment.yml").read_text("utf-8").splitlines()
    entries = [line.strip().removeprefix("- ") for line in lines if line.strip().startswith("- ")]
    assert f"python{project['requires-python']}" in entries
    assert "pip" in entries
    (editable,) = [entry for entry in entries if entry.startswith("-e .[")]
    extras = editable.removeprefix("-e .[").removesuffix("]").split(",")
    assert set(extras) <= set(project["optional-dependencies"])


def test_the_project_names_no_package_index_and_no_path_of_one_machine() -> None:
    forbidden = re.compile(r"pypi\.org|pythonhosted|(?<![\w.])/(?:work|tmp|root|home)/\w")
    texts = [
        path
        for pattern in (
            *("*.md", "*.toml", "*.yml", "Makefile", "*.txt", "Dockerfile", ".dockerignore"),
            *(".github/workflows/*", ".devcontainer/*"),
        )
        for path in ROOT.glob(pattern)
    ]
    texts += [
        path
        for folder in (
            "minigen",
            "minigen_course",
            "tests",
            "tools",
            "benchmarks",
            "notebooks",
            "docs",
        )
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".md", ".toml", ".json", ".ipynb"} and path != Path(__file__)
    ]
    guilty = [str(path) for path in texts if forbidden.search(path.read_text(encoding="utf-8"))]
    assert not guilty
