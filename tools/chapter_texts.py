"""What a chapter's notebook says of itself: its aim, its summary, its reading.

The guide for instructors and the slides quote these passages, so that each stands in one place.
"""

import re

from tools.chapters import ROOT, Chapter

LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
SENTENCE_END = re.compile(r"(?<=[.?!])[\"']?\s+(?=[A-Z\"*`])")


def aim(chapter: Chapter) -> str:
    """Return what a reader can do after the chapter: the rest of "Afterwards you can ..."."""
    found = re.search(r"\*\*Afterwards you can\*\* (.*?)(?:\n\n|$)", _prose(chapter), re.DOTALL)
    if found is None:
        raise ValueError(f"{chapter.notebook} does not say what a reader can do afterwards.")
    return SENTENCE_END.split(without_links(found[1]))[0].rstrip(".")


def summary(chapter: Chapter) -> list[str]:
    """Return the sentences of the summary's first paragraph, or its list's entries."""
    text = section(chapter, "Summary")
    entries = re.findall(r"^- (.*?)(?=\n- |\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    if entries:
        return [without_links(each) for each in entries]
    return SENTENCE_END.split(without_links(text.split("\n\n")[0]))


def reading(chapter: Chapter) -> str:
    """Return the first entry under "Further reading", as Markdown with its link."""
    text = section(chapter, "Further reading")
    found = re.search(r"^- (.*?)(?=\n- |\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{chapter.notebook} names nothing to read.")
    return " ".join(found[1].split())


def section(chapter: Chapter, heading: str) -> str:
    """Return the prose under the first heading that begins so, up to the next heading."""
    text = _prose(chapter)
    found = re.search(rf"^## {re.escape(heading)}[^\n]*\n(.*?)(?=^##|\Z)", text, re.M | re.S)
    if found is None:
        raise ValueError(f"{chapter.notebook} has no section {heading!r}.")
    return found[1].strip()


def without_links(text: str) -> str:
    """Return Markdown as one line, with the texts of its links alone.

    >>> without_links("a [slot](x.md#slot)\\nand **more**")
    'a slot and **more**'
    """
    return " ".join(LINK.sub(r"\1", text).split())


def _prose(chapter: Chapter) -> str:
    """Return all Markdown of a notebook's source, one empty line between cells."""
    source = (ROOT / chapter.notebook).with_suffix(".py").read_text(encoding="utf-8")
    cells = re.split(r"^# %%", source, flags=re.MULTILINE)
    texts = [each for each in cells if each.startswith(" [markdown]")]
    lines = (line for each in texts for line in [*each.splitlines()[1:], ""])
    return "\n".join(re.sub(r"^# ?", "", line) for line in lines)
