"""Remove the environments and the caches of tools: `python -m tools.clean`.

Downloaded models stay.
"""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    environments = (".venv", ".venv-clients")
    for name in (*environments, ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"):
        shutil.rmtree(ROOT / name, ignore_errors=True)
