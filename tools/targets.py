"""Print the Makefile's targets with their descriptions: `python -m tools.targets`."""

import re
from pathlib import Path

MAKEFILE = Path(__file__).resolve().parent.parent / "Makefile"

if __name__ == "__main__":
    for name, text in re.findall(
        r"^([\w-]+):.*?## (.*)$", MAKEFILE.read_text("utf-8"), re.MULTILINE
    ):
        print(f"  make {name:<12} {text}")
