"""Rewrite a learner's notebooks and saved parts that use the names of an earlier minigen."""

import json
import re
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

from minigen.errors import OptionError
from minigen.renamed import OPTIONS

HUNTS = {"slots": "ch22_paged", "full_hit": "ch23_prefix", "preempted": "ch24_scheduler"}
HUNTS["ranks"] = "ch41_tensor_parallel"
IMPORT = re.compile(r"^( *)from (minigen[\w.]*) import (\([^)]*\)|[^\n#(]*)", re.MULTILINE)
MARK = re.compile(r"^# (exercise:|hunt:|=) (minigen\.[\w.]+)$", re.MULTILINE)
CALLS = {  # methods whose old names are common words: only calls of a block manager are renamed
    "begin": "allocate",
    "reserve": "allocate_slots",
    "advance": "mark_computed",
    "release": "free",
    "take_copies": "pop_pending_copies",
}
WORDS = {**OPTIONS, "next_batch": "schedule"}
del WORDS["attend"]  # also a name of functions: only the keyword is renamed
PATTERNS = [
    (re.compile(r"^%load_ext minigen$", re.MULTILINE), "%load_ext minigen_course"),
    (re.compile(r"\battend=(?=\S)"), "attention_backend="),
    (re.compile(r"\bprefix_cache=(True|False)\b"), r"enable_prefix_caching=\1"),
    (re.compile(r"(?<=def )join(?=\(self, block_ids)"), "acquire"),
    (re.compile(r"(?<=def )leave(?=\(self, block_ids)"), "release"),
    (re.compile(r"(?<=self\.)join(?=\()"), "acquire"),
    (re.compile(r"(?<=self\.)leave(?=\()"), "release"),
]
KEPT = ".before"


def migrate(path: Path) -> list[Path]:
    """Rewrite a file, or those of a workspace that need it; returns what has changed.

    The original of `name` stays beside it as `name.before`. Raises `OptionError` for a path that
    is no notebook, Python file or folder of them.
    """
    if not path.is_dir() and (path.suffix not in (".ipynb", ".py") or not path.is_file()):
        raise OptionError(f"{path} is no notebook, no Python file and no folder of them.")
    changed = outdated(path)
    for each in changed:
        text = each.read_text(encoding="utf-8")
        each.with_name(each.name + KEPT).write_text(text, encoding="utf-8")
        each.write_text(_rewritten(each, text), encoding="utf-8")
    return changed


def outdated(path: Path) -> list[Path]:
    """Return the file, or the files of a folder, whose code has names of an earlier minigen."""
    files = [path]
    if path.is_dir():
        found = [each for kind in ("*.ipynb", "*.py") for each in sorted(path.rglob(kind))]
        files = [each for each in found if ".ipynb_checkpoints" not in each.parts]
    texts = ((each, each.read_text(encoding="utf-8")) for each in files)
    return [each for each, text in texts if _rewritten(each, text) != text]


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
    code = re.sub(r"\b(" + "|".join(words) + r")\b", lambda found: words[found[1]], code)
    code = re.sub(
        r"(?<=manager\.)(" + "|".join(CALLS) + r")\b", lambda found: CALLS[found[1]], code
    )
    for pattern, new in PATTERNS:
        code = pattern.sub(new, code)
    return code


def _names() -> dict[str, dict[str, tuple[str, str]]]:
    """By old module and old name: where that is now, and what it is called."""
    text = (Path(__file__).parent / "renamed.toml").read_text(encoding="utf-8")
    found: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    for old_module, modules in tomllib.loads(text).items():
        for module, names in modules.items():
            for name in names:
                old, _, new = name.partition(" > ")
                found[old_module][old] = (module, new or old)
    return found


def _import(found: "re.Match[str]", names: dict[str, dict[str, tuple[str, str]]]) -> str:
    """One `from old import a, b as c` as imports of the modules that have those names now."""
    indent, old_module, listed = found.groups()
    known = names.get(old_module)
    if known is None:
        return found[0]
    modules: dict[str, list[str]] = defaultdict(list)
    for item in re.sub(r"#[^\n]*", "", listed).strip("()\n ").split(","):
        if not item.strip():
            continue
        name, _, other = (word.strip() for word in item.partition(" as "))
        module, new = known.get(name, (old_module, name))
        modules[module].append(f"{new} as {other}" if other else new)
    lines = (f"{indent}from {module} import {', '.join(each)}" for module, each in modules.items())
    return "\n".join(lines)


def _dotted(old: str, names: dict[str, dict[str, tuple[str, str]]]) -> str:
    module, _, name = old.rpartition(".")
    if module == "minigen.teach.hunts":
        return f"minigen_course.{HUNTS[name]}.hunt"
    return ".".join(names.get(module, {}).get(name, (module, name)))


def _rewritten(path: Path, text: str) -> str:
    if path.suffix == ".py":
        return migrated(text)
    try:
        notebook: dict[str, Any] = json.loads(text)
        cells = [each for each in notebook["cells"] if each["cell_type"] == "code"]
        changed = False
        for cell in cells:
            source = "".join(cell["source"])
            if migrated(source) != source:
                cell["source"], changed = migrated(source), True
    except (ValueError, KeyError, TypeError) as error:
        raise OptionError(f"{path} cannot be read as a notebook ({error}).") from error
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n" if changed else text
