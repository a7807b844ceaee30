"""Rewrite a learner's notebooks and saved parts that use the names of an earlier minigen."""

import ast
import json
import re
import shutil
import tomllib
from collections import defaultdict
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from minigen.errors import OptionError
from minigen.renamed import METHODS, OPTIONS
from minigen_course.handout.cells import parsed

HUNTS = {
    "slots": "ch22_paged",
    "full_hit": "ch23_prefix",
    "preempted": "ch24_scheduler",
    "ranks": "ch41_tensor_parallel",
}
IMPORT = re.compile(r"^( *)from (minigen[\w.]*) import (\([^)]*\)|[^\n#(]*)", re.MULTILINE)
MARK = re.compile(r"^# (exercise:|hunt:|=) (minigen\.[\w.]+)$", re.MULTILINE)
CALLS = {  # methods whose old names are common words: only calls of a block manager are renamed
    "begin": "allocate",
    "reserve": "allocate_slots",
    "advance": "mark_computed",
    "release": "free",
    "take_copies": "pop_pending_copies",
}
WORDS = OPTIONS | {"next_batch": METHODS["next_batch"]}
del WORDS["attend"]  # also a name of functions: only the engine's keyword is renamed
ENGINES = {"load", "load_model", "EngineConfig"}  # what has an engine's options as keywords
USERS = (
    "join",
    "leave",
)  # methods of a prefix cache, and of threads: renamed where they are defined
EXTENSION = re.compile(r"^%load_ext minigen$", re.MULTILINE)
KEPT = ".before"


def migrate(path: Path) -> list[Path]:
    """Rewrite a file, or those of a workspace that need it; return what has changed.

    The original of `name` stays beside it as `name.before`, which is never overwritten. Raises
    `OptionError`, and changes nothing, for a path that is not a notebook, a Python file or a folder
    of them, or for a file that cannot be read.
    """
    if not path.is_dir() and (path.suffix not in (".ipynb", ".py") or not path.is_file()):
        raise OptionError(f"{path} is no notebook, no Python file and no folder of them.")
    found = {each: _before_and_after(each) for each in _files(path)}
    changed = {each: texts for each, texts in found.items() if texts[0] != texts[1]}
    for each, (_, after) in changed.items():
        newline = "\r\n" if b"\r\n" in each.read_bytes() else "\n"
        shutil.copy2(each, _unused(each))
        each.write_text(after, encoding="utf-8", newline=newline)
    return list(changed)


def outdated(folder: Path) -> list[Path]:
    """Return the files of a workspace with names of an earlier minigen; skip unreadable files."""
    found = []
    for each in _files(folder):
        with suppress(OptionError):
            before, after = _before_and_after(each)
            found += [each] * (before != after)
    return found


def _files(path: Path) -> list[Path]:
    """Return a file, or a workspace's notebooks, exercises and saved parts."""
    patterns = ("*.ipynb", "exercises/*.ipynb", "*.py")
    return (
        [each for kind in patterns for each in sorted(path.glob(kind))] if path.is_dir() else [path]
    )


def _unused(path: Path) -> Path:
    """Return a name for the original of `path` that no file has."""
    names = (f"{path.name}{KEPT}{number or ''}" for number in count())
    return next(each for each in map(path.with_name, names) if not each.exists())


def migrated(code: str) -> str:
    """Return Python code with today's names for those of an earlier minigen.

    >>> migrated("from minigen.cache.manager import BlockManager")
    'from minigen.kv_cache.block_manager import BlockManager'
    """
    names = _names()
    code = IMPORT.sub(lambda found: _import(found, names), code)
    code = MARK.sub(lambda found: f"# {found[1]} {_dotted(found[2], names)}", code)
    words = WORDS | {
        old: new for known in names.values() for old, (_, new) in known.items() if old != new
    }
    called = {old for old in words if old not in WORDS and old.islower()}  # may be English words
    kinds = ("|".join(words.keys() - called), r"\b"), ("|".join(called), r"(?=\()")
    for olds, end in kinds:
        code = re.sub(rf"\b({olds}){end}", lambda found: words[found[1]], code)
    code = re.sub(
        r"(?<=manager\.)(" + "|".join(CALLS) + r")\b", lambda found: CALLS[found[1]], code
    )
    for name in USERS:
        if re.search(rf"def {name}\(self, block_ids", code):
            code = re.sub(rf"(?:(?<=def )|(?<=self\.)){name}(?=\()", METHODS[name], code)
    return _with_new_keywords(EXTENSION.sub("%load_ext minigen_course", code))


