r"""Formulas of Markdown as MathML, which browsers show without a script.

`$...$` is a formula in a line, `$$...$$` one of its own. Code is left alone, and so is `\$`.
"""

import re

from latex2mathml.converter import convert

_CODE_OR_FORMULA = re.compile(
    r"(?P<code>^```.*?^```|(?P<ticks>`+).+?(?P=ticks))"
    r"|(?<!\\)\$\$(?P<block>.+?)\$\$|(?<![\\$])\$(?P<line>[^$\s](?:[^$]*?[^$\s])?)\$(?!\d)",
    re.DOTALL | re.MULTILINE,
)
_UNKNOWN = {  # what the library does not know, and what says the same
    r"\\[Bb]igg?(?=\\[a-zA-Z{}|])": "",
    r"\\arg\\(max|min)(?![a-zA-Z])": r"\\operatorname{arg\\,\1}",
}


def with_mathml(markdown: str) -> str:
    """Return the text with formulas as MathML; `ValueError` for one that cannot be converted."""
    return _CODE_OR_FORMULA.sub(_converted, markdown)


def _converted(found: re.Match[str]) -> str:
    if found["code"]:
        return found[0]
    display = "block" if found["block"] else "inline"
    latex = found["block"] or found["line"]
    for unknown, known in _UNKNOWN.items():
        latex = re.sub(unknown, known, latex)
    mathml: str = convert(" ".join(latex.split()), display=display)
    left = re.search(r"\\[a-zA-Z]+", mathml)
    if left:
        raise ValueError(f"The book cannot show {left[0]} of the formula {found[0]}")
    return f"\n\n{mathml}\n\n" if found["block"] else mathml
