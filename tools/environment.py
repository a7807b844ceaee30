"""Create `.venv` and install minigen in it: `python -m tools.environment [EXTRA ...]`.

Needs nothing but Python with pip. A second run with the same inputs does nothing. Versions that
CI has seen are pinned in constraints.txt. `TORCH_INDEX` (environment variable) names a package
index to take torch from: PyTorch's site lists one for each of its builds, CPU-only included.
`VENV_DIR` names another folder than `.venv`. From a tree that cannot be written, a copy of the
package is installed, and installed again when the package has changed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / (os.environ.get("VENV_DIR") or ".venv")
PYTHON = ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
OLDEST = (3, 11)
PACKAGED = (
    *("pyproject.toml", "README.md", "LICENSE"),
    *("minigen/**/*.*", "minigen_course/**/*.*", "notebooks/*.*"),
)


def main(extras: list[str]) -> None:
    """Bring `.venv` up to date with the named extras, keeping those it has already."""
    if sys.version_info < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        sys.exit(f"minigen needs Python {wanted} or newer; this is {sys.version.split()[0]}.")
    wanted_extras = sorted(set(extras) | _installed_extras())
    state = _state(wanted_extras)
    if PYTHON.exists() and _stamp().exists() and _stamp().read_text("utf-8") == state:
        return
    if not PYTHON.exists():
        print(f"creating {ENVIRONMENT}", file=sys.stderr)
        venv.create(ENVIRONMENT, with_pip=True)
    torch_index = os.environ.get("TORCH_INDEX")
    if torch_index:
        _pip("torch", "--index-url", torch_index, "--force-reinstall")  # of another build, maybe
    named = f"[{','.join(wanted_extras)}]" if wanted_extras else ""
    constraint = [] if torch_index else ["--constraint", "constraints.txt"]
    if os.access(ROOT, os.W_OK):
        # An earlier build's metadata: in this folder Python would find it before the installed.
        shutil.rmtree(ROOT / "minigen.egg-info", ignore_errors=True)
        _pip("--editable", f"{ROOT}{named}", *constraint)
    else:
        with tempfile.TemporaryDirectory() as copy:
            copy_package(Path(copy))
            _pip(f"{copy}{named}", *constraint)
    _stamp().write_text(state, encoding="utf-8")


def copy_package(folder: Path) -> None:
    """Copy what an installation takes, since setuptools writes beside it."""
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
        sys.exit("The installation failed; pip's words above say why.")


def _stamp() -> Path:
    return ENVIRONMENT / "minigen-installed.txt"


def _installed_extras() -> set[str]:
    """The extras of the last run, so that `make demo` after `make test` takes nothing away."""
    if not _stamp().exists():
        return set()
    return set(_stamp().read_text("utf-8").splitlines()[0].split())


def _state(extras: list[str]) -> str:
    """What an installation depends on; its first line is the extras."""
    digest = hashlib.sha256(os.environ.get("TORCH_INDEX", "").encode())
    installed = [] if os.access(ROOT, os.W_OK) else _packaged()
    for path in (ROOT / "pyproject.toml", ROOT / "constraints.txt", *installed):
        digest.update(path.read_bytes())
    return f"{' '.join(extras)}\n{digest.hexdigest()}\n"


if __name__ == "__main__":
    main(sys.argv[1:])
