"""Write docs/gallery, a picture of every interactive figure: `python -m tools.gallery`.

The pictures are those in the outputs of the notebooks, made smaller; the page describes each of
them with the figure's caption.
"""

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from PIL import Image

from tools.chapters import ROOT, Chapter, read_chapters

GALLERY = ROOT / "docs" / "gallery"
WIDTH, COLOURS = 720, 64
MOST_BYTES = 60_000  # of one picture
WIDGET = "application/vnd.jupyter.widget-view+json"
HEAD = """# Gallery

`python -m tools.gallery` takes these pictures from the outputs of the notebooks. In JupyterLab each
figure has controls: change a setting, and it is drawn again from your own data.
"""


@dataclass(frozen=True)
class Shown:
    """One interactive figure of a notebook: the name of its file, its caption, and its picture."""

    name: str
    caption: str
    png: bytes


def figures(chapter: Chapter) -> Iterator[Shown]:
    """Yield the interactive figures of a chapter's notebook, in order."""
    notebook = json.loads((ROOT / chapter.notebook).read_text(encoding="utf-8"))
    outputs: list[dict[str, Any]] = [
        output for cell in notebook["cells"] for output in cell.get("outputs", ())
    ]
    found = [each["data"] for each in outputs if WIDGET in each.get("data", {})]
    for number, data in enumerate(found, 1):
        caption = "".join(data["text/plain"])
        picture = base64.b64decode("".join(data["image/png"]))
        yield Shown(f"{chapter.number}_{chapter.stem}-{number}.png", caption, picture)


def chapters() -> list[Chapter]:
    """Return the chapters that have a notebook."""
    return [each for each in read_chapters() if (ROOT / each.notebook).exists()]


def page() -> str:
    """Return the page: a heading per chapter, and its figures with their captions."""
    lines = [HEAD]
    for chapter in chapters():
        lines += [f"## [{chapter.number} {chapter.title}](../../{chapter.notebook})", ""]
        for each in figures(chapter):
            lines += [f"![{each.caption}]({each.name})", "", each.caption, ""]
    return "\n".join(lines)


def small(png: bytes) -> bytes:
    """Return a picture at most `WIDTH` wide, in few colours."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    if image.width > WIDTH:
        size = (WIDTH, round(image.height * WIDTH / image.width))
        image = image.resize(size, Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.quantize(COLOURS).save(buffer, "png", optimize=True)
    return buffer.getvalue()


def main() -> None:
    """Write every picture and the page, and remove pictures of figures that are gone."""
    shown = [each for chapter in chapters() for each in figures(chapter)]
    GALLERY.mkdir(parents=True, exist_ok=True)
    for path in GALLERY.glob("*.png"):
        if path.name not in {each.name for each in shown}:
            path.unlink()
    for each in shown:
        (GALLERY / each.name).write_bytes(small(each.png))
    (GALLERY / "README.md").write_text(page(), encoding="utf-8")
    print(f"written: {len(shown)} pictures and {(GALLERY / 'README.md').relative_to(ROOT)}")


if __name__ == "__main__":
    main()
