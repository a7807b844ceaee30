"""Remove `.venv` and the caches of tools: `python -m tools.clean`. Downloaded models stay."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    for name in (".venv", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"):
        shutil.rmtree(ROOT / name, ignore_errors=True)
