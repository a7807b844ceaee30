"""The hook of mkdocs.yml: pages from outside docs/, and links that leave docs/.

A document in docs/ links to files of the repository by relative paths, so its links work where the
repository is read. In the site, a link to a file that is no page leads to the repository.
"""

import posixpath
import re
from typing import Any

from tools.chapters import ROOT
from tools.sequence_diagram import sequence_svg

# Pages of the site that are documents outside docs/.
OUTSIDE = {
    "index.md": "README.md",
    "exercises.md": "exercises/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
DIAGRAM = "```mermaid\n"


def on_files(files: Any, config: Any) -> Any:
    """Add the documents outside docs/ to the pages of the site."""
    from mkdocs.structure.files import File

    for page, document in OUTSIDE.items():
        text = (ROOT / document).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page, and its nested lists."""
    return for_the_site(markdown, page.file.src_uri, config["extra"]["repository"])


def for_the_site(markdown: str, page: str, repository: str) -> str:
    """Return a document as the page `page` of the site.

    Links are rewritten, except in blocks of code. Nested lists get four spaces a level, which
    Python's Markdown needs, instead of two. Diagrams are drawn.
    """
    document = OUTSIDE.get(page, f"docs/{page}")
    pieces = CODE.split(markdown)
    for number, piece in enumerate(pieces):
        if number % 2 == 0:
            pieces[number] = _prose(piece, document, page, repository)
        elif piece.startswith(DIAGRAM):
            drawn = sequence_svg(piece.removeprefix(DIAGRAM).removesuffix("```"))
            pieces[number] = f'<div class="diagram">{drawn}</div>'
    return "".join(pieces)


def _prose(text: str, document: str, page: str, repository: str) -> str:
    def rewritten(found: re.Match[str]) -> str:
        return f"{found[1]}{linked(document, page, found[2], repository)}{found[3]}"

    return re.sub(r"(?m)^((?:  )+)(?=- )", lambda found: found[1] * 2, LINK.sub(rewritten, text))


def linked(document: str, page: str, target: str, repository: str) -> str:
    """Return where a link of a document leads in the site.

    >>> linked("README.md", "index.md", "docs/glossary.md", "https://example.org")
    'glossary.md'
    >>> linked("docs/engine.md", "engine.md", "../minigen/llm.py", "https://example.org")
    'https://example.org/blob/main/minigen/llm.py'
    """
    if "://" in target:
        return target
    path = posixpath.normpath(posixpath.join(posixpath.dirname(document), target))
    pages = {each: name for name, each in OUTSIDE.items()}
    if path in pages or (path.startswith("docs/") and not path.startswith("docs/grafana")):
        inside = pages.get(path, path.removeprefix("docs/"))
        return posixpath.relpath(inside, posixpath.dirname(page) or ".")
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{repository}/{kind}/main/{path}"
