"""The map of the engine that stands at the head of each chapter, with the chapter's part lit."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minigen_course.figures.explore import picture
from minigen_course.figures.style import AMBER, FAINT, INK, QUIET, figure

Box = tuple[float, float, float]  # x of its left edge, y of its lower edge, width
HEIGHT = 0.62
ROWS = {  # what stands at the left of a row, and its y
    "serving": 4.0,
    "engine": 3.0,
    "model": 2.0,
    "memory": 1.0,
    "machine": 0.0,
}
BOXES: dict[str, Box] = {
    "HTTP server": (0.0, 4.0, 3.2),
    "metrics": (3.4, 4.0, 2.6),
    "several replicas": (6.2, 4.0, 3.8),
    "tokenizer": (0.0, 3.0, 1.6),
    "scheduler": (1.8, 3.0, 1.6),
    "runner": (3.6, 3.0, 1.6),
    "sampler": (5.4, 3.0, 1.6),
    "detokenizer": (7.2, 3.0, 1.6),
    "loop": (9.0, 3.0, 1.0),
    "embedding": (0.0, 2.0, 1.6),
    "norms": (1.8, 2.0, 1.1),
    "positions": (3.1, 2.0, 1.4),
    "attention": (4.7, 2.0, 1.5),
    "feed-forward": (6.4, 2.0, 1.8),
    "output head": (8.4, 2.0, 1.6),
    "weights": (0.0, 1.0, 2.2),
    "KV cache": (2.4, 1.0, 2.2),
    "blocks": (4.8, 1.0, 2.0),
    "prefix cache": (7.0, 1.0, 3.0),
    "CPU kernels": (0.0, 0.0, 2.4),
    "GPU kernels": (2.6, 0.0, 2.4),
    "collectives": (5.2, 0.0, 2.2),
    "several devices": (7.6, 0.0, 2.4),
}
GROUPS = {row: tuple(name for name, box in BOXES.items() if box[1] == y) for row, y in ROWS.items()}


def engine_map(*lit: str) -> Figure:
    """Draw the engine's parts in five rows; those in `lit` are coloured.

    A row's name (`ROWS`) stands for all its parts. Raises `ValueError` for an unknown part.
    """
    known = (*ROWS, *BOXES)
    unknown = [name for name in lit if name not in known]
    if unknown:
        raise ValueError(f"The map has no {', '.join(unknown)}; it has {', '.join(known)}.")
    chosen = {name for each in lit for name in GROUPS.get(each, (each,))}
    made, axes = figure(9.4, 2.7)
    for row, y in ROWS.items():
        axes.text(-0.2, y + HEIGHT / 2, row, ha="right", va="center", color=QUIET, fontsize=9)
    for name in BOXES:
        _box(axes, name, name in chosen)
    axes.set(xlim=(-1.35, 10.05), ylim=(-0.1, 4.75))
    axes.axis("off")
    return made


def chapter_map(*lit: str) -> None:
    """Show the map of the engine with a chapter's parts lit: `chapter_map("attention")`.

    A row's name, such as "model", lights all its parts. Raises `ValueError` for an unknown part.
    """
    picture(engine_map(*lit), f"The engine's parts; this chapter is about: {', '.join(lit)}.")


def _box(axes: Axes, name: str, is_lit: bool) -> None:
    x, y, width = BOXES[name]
    axes.add_patch(Rectangle((x, y), width, HEIGHT, color=AMBER if is_lit else FAINT))
    axes.text(
        x + width / 2,
        y + HEIGHT / 2,
        name,
        ha="center",
        va="center",
        fontsize=9,
        color=INK,
        weight="bold" if is_lit else "normal",
    )
