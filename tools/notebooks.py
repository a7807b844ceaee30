"""Bring every notebook up to date with its source and run it: `python -m tools.notebooks`.

The source of a pair is the .py file (percent format); cells and outputs go into the .ipynb.
"""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"


def main() -> None:
    """Update and execute the pairs in order; stop at the first that fails."""
    sources = sorted(FOLDER.glob("[0-9]*.py"))
    if not sources:
        print("There are no notebooks yet.")
    for source in sources:
        print(source.stem, flush=True)
        command = [sys.executable, "-m", "jupytext", "--update", "--to", "ipynb", "--execute"]
        if subprocess.run([*command, str(source)]).returncode:
            sys.exit(f"{source.name} failed; the traceback above names the cell.")


if __name__ == "__main__":
    main()
