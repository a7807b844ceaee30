"""Create `.venv` and install minigen in it: `python -m tools.environment [EXTRA ...]`.

Needs nothing but Python with pip. A second run with the same inputs does nothing. Versions that
CI has seen are pinned in constraints.txt. `TORCH_INDEX` (environment variable) names a package
index to take torch from: PyTorch's site lists one for each of its builds, CPU-only included.
"""

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
PYTHON = ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
OLDEST = (3, 11)


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
    target = f"{ROOT}[{','.join(wanted_extras)}]" if wanted_extras else str(ROOT)
    _pip("--editable", target, *([] if torch_index else ["--constraint", "constraints.txt"]))
    _stamp().write_text(state, encoding="utf-8")


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
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / name).read_bytes())
    return f"{' '.join(extras)}\n{digest.hexdigest()}\n"


if __name__ == "__main__":
    main(sys.argv[1:])
