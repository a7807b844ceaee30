"""A file as a map that tells of each tensor under the pointer; plain HTML, alive in any page."""

from collections.abc import Sequence
from html import escape

from IPython.display import display

from minigen.viz.files import PART_COLOURS, Piece, cut, described, end_of

ROW = "display:flex;height:14px;margin:2px 0"


def hover_map(pieces: Sequence[Piece], rows: int = 24) -> None:
    """Show the file in rows of equal length; a browser shows a piece's description on hovering."""
    html = f'<div style="max-width:60rem">{"".join(_rows(pieces, rows))}</div>'
    text = f"A map of {len(pieces)} pieces, to be hovered over in a browser."
    display({"text/plain": text, "text/html": html}, raw=True)


def _rows(pieces: Sequence[Piece], rows: int) -> list[str]:
    across = -(-end_of(pieces) // rows)
    drawn: list[list[str]] = [[] for _ in range(rows)]
    for piece in pieces:
        for row, _, length in cut(piece, across):
            drawn[row].append(_bar(piece, length / across))
    return [f'<div style="{ROW}">{"".join(bars)}</div>' for bars in drawn]


def _bar(piece: Piece, share: float) -> str:
    style = f"width:{share:.4%};background:{PART_COLOURS[piece.part]};border-right:1px solid #fff"
    return f'<div title="{escape(described(piece))}" style="{style}"></div>'
