"""The documents agree with the code, with the measurements and with each other."""

import doctest
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

import minigen
import minigen_course
from benchmarks.peers.table import peers_in_short
from minigen import protocols
from tools import gallery, layout, reference, results
from tools.chapters import BEGIN, END, ROOT, Chapter, links, read_chapters, table
from tools.commit_subject import complaint
from tools.sequence_diagram import sequence_svg
from tools.site_pages import OUTSIDE, for_the_site, linked

DOCS = ROOT / "docs"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(DOCS.rglob("*.md")),
    ROOT / "exercises" / "README.md",
]
MOST_README_LINES = 120
FIRST_SCREEN = 25  # lines
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
MKDOCS = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def between(text: str, begin: str, end: str) -> str:
    return text.split(begin)[1].split(end)[0].strip()


def anchors(document: Path) -> set[str]:
    """Return the ids of a document's headings, as the repository's pages and the site have them."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", document.read_text("utf-8")), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in headings]
    return set(plain)


# README


def test_the_readme_is_short_and_its_first_screen_shows_a_picture_and_two_commands() -> None:
    lines = text_of("README.md").splitlines()
    assert len(lines) <= MOST_README_LINES
    first = "\n".join(lines[:FIRST_SCREEN])
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", first)
    assert (ROOT / picture).is_file()
    (commands,) = re.findall(r"^```\n(.*?)^```$", first, re.MULTILINE | re.DOTALL)
    assert [line.split("#")[0].split() for line in commands.splitlines()] == [
        ["make", "demo"],
        ["make", "lab"],
    ]


def test_the_readme_lists_the_chapters_and_the_course_has_their_table() -> None:
    assert between(text_of("README.md"), BEGIN, END) == links(), (
        "run python -m tools.chapters --write"
    )
    shown = between(text_of("docs/course.md"), BEGIN, END)
    assert shown == table(), "run python -m tools.chapters --write"
    assert len(links().splitlines()) == len(read_chapters())


@pytest.mark.parametrize("chapter", read_chapters(), ids=lambda each: each.number)
def test_the_table_of_chapters_links_to_the_exercises(chapter: Chapter) -> None:
    (row,) = [
        line
        for line in text_of("docs/course.md").splitlines()
        if f"](../{chapter.notebook})" in line
    ]
    assert f"[exercises](../{chapter.sheet})" in row
    assert (ROOT / chapter.sheet).is_file()


def test_the_readme_has_a_line_for_each_processor_on_which_other_engines_were_measured() -> None:
    shown = between(text_of("README.md"), results.PEERS_BEGIN, results.PEERS_END)
    assert shown == peers_in_short(results.peers()), "run python -m tools.results"
    files = sorted((ROOT / "benchmarks" / "results").glob("peers*.json"))
    found = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in files}
    real = {name: each for name, each in found.items() if not each["settings"]["pretended"]}
    assert 0 < len(shown.splitlines()) == len(real) < len(found)
    for name, each in real.items():
        summary = each["summary"]
        best = [one["median"] for one in summary["headlines"] if one["best_of_all_peers"]]
        assert any(all(f" {ratio:.2f}" in line for ratio in best) for line in shown.splitlines()), (
            name
        )


def test_the_readme_says_how_long_the_core_is() -> None:
    assert "about 2,000 lines" in text_of("README.md")
    lines = sum(layout.num_lines(layout.files()[name]) for name in layout.TOKEN_LOOP)
    assert round(lines, -3) == 2000


def test_the_results_are_those_that_were_measured() -> None:
    page = text_of("docs/results.md")
    assert between(page, results.BEGIN, results.END) == results.lines(), (
        "run python -m tools.results"
    )


# Links, names, commands


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_in_documents_lead_somewhere(document: Path) -> None:
    prose = CODE.sub("", document.read_text(encoding="utf-8"))
    for target in LINK.findall(prose):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = document.parent / path if path else document
        assert found.exists(), f"{document.name}: {target}"
        if anchor:
            assert anchor in anchors(found), f"{document.name}: {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_name_only_commands_that_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = re.findall(r"(?:^|`|&& )make ([a-z-]+)", text, re.MULTILINE)
    assert set(named) <= TARGETS
    for module in re.findall(r"python3? -m (tools\.\w+|benchmarks[\w.]*)", text):
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), module


def test_the_api_reference_has_every_public_name_and_no_other() -> None:
    documented = re.findall(r"^::: ([\w.]+)$", text_of("docs/reference.md"), re.MULTILINE)
    found = {id(imported(name)): name for name in documented}
    text = text_of("docs/reference.md")
    for package in (minigen, minigen_course):
        for name in package.__all__:
            shown = id(getattr(package, name)) in found or f"{package.__name__}.{name}`" in text
            assert shown, f"{package.__name__}.{name} is missing in docs/reference.md"
    assert id(protocols) in found, "the protocols"
    for name in documented:
        assert inspect.getdoc(imported(name)), name


def imported(name: str) -> object:
    module, _, member = name.rpartition(".")
    if find_spec(name) if module == "minigen" else False:
        return import_module(name)
    return getattr(import_module(module), member)


def test_the_pages_made_from_code_are_up_to_date() -> None:
    page = text_of("docs/http-api.md")
    why = "run python -m tools.reference"
    assert text_of("docs/cli.md") == reference.cli_page(), why
    assert between(page, *reference.FIELDS) == reference.fields_table(), why
    messages = between(page, *reference.MESSAGES_FIELDS)
    assert messages == reference.messages_fields_table(), why
    responses = between(page, *reference.RESPONSES_FIELDS)
    assert responses == reference.responses_fields_table(), why
    layers = between(text_of("docs/architecture.md"), *reference.LAYERS)
    assert layers == reference.layers_table(), why


def test_the_command_line_page_has_every_command_and_option() -> None:
    page = text_of("docs/cli.md")
    for line in text_of("docs/api.md").split("## Commands")[1].split("\n## ")[0].splitlines():
        name, *words = re.findall(r"`([^`]+)`", line) or [""]
        if name.startswith("minigen "):
            assert f"## `{name}`" in page
            for word in words:
                assert f"`{word.split(' / ')[0]}`" in page or not word.startswith("-"), (name, word)


def test_the_architecture_page_names_only_classes_that_exist() -> None:
    text = text_of("docs/architecture.md")
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "minigen").rglob("*.py"))
    named = set(re.findall(r"\b[A-Z][a-z]+(?:[A-Z][a-z]*)+\b", text)) - {"SGLang", "PyTorch"}
    missing = [name for name in named if not re.search(rf"\b(?:class )?{name}\b", source)]
    assert len(named) > 8
    assert not missing


def test_every_term_of_the_glossary_has_its_names() -> None:
    rows = [line.strip("| ").split(" | ") for line in text_of("docs/glossary.md").splitlines()]
    terms = [row for row in rows if len(row) == 5 and row[0] not in ("term", "---|---|---|---|---")]
    assert len(terms) >= 60
    assert len({row[0] for row in terms}) == len(terms)
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "minigen").rglob("*.py"))
    written = source + "\n".join(path.as_posix() for path in (ROOT / "minigen").rglob("*.py"))
    for term, meaning, own, *others in terms:
        assert meaning.strip(), term
        assert all(each.strip() for each in others), term
        for name in re.findall(r"`([^`=]+)(?:=0)?`", own):
            parts = [each for each in re.split(r"[.-]+", name) if each]
            missing = [each for each in parts if not re.search(rf"\b{each}\b", written)]
            assert not missing, f"{term}: minigen has no {name}"


# The site


def pages_of(nav: list[object] | dict[str, object]) -> list[str]:
    values = nav if isinstance(nav, list) else list(nav.values())
    return [
        page
        for each in values
        for page in ([each] if isinstance(each, str) else pages_of(each))  # type: ignore[arg-type]
    ]


def test_the_sites_navigation_has_every_page() -> None:
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(pages_of(MKDOCS["nav"])) == sorted(pages | set(OUTSIDE)), "see nav in mkdocs.yml"


def test_the_exercises_stand_beside_the_course_in_the_navigation() -> None:
    (learn,) = [each["Learn it"] for each in MKDOCS["nav"] if "Learn it" in each]
    assert {"Exercises": "exercises.md"} in learn
    assert OUTSIDE["exercises.md"] == "exercises/README.md"


def test_the_site_needs_no_network() -> None:
    assert MKDOCS["theme"]["font"] is False
    assert "offline" in MKDOCS["plugins"]
    assert MKDOCS["use_directory_urls"] is False, "pages open as files"
    assert MKDOCS["strict"] is True
    own = [*MKDOCS["extra_css"], *MKDOCS["extra"]["polyfills"], *MKDOCS.get("extra_javascript", ())]
    assert all((DOCS / each).is_file() for each in own)
    assert "repo_url" not in MKDOCS, "the theme would ask GitHub for the repository's stars"


def test_links_are_rewritten_for_the_site() -> None:
    text = (
        "[a](docs/engine.md#sampling) [b](CONTRIBUTING.md) [c](minigen/llm.py)\n"
        "```\n[d](docs/x.md)\n  - e\n```\n- f\n  - g"
    )
    assert for_the_site(text, "index.md", "https://here") == (
        "[a](engine.md#sampling) [b](contributing.md) [c](https://here/blob/main/minigen/llm.py)\n"
        "```\n[d](docs/x.md)\n  - e\n```\n- f\n    - g"
    )
    notebook = "../../notebooks/00_map.ipynb"
    place = "https://here/blob/main/notebooks/00_map.ipynb"
    assert linked("docs/gallery/README.md", "gallery/README.md", notebook, "https://here") == place
    assert linked("docs/course.md", "course.md", "../README.md", "x") == "index.md"
    assert linked("docs/course.md", "course.md", "../exercises/README.md", "x") == "exercises.md"
    sheet = "x/blob/main/exercises/22_paged.ipynb"
    assert linked("exercises/README.md", "exercises.md", "22_paged.ipynb", "x") == sheet
    assert linked("docs/course.md", "course.md", "../minigen", "x") == "x/tree/main/minigen"


def test_a_diagram_is_drawn_for_the_site() -> None:
    text = (
        "sequenceDiagram\n participant a as 1 a.b\n participant c\n Note over a: in\n a->>c: f<g\n"
    )
    page = for_the_site(f"# T\n\n```mermaid\n{text}```\n", "index.md", "x")
    (drawn,) = re.findall(r'<div class="diagram">(.*)</div>', page)
    root = ElementTree.fromstring(drawn)
    texts = ["".join(each.itertext()) for each in root.iter() if each.tag.endswith("}text")]
    assert texts == ["1 a.", "b", "c", "in", "f<g"]
    assert drawn.count("marker-end") == 1
    for wrong in ("graph TD", "sequenceDiagram\n a-->b: c"):
        with pytest.raises(ValueError, match="not known"):
            sequence_svg(wrong)


@pytest.mark.long
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is in the extra `docs` alone")
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(
    tmp_path: Path,
) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        encoding="utf-8",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=[\"']?(\S+?)[\"' >]", text)
        loaded += re.findall(r"<link[^>]* href=[\"']?(\S+?)[\"' >]", text)
        assert not [each for each in loaded if "//" in each], page
    reference_page = (site / "reference.html").read_text(encoding="utf-8")
    assert 'id="minigen.llm.LLM.load"' in reference_page
    assert (site / "search").is_dir()


# Pictures


def test_the_gallery_shows_every_chapter_in_small_pictures() -> None:
    assert text_of("docs/gallery/README.md") == gallery.page(), "run python -m tools.gallery"
    shown = [each for chapter in gallery.chapters() for each in gallery.figures(chapter)]
    assert {each.name[:2] for each in shown} == {each.number for each in gallery.chapters()}
    pictures = {path.name: path for path in gallery.GALLERY.glob("*.png")}
    assert set(pictures) == {each.name for each in shown}
    assert all(path.stat().st_size <= gallery.MOST_BYTES for path in pictures.values())


def test_a_picture_of_the_gallery_is_small(tmp_path: Path) -> None:
    chapter = next(each for each in gallery.chapters() if each.number == "21")
    whole = next(gallery.figures(chapter)).png
    assert len(gallery.small(whole)) < len(whole)


def test_the_picture_of_the_running_engine_is_small_and_loads_nothing() -> None:
    from tools.running_picture import MOST_BYTES, PICTURE

    text = PICTURE.read_text(encoding="utf-8")
    assert len(text.encode()) <= MOST_BYTES
    root = ElementTree.fromstring(text)
    assert not [each for each in root.iter() if each.tag.endswith(("script", "image", "a"))]
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)


def test_the_picture_is_drawn_from_the_events_of_a_run(tiny_directory: Path) -> None:
    from minigen import LLM, SamplingParams
    from minigen.trace.events import EventKind
    from tools.running_picture import Run, owners_by_step, picture, runs

    llm = LLM.load(tiny_directory, weights="float32", max_num_seqs=2, num_blocks=12, block_size=4)
    deltas, steps = [], 0
    with llm.record() as recorder:
        for delta in llm.stream_deltas(["abc", "abcd", "b"], SamplingParams(max_tokens=6, seed=1)):
            steps = sum(event.kind is EventKind.STEP for event in recorder.events)
            deltas.append((steps, delta))
    owners = owners_by_step(recorder.events)
    assert len(owners) == sum(event.kind is EventKind.STEP for event in recorder.events)
    assert max(block for each in owners for block in each) <= 12
    drawn = ElementTree.fromstring(picture(Run(recorder.events, deltas), ("a", "b", "c"), "t", 12))
    texts = ["".join(each.itertext()) for each in drawn.iter() if each.tag.endswith("}text")]
    assert texts.count("finished") == 3
    assert texts.count("waiting") == 1, "two sequences run at once"
    assert runs(["a", "a", None, "b"]) == [("a", (0, 2)), ("b", (3, 4))]
    with pytest.raises(ValueError, match="no step to draw"):
        picture(Run([], []), (), "t", 12)


# Contributing


def test_contributing_begins_with_three_commands_and_has_the_recipes() -> None:
    text = text_of("CONTRIBUTING.md")
    (first, *_) = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(first.splitlines()) == 3
    for recipe in ("an engine option", "a sampling parameter", "a model family", "a chapter"):
        assert f"\n### Add {recipe}\n" in text


def test_the_changelog_has_the_version_and_what_comes_next() -> None:
    headings = re.findall(r"^## (\S+)", text_of("CHANGELOG.md"), re.MULTILINE)
    version = tomllib.loads(text_of("pyproject.toml"))["project"]["version"]
    assert headings[0] == "Unreleased"
    assert headings[1] == version == minigen.__version__


@pytest.mark.parametrize(
    "message",
    [
        "kv_cache: share full blocks on fork",
        "README, help and protocols: what a stranger stumbled over",
        "Refuse old names with the new ones\n\nThe story.\n",
        "# a comment of git\nAdd a chapter\n# another",
        "docs: draw\n# ------------------------ >8 ------------------------\ndiff --git a b",
        "Merge branch 'main' into a branch whose name is so long that it passes the limit of 72",
        "a" * 60 + ": " + "b" * 10,
    ],
)
def test_a_good_commit_message_passes(message: str) -> None:
    assert complaint(message) is None


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        ("", "empty"),
        ("# only a comment", "empty"),
        ("kv_cache: " + "x" * 63, "73 characters"),
        ("share blocks", "area"),
        ("kv_cache:share", "area"),
        ("Share blocks.", "full stop"),
        ("Share blocks\nbecause", "empty line"),
    ],
)
def test_a_bad_commit_message_is_refused_with_the_reason(
    message: str, wrong: str, tmp_path: Path
) -> None:
    assert wrong in str(complaint(message))
    file = tmp_path / "message"
    file.write_text(message, encoding="utf-8")
    command = [sys.executable, "-m", "tools.commit_subject", str(file)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
    assert (run.returncode, wrong in run.stderr) == (1, True)


def test_the_hooks_call_tools_that_the_environment_installs() -> None:
    hooks = yaml.safe_load(text_of(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    extras = tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"]["test"]
    declared = {re.split(r"[^\w-]", each)[0] for each in extras}
    for hook in hooks:
        program, dash, module, *_ = hook["entry"].split()
        assert (program, dash) == (".venv/bin/python", "-m")
        package = module.split(".")[0].removesuffix("_lib")
        assert package in declared | {"tools"}, module
    assert {"lint", "types", "notebooks", "commit-subject"} <= {hook["id"] for hook in hooks}


@pytest.mark.skipif(find_spec("codespell_lib") is None, reason="codespell is not installed")
def test_words_are_spelled_right() -> None:
    places = ["minigen", "minigen_course", "tools", "tests", "benchmarks", "notebooks", "docs"]
    command = [sys.executable, "-m", "codespell_lib", *places, *map(str, DOCUMENTS[:3])]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize(
    "name", [name for name, path in layout.modules().items() if ">>> " in path.read_text("utf-8")]
)
def test_the_examples_in_docstrings_hold(name: str) -> None:
    result = doctest.testmod(import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
