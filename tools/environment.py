"""Create `.venv` and install minigen in it: `python -m tools.environment [EXTRA ...]`.

It needs only Python with pip. A second run with the same inputs does nothing. constraints.txt pins
the versions that CI has tested. The environment variable `TORCH_INDEX` names a package index to
install torch from: PyTorch's site lists one for each of its builds, including CPU-only builds.
`VENV_DIR` names another folder than `.venv`. If the tree is read-only, a copy of the package is
installed, and installed again after the package has changed. An environment that runs another
tree's minigen is left as it is: `.venv` may be a link to it.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / (os.environ.get("VENV_DIR") or ".venv")
PYTHON = ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
OLDEST = (3, 11)
PACKAGED = (
    *("pyproject.toml", "README.md", "LICENSE"),
    *("minigen/**/*.*", "minigen_course/**/*.*", "notebooks/*.*"),
    "benchmarks/results/3[56]_*.json",  # what notebooks draw
)


def main(extras: list[str]) -> None:
    """Bring `.venv` up to date with the named extras; extras that are installed already stay."""
    if sys.version_info < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        sys.exit(f"minigen needs Python {wanted} or newer; this is {sys.version.split()[0]}.")
    wanted_extras = sorted(set(extras) | _installed_extras())
    state = _state(wanted_extras)
    if PYTHON.exists() and _stamp().exists() and _stamp().read_text("utf-8") == state:
        return
    if other := _other_tree():
        sys.exit(
            f"{ENVIRONMENT} runs the minigen of {other}, which would run this tree's from then on. "
            "Give this tree an environment of its own: remove the link, or set VENV_DIR."
        )
    if not PYTHON.exists():
        print(f"creating {ENVIRONMENT}", file=sys.stderr)
        venv.create(ENVIRONMENT, with_pip=True)
    torch_index = os.environ.get("TORCH_INDEX")
    if torch_index:
        _pip("torch", "--index-url", torch_index, "--force-reinstall")  # it may be another build
    named = f"[{','.join(wanted_extras)}]" if wanted_extras else ""
    constraint = [] if torch_index else ["--constraint", "constraints.txt"]
    if os.access(ROOT, os.W_OK):
        # Metadata of an earlier build: Python would find it here before the installed one.
        shutil.rmtree(ROOT / "minigen.egg-info", ignore_errors=True)
        _pip("--editable", f"{ROOT}{named}", *constraint)
    else:
        with tempfile.TemporaryDirectory() as copy:
            copy_package(Path(copy))
            _pip(f"{copy}{named}", *constraint)
    _stamp().write_text(state, encoding="utf-8")


def _other_tree() -> Path | None:
    """Return the tree, not this one, whose minigen the environment runs, if there is one."""
    packages = "Lib" if os.name == "nt" else "lib/python*"
    for file in ENVIRONMENT.glob(f"{packages}/site-packages/minigen-*.dist-info/direct_url.json"):
        url = json.loads(file.read_text("utf-8"))["url"]
        tree = Path(url2pathname(urlparse(url).path))
        if tree.is_dir() and tree.resolve() != ROOT.resolve():
            return tree
    return None


def copy_package(folder: Path) -> None:
    """Copy the files that an installation needs, because setuptools writes next to them."""
    for path in _packaged():
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _packaged() -> list[Path]:
    found = (path for pattern in PACKAGED for path in sorted(ROOT.glob(pattern)))
    return [path for path in found if path.is_file() and path.suffix != ".pyc"]


def _pip(*arguments: str) -> None:
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", *arguments]
    print("installing:", " ".join(arguments), file=sys.stderr, flush=True)
    if subprocess.run(command, cwd=ROOT).returncode:
        sys.exit("The installation failed; pip's output above says why.")


def _stamp() -> Path:
    return ENVIRONMENT / "minigen-installed.txt"


def _installed_extras() -> set[str]:
    """Return the extras of the last run, so that `make demo` after `make test` removes nothing."""
    if not _stamp().exists():
        return set()
    return set(_stamp().read_text("utf-8").splitlines()[0].split())


def _state(extras: list[str]) -> str:
    """Return everything that an installation depends on; the first line lists the extras."""
    digest = hashlib.sha256(os.environ.get("TORCH_INDEX", "").encode())
    installed = [] if os.access(ROOT, os.W_OK) else _packaged()
    for path in (ROOT / "pyproject.toml", ROOT / "constraints.txt", *installed):
        digest.update(path.read_bytes())
    return f"{' '.join(extras)}\n{digest.hexdigest()}\n"


if __name__ == "__main__":
    main(sys.argv[1:])
