"""Draw a sequence diagram in Mermaid's notation as an SVG, for the site, which works offline.

The repository's pages draw Mermaid by themselves; a site would load a library of 3 MB for it. This
knows participants, solid arrows with a text, and notes over one participant.
"""

import re
from html import escape

COLUMN, ROW, HEAD, LETTER = 132, 30, 46, 6.2  # pixels; LETTER is the width of a small letter
PARTICIPANT = re.compile(r"participant (\w+)(?: as (.+))?$")
ARROW = re.compile(r"(\w+)->>(\w+): (.*)$")
NOTE = re.compile(r"Note over (\w+): (.*)$")


def sequence_svg(text: str) -> str:
    """Return the diagram as an SVG of one line, in the colours of the text around it.

    Raises `ValueError` for a line that it does not know.
    """
    first, *lines = [line.strip() for line in text.strip().splitlines()]
    if first != "sequenceDiagram":
        raise ValueError(f"{first!r} is not known: only a sequenceDiagram can be drawn.")
    names: dict[str, str] = {}
    rows: list[tuple[str, str, str]] = []  # from, to ("" for a note), text
    for line in lines:
        if found := PARTICIPANT.match(line):
            names[found[1]] = found[2] or found[1]
        elif found := ARROW.match(line):
            rows.append((found[1], found[2], found[3]))
        elif found := NOTE.match(line):
            rows.append((found[1], "", found[2]))
        else:
            raise ValueError(f"{line!r} is not known in a sequence diagram.")
    places = {name: COLUMN * (number + 0.5) for number, name in enumerate(names)}
    width, height = COLUMN * len(names), HEAD + ROW * (len(rows) + 1)
    parts = [_participant(places[name], label, height) for name, label in names.items()]
    for number, (start, end, words) in enumerate(rows, 1):
        y = HEAD + ROW * number
        parts.append(_arrow(places[start], places[end], y, words) if end else _note(y, words))
    style = (
        ".m{font:11px ui-monospace,Consolas,monospace;fill:currentColor}"
        ".m.n{font-weight:bold}.l{stroke:currentColor;fill:none}"
    )
    marker = (
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="currentColor"/></marker>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="sequence diagram"><style>{style}</style>'
        f"<defs>{marker}</defs>{''.join(parts)}</svg>"
    )


def _participant(x: float, label: str, height: int) -> str:
    *package, name = label.rsplit(".", 1)
    lines = [*(f"{each}." for each in package), name]
    texts = "".join(
        f'<text x="{x}" y="{18 + 13 * number}" text-anchor="middle" class="m n">{escape(line)}'
        "</text>"
        for number, line in enumerate(lines)
    )
    return f'{texts}<path d="M{x} {HEAD - 6}V{height}" class="l" stroke-opacity=".25"/>'


def _arrow(start: float, end: float, y: int, words: str) -> str:
    left = min(start, end) + 6
    line = f'<path d="M{start} {y}H{end}" class="l" marker-end="url(#tip)"/>'
    return f'{line}<text x="{left}" y="{y - 5}" class="m">{escape(words)}</text>'


def _note(y: int, words: str) -> str:
    rule = f'<path d="M0 {y + 6}h{len(words) * LETTER + 16:g}" class="l"/>'
    return f'<text x="4" y="{y}" class="m n">{escape(words)}</text>{rule}'
