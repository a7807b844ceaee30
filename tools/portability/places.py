"""Clones: created for their first cell, and removed when all their cells are green."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.portability.commands import Ended, busy, num_cores, run, timed
from tools.portability.environments import ROOT, Environment, read_only
from tools.portability.store import GREEN, NOT_TRIED, RED, Cell, Result

PYTHON = getattr(sys, "_base_executable", sys.executable)  # .venv's own, or the one that created it
NOT_INHERITED = (
    *("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"),
    *(
        "PYTHONPATH",
        "PYTHONHOME",
        "VIRTUAL_ENV",
        "VENV_DIR",
        "BUILD_DIR",
        "PYTEST_ADDOPTS",
        "COLUMNS",
    ),
)
FACTS = "import json; from benchmarks.common import environment; print(json.dumps(environment()))"
MODELS = "from tools.notebooks import fetch_models; fetch_models()"  # later without a network
FIRST_SCRIPT = Path("tools", "portability", "first_script.py")
SETUP_SECONDS, CELL_SECONDS = 3600.0, 3 * 3600.0


@dataclass
class Places:
    """The clones of one commit below a folder, and which of them could not be set up."""

    folder: Path
    commit: str
    pytest: Sequence[str] = ()
    notebooks: Sequence[str] = ()
    _failed: dict[str, str] = field(default_factory=dict)

    def run(self, environment: Environment, cell: Cell, log: Path) -> Result:
        """Try one cell; set its environment up first if necessary."""
        started = time.monotonic()
        if environment.lacking:
            return Result(NOT_TRIED, environment.lacking)
        log.unlink(missing_ok=True)
        why = self._set_up(environment, log)
        if why:
            return Result(RED, f"set-up: {why}", timed(started))
        machine: dict[str, Any] = json.loads(self._facts(environment).read_text(encoding="utf-8"))
        started, ended = time.monotonic(), Ended(0, "")
        with busy(num_cores() if environment.loaded else 0):
            for command in self._commands(environment, cell.part):
                ended = self._run(environment, command, log)
                if ended.status != 0:
                    return Result(RED, ended.why(), timed(started), ended.failed, machine)
        return Result(GREEN, ended.passed, timed(started), (), machine)

    def remove(self, place: str) -> None:
        """Remove a place: its clone and the folder beside the clone."""
        shutil.rmtree(self.folder / place, ignore_errors=True)

    def _commands(self, environment: Environment, part: str) -> list[list[str]]:
        python = str(self._python(environment))
        if part == "setup":
            return [["make", "setup", f"PYTHON={PYTHON}"], [python, "-m", "minigen", "pull"]]
        if part == "installed":
            return self._as_users_do(environment)
        if part == "demo":
            return [["make", "demo", f"PYTHON={PYTHON}"]]
        if part == "checks":
            return [[python, "-m", "tools.check", "lint", "format", "types"]]
        if part == "golden":
            return [[python, "-m", "pytest", "-q", "-m", "model", "tests/test_17_golden.py"]]
        if part == "notebooks":
            check = [python, "-m", "tools.notebooks", "--check", "--untimed", *self.notebooks]
            compiling = [python, "-m", "minigen", "compile"]  # no notebook's time includes it
            return [compiling, [*compiling, "int4", "--kv-cache-dtype", "int8"], check]
        seed = str(int(self.commit[:8], 16))
        order = ["--random-order", "--random-order-seed", seed] if environment.random_order else []
        return [[python, "-m", "pytest", "-q", "-n", "2", *order, *self.pytest]]

    def _as_users_do(self, environment: Environment) -> list[list[str]]:
        """Return commands that install minigen without any package of its tests, and use it."""
        tree, folder = self._tree(environment), self._elsewhere(environment) / "installed"
        python = str(folder / "bin" / "python")
        return [
            [PYTHON, "-m", "venv", "--clear", str(folder)],
            [python, "-m", "pip", "install", "--quiet", f"{tree}[cpu]"],
            [python, "-I", str(tree / FIRST_SCRIPT)],  # -I: not the clone's minigen
            [python, "-I", "-m", "minigen", "doctor"],
        ]

    def _set_up(self, environment: Environment, log: Path) -> str:
        """Set a place up if necessary; return why it cannot be used, or an empty string."""
        if self._facts(environment).exists():
            return ""
        if environment.place not in self._failed:
            why = self._clone(environment, log) or self._install(environment, log)
            if not why:
                return ""
            self._failed[environment.place] = why
        return self._failed[environment.place]

    def _clone(self, environment: Environment, log: Path) -> str:
        tree = self._tree(environment)
        if (tree / "Makefile").exists():
            return ""
        shutil.rmtree(tree, ignore_errors=True)
        tree.parent.mkdir(parents=True, exist_ok=True)
        for command in (
            ["git", "clone", "--quiet", "--no-checkout", str(ROOT), str(tree)],
            ["git", "-C", str(tree), "checkout", "--quiet", "--detach", self.commit],
        ):
            ended = run(command, ROOT, os.environ, log, SETUP_SECONDS)
            if ended.status != 0:
                return f"{command[0]} {'clone' if 'clone' in command else 'checkout'} failed"
        return ""

    def _install(self, environment: Environment, log: Path) -> str:
        for name in ("home", "tmp", "runtime"):
            (self._elsewhere(environment) / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        parts = ["setup", "demo"] if "demo" in environment.parts else ["setup"]
        fetch = [str(self._python(environment)), "-c", MODELS]
        commands = [each for part in parts for each in self._commands(environment, part)]
        for command in [*commands, *([fetch] if "notebooks" in environment.parts else [])]:
            ended = self._run(environment, command, log, SETUP_SECONDS, plain=True)
            if ended.status != 0:
                return f"`{' '.join(command[1:3])}` failed: {ended.why()}"
        command = [str(self._python(environment)), "-c", FACTS]
        ended = self._run(environment, command, log, SETUP_SECONDS, plain=True)
        if ended.status != 0:
            return f"the machine's facts could not be read: {ended.why()}"
        self._facts(environment).write_text(ended.said.strip().rpartition("\n")[2], "utf-8")
        return ""

    def _run(
        self,
        environment: Environment,
        command: Sequence[str],
        log: Path,
        limit: float = CELL_SECONDS,
        plain: bool = False,
    ) -> Ended:
        """Run a command in the clone; with `plain`, without the restrictions of the environment."""
        elsewhere, tree = self._elsewhere(environment), self._tree(environment)
        changed = environment.kept if plain else {**environment.kept, **environment.variables}
        variables = {name: os.environ[name] for name in os.environ if name not in NOT_INHERITED}
        variables["MINIGEN_HOME"] = str(elsewhere / "minigen")
        for name, value in changed.items():
            variables[name] = value.format(elsewhere=elsewhere)
        mounted = read_only(tree) if environment.read_only else ()
        prefix = mounted if plain else (*mounted, *environment.prefix)
        umask = -1 if plain else environment.umask
        return run([*prefix, *command], tree, variables, log, limit, umask)

    def _tree(self, environment: Environment) -> Path:
        return (self.folder / environment.place).joinpath(*environment.inside)

    def _elsewhere(self, environment: Environment) -> Path:
        return self.folder / environment.place / "elsewhere"

    def _python(self, environment: Environment) -> Path:
        elsewhere = self._elsewhere(environment)
        named = environment.kept.get("VENV_DIR", "").format(elsewhere=elsewhere)
        return self._tree(environment) / (named or ".venv") / "bin" / "python"

    def _facts(self, environment: Environment) -> Path:
        """Return the file with the machine and the versions, written when a place is set up."""
        return self._elsewhere(environment) / f"{environment.name}.json"


def commit_of(tree: Path) -> str:
    """Return the commit that is checked out in a tree, or exit with the reason."""
    try:
        found = subprocess.run(
            ["git", "-C", str(tree), "rev-parse", "HEAD"], capture_output=True, encoding="utf-8"
        )
    except FileNotFoundError:
        sys.exit("git is not installed; it is needed to clone the tree.")
    if found.returncode:
        sys.exit(f"{tree} is not a git repository, so there is no commit to clone.")
    return found.stdout.strip()


def has_changes(tree: Path) -> bool:
    """Return whether a tree has uncommitted changes."""
    command = ["git", "-C", str(tree), "status", "--porcelain", "--untracked-files=no"]
    return bool(subprocess.run(command, capture_output=True).stdout.strip())
