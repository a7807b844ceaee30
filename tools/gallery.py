"""Shrink the screenshots of every explorable for the documentation: `python -m tools.gallery`.

It reads build/screenshots, which `make test-browser` writes, and writes docs/gallery with a README
that describes each picture.
"""

import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from tools.chapters import BUILD, ROOT, read_chapters

SCREENSHOTS, GALLERY = BUILD / "screenshots", ROOT / "docs" / "gallery"
WIDTH, COLOURS = 720, 256
WIDGET = "application/vnd.jupyter.widget-view+json"


def main() -> None:
    """Shrink the screenshots and write the page."""
    GALLERY.mkdir(parents=True, exist_ok=True)
    lines = ["# Gallery", "", "Every explorable of the course, as JupyterLab shows it.", ""]
    for chapter in read_chapters():
        if not (ROOT / chapter.notebook).exists():
            continue
        stem = f"{chapter.number}_{chapter.stem}"
        lines += [f"## [{chapter.number} {chapter.title}](../../{chapter.notebook})", ""]
        for number, caption in enumerate(_captions(ROOT / chapter.notebook), 1):
            name = f"{stem}-{number}.png"
            if not (SCREENSHOTS / name).exists():
                sys.exit(f"{SCREENSHOTS / name} does not exist; run make test-browser first.")
            _shrink(SCREENSHOTS / name, GALLERY / name)
            lines += [caption, "", f"![{caption}]({name})", ""]
    (GALLERY / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _captions(notebook: Path) -> list[str]:
    """Return the captions of a notebook's explorables, in order."""
    cells: list[dict[str, Any]] = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    found = [each["data"] for each in outputs if WIDGET in each.get("data", {})]
    return ["".join(data["text/plain"]) for data in found]


def _shrink(source: Path, target: Path) -> None:
    image = Image.open(source).convert("RGB")
    size = (WIDTH, round(image.height * WIDTH / image.width))
    image.resize(size, Image.Resampling.LANCZOS).quantize(COLOURS).save(target, optimize=True)


if __name__ == "__main__":
    main()
