"""All ways to set minigen up and test it agree: make, conda, Docker, workflows."""

import ast
import json
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.chapters import ROOT
from tools.test import PARTS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
TARGETS = set(
    re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
)
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
OLDEST = tuple(map(int, PROJECT["requires-python"].removeprefix(">=").split(".")))
DISTRIBUTIONS = {"jupyter": "jupyterlab", "yaml": "pyyaml"}


def extras_of_make(target: str) -> set[str]:
    """Return the extras that `make TARGET` installs, from its line in the Makefile."""
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").split(f"\n{target}:")[1]
    return set(recipe.split("$(ENVIRONMENT)")[1].splitlines()[0].split())


def check_command(line: str) -> None:
    """Check that a shell line calls only the README's commands: a make target or a module."""
    for command in line.replace("\\", "/").split("&&"):
        program, *arguments = shlex.split(command)
        if program == "make":
            assert arguments, line
            assert set(arguments) <= TARGETS, line
        else:
            assert program in {"python", ".venv/bin/python", ".venv/Scripts/python"}, line
            assert arguments[0] == "-m", line
            place = ROOT / arguments[1].replace(".", "/")
            assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), line
            if arguments[1] == "tools.environment":
                assert program == "python", "the environment's own Python cannot create it"
                assert set(arguments[2:]) <= set(EXTRAS), line


@pytest.mark.parametrize(
    "line",
    [
        "make tests",
        "make",
        "python -m tools.tests",
        "python -m tools.environment everything",
        "pip install .",
        "make demo && curl example",
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    with pytest.raises(AssertionError):
        check_command(line)


def declared(extras: list[str]) -> set[str]:
    requirements = [*PROJECT["dependencies"], *(line for each in extras for line in EXTRAS[each])]
    return {re.split(r"[^\w-]", line)[0].lower().replace("_", "-") for line in requirements}


def imported_by(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    ours = {"minigen", "minigen_course", "tools", "tests"}
    return {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - ours


def conda_extras() -> list[str]:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    (pip,) = [each for each in environment["dependencies"] if isinstance(each, dict)]
    (editable,) = pip["pip"]
    return editable.removeprefix("-e .[").removesuffix("]").split(",")


def test_conda_installs_what_every_check_and_test_needs() -> None:
    assert set(conda_extras()) == extras_of_make("test")
    needed = {part.command[1] for part in PARTS if not part.command[1].startswith("tools.")}
    for name in ("notebooks", "notebook_checks", "test"):
        needed |= imported_by(ROOT / "tools" / f"{name}.py")
    needed |= {"nbval", "pytest-xdist", *imported_by(Path(__file__))}
    assert {"ruff", "mypy", "pytest", "jupytext", "nbclient"} <= needed
    assert {DISTRIBUTIONS.get(name, name) for name in needed} <= declared(conda_extras())


def dockerfile() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8")).replace(
        "\\\n", " "
    )
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line]


def test_the_image_runs_the_readmes_commands_on_a_python_that_minigen_takes() -> None:
    steps = dockerfile()
    arguments = dict(rest.split("=") for word, rest in steps if word == "ARG")
    assert tuple(map(int, arguments["PYTHON"].split("."))) >= OLDEST
    assert arguments["TORCH_INDEX"] == "", "the builder names an index, or pip's own is used"
    (command,) = [json.loads(rest) for word, rest in steps if word == "CMD"]
    check_command(shlex.join(command))
    (setup,) = [rest for word, rest in steps if word == "RUN" and rest.startswith("make ")]
    check_command(setup)
    assert extras_of_make("setup") == extras_of_make("test"), "`make test` installs nothing more"


def test_the_image_is_not_run_by_root_and_its_user_owns_the_files() -> None:
    steps = dockerfile()
    words = [word for word, _ in steps]
    (user,) = [rest for word, rest in steps if word == "USER"]
    (folder,) = [rest for word, rest in steps if word == "WORKDIR"]
    (makes_user,) = [rest for word, rest in steps if "useradd" in rest]
    assert user != "root"
    assert shlex.split(makes_user)[4] == user
    assert makes_user.endswith(f"--owner={user} --group={user} {folder}")
    assert words.index("USER") < words.index("COPY")
    assert dict(steps)["COPY"] == f"--chown={user}:{user} . ."


def test_files_that_git_ignores_are_not_in_the_image() -> None:
    left_out = {
        line.removeprefix("**/")
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    }
    ignored = {
        line.removesuffix("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    }
    assert ignored <= left_out


def test_the_dev_container_builds_a_stage_of_the_dockerfile() -> None:
    path = ROOT / ".devcontainer" / "devcontainer.json"
    container = json.loads(path.read_text(encoding="utf-8"))
    build, steps = container["build"], dockerfile()
    assert (path.parent / build["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert (path.parent / build["context"]).resolve() == ROOT
    assert build["target"] in [rest.rpartition(" AS ")[2] for word, rest in steps if word == "FROM"]
    assert set(build["args"]) <= {rest.split("=")[0] for word, rest in steps if word == "ARG"}
    assert ("USER", container["remoteUser"]) in steps
    check_command(container["postCreateCommand"])


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.stem)
def workflow(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(request.param.read_text(encoding="utf-8"))
    return found


def steps_of(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_a_workflow_runs_the_readmes_commands(workflow: dict[str, Any]) -> None:
    commands = [line for step in steps_of(workflow) for line in step.get("run", "").splitlines()]
    assert commands
    for command in commands:
        check_command(command)


def test_a_workflow_may_only_read_and_uses_actions_of_one_major_version(
    workflow: dict[str, Any],
) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is True
    uses = [step["uses"] for step in steps_of(workflow) if "uses" in step]
    assert uses
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", each) for each in uses)
    for step in steps_of(workflow):
        for path in step.get("with", {}).get("cache-dependency-path", "").split():
            assert (ROOT / path).is_file()


def test_make_test_is_run_on_three_systems_and_from_the_oldest_python_on() -> None:
    jobs = yaml.safe_load(
        (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    )["jobs"]
    strategy = jobs["test"]["strategy"]
    assert strategy["fail-fast"] is False
    systems = {name.partition("-")[0] for name in strategy["matrix"]["os"]}
    assert systems == {"ubuntu", "macos", "windows"}
    pythons = [tuple(map(int, each.split("."))) for each in strategy["matrix"]["python"]]
    assert min(pythons) == OLDEST
    assert len(pythons) == 3
    arguments = dict(rest.split("=") for word, rest in dockerfile() if word == "ARG")
    assert arguments["PYTHON"] in strategy["matrix"]["python"], (
        "the tests run on the image's Python"
    )


def test_windows_runs_the_commands_of_make_test() -> None:
    steps = yaml.safe_load(
        (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    )["jobs"]["test"]["steps"]
    typed = [step["run"] for step in steps if step.get("if") == "runner.os == 'Windows'"]
    recipe = (
        (ROOT / "Makefile")
        .read_text(encoding="utf-8")
        .split("\ntest:")[1]
        .split("\n\n")[0]
        .splitlines()[1:]
    )
    names = {"@$(ENVIRONMENT)": "python -m tools.environment", "@$(VENV)": r".venv\Scripts\python"}
    made = [line.strip() for line in recipe]
    for variable, command in names.items():
        made = [line.replace(variable, command) for line in made]
    assert typed == made