def _with_new_keywords(code: str) -> str:
    """Return code with today's names of those options that are also names of other things.

    Only the keywords of calls that make an engine are renamed; none if the code is no Python.

    >>> _with_new_keywords("LLM.load(attend=attend); prefix_cache=True")
    'LLM.load(attention_backend=attend); prefix_cache=True'
    """
    try:
        nodes = list(ast.walk(parsed(code)))
    except SyntaxError:
        return code
    calls = [each for each in nodes if isinstance(each, ast.Call) and _makes_an_engine(each)]
    keywords = [each for call in calls for each in call.keywords]
    pieces = re.split(r"(\r\n?|\n)", code)  # lines, and their ends between them
    for each in sorted(keywords, key=lambda each: (each.lineno, each.col_offset), reverse=True):
        is_switch = isinstance(each.value, ast.Constant) and isinstance(each.value.value, bool)
        new = "attention_backend" if each.arg == "attend" else "enable_prefix_caching"
        if each.arg == "attend" or (each.arg == "prefix_cache" and is_switch):
            place = 2 * (each.lineno - 1)
            line, start = pieces[place].encode(), each.col_offset
            line = line[:start] + new.encode() + line[start + len(each.arg) :]
            pieces[place] = line.decode()
    return "".join(pieces)


def _makes_an_engine(call: ast.Call) -> bool:
    """Return whether a call is of `LLM.load` or the like, or a `partial` of it."""
    made = [call.func, *call.args[:1]]
    names = [getattr(each, "attr", getattr(each, "id", "")) for each in made]
    return names[0] in ENGINES or (names[0] == "partial" and bool(ENGINES & {*names[1:]}))


@cache
def _names() -> dict[str, dict[str, tuple[str, str]]]:
    """Return, by old module and old name, the module of today and the name there."""
    text = (Path(__file__).parent / "renamed.toml").read_text(encoding="utf-8")
    found: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    for old_module, modules in tomllib.loads(text).items():
        for module, names in modules.items():
            for name in names:
                old, _, new = name.partition(" > ")
                found[old_module][old] = (module, new or old)
    return found


def _import(found: "re.Match[str]", names: dict[str, dict[str, tuple[str, str]]]) -> str:
    """Return `from old import a, b as c` as imports of the modules that have those names now."""
    indent, old_module, listed = found.groups()
    known = names.get(old_module)
    if known is None:
        return found[0]
    modules: dict[str, list[str]] = defaultdict(list)
    is_changed = False
    for item in re.sub(r"#[^\n]*", "", listed).strip("()\n ").split(","):
        if not item.strip():
            continue
        name, _, other = (word.strip() for word in item.partition(" as "))
        module, new = known.get(name, (old_module, name))
        modules[module].append(f"{new} as {other}" if other else new)
        is_changed = is_changed or (module, new) != (old_module, name)
    if not is_changed:
        return found[0]
    lines = (f"{indent}from {module} import {', '.join(each)}" for module, each in modules.items())
    return "\n".join(lines)


def _dotted(old: str, names: dict[str, dict[str, tuple[str, str]]]) -> str:
    module, _, name = old.rpartition(".")
    if module == "minigen.teach.hunts":
        return f"minigen_course.{HUNTS[name]}.hunt"
    return ".".join(names.get(module, {}).get(name, (module, name)))


def _before_and_after(path: Path) -> tuple[str, str]:
    """Return a file's text as it is, and with today's names."""
    what = "a notebook" if path.suffix == ".ipynb" else "Python code"
    try:
        text = path.read_text(encoding="utf-8-sig")
        return text, _notebook(text) if path.suffix == ".ipynb" else migrated(text)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise OptionError(f"{path} cannot be read as {what} ({error}).") from error


def _notebook(text: str) -> str:
    """Return a notebook's text with today's names in its code; the same text if none is old."""
    notebook: dict[str, Any] = json.loads(text)
    changed = False
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            new = migrated(source)
            if new != source:
                cell["source"], changed = new, True
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n" if changed else text
