"""Names of an earlier minigen: refused with the new name, and rewritten in learners' files."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minigen.errors import OptionError
from minigen.llm import LLM
from minigen.renamed import METHODS, OPTIONS
from minigen.sampling.params import SamplingParams
from minigen_course.grading.migrate import _names, migrate, migrated, outdated
from minigen_course.handout.course_files import notebooks_folder
from minigen_course.handout.workspace import progress

OLD_PART = """\
from minigen.cache.manager import BlockManager
from minigen.sequence import Chunk, samples_of


class OneByOne:
    def __init__(self, manager: BlockManager, max_sequences, max_batch_tokens):
        self.manager, self.budget, self.queue = manager, max_batch_tokens, []

    def add(self, sequence):
        self.queue.append(sequence)

    def next_batch(self):
        if not self.queue:
            return []
        first = self.queue[0]
        if first not in self.manager.rows:
            return [Chunk(first, self.manager.begin(first, self.budget))]
        num_tokens = min(len(first) - first.num_computed, self.budget)
        self.manager.reserve(first, num_tokens)
        return [Chunk(first, num_tokens)]

    def commit(self, chunks, tokens):
        for chunk in chunks:
            self.manager.advance(chunk.sequence, chunk.num_tokens)
        for sequence, token in zip(samples_of(chunks), tokens):
            sequence.append(token.token_id)
            if sequence.finish_reason is not None:
                self.abort(sequence)

    def abort(self, sequence):
        self.manager.release(sequence)
        if sequence in self.queue:
            self.queue.remove(sequence)
"""
OLD_EXERCISE = """\
# exercise: minigen.cache.paged.slots_of
from minigen.cache.paged import (
    slots_of as theirs,
)

def slots_of(*parts):
    return theirs(*parts)
"""


@pytest.mark.parametrize(("old", "new"), OPTIONS.items())
def test_an_old_option_is_refused_with_its_new_name(tmp_path: Path, old: str, new: str) -> None:
    with pytest.raises(OptionError, match=rf"^The option {old} is called {new} now\.$"):
        LLM.load(tmp_path, **{old: 1})


@pytest.mark.parametrize("value", [True, False, "on", "off"])
def test_the_old_values_of_prefix_cache_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(OptionError, match=rf"enable_prefix_caching to {value in (True, 'on')} "):
        LLM.load(tmp_path, prefix_cache=value)


@pytest.mark.parametrize("old", OPTIONS)
@pytest.mark.parametrize("form", ["{} 1", "{}=1"])
def test_an_old_flag_is_refused_with_its_new_name(old: str, form: str) -> None:
    flag, new = (f"--{name.replace('_', '-')}" for name in (old, OPTIONS[old]))
    found = command("serve", *form.format(flag).split())
    assert found.returncode == 1
    assert found.stderr == f"minigen: The option {flag} is called {new} now.\n"


def test_what_follows_two_dashes_is_no_flag(tmp_path: Path) -> None:
    found = command("generate", "-m", str(tmp_path), "--", "--kv-memory")
    assert "called" not in found.stderr
    assert str(tmp_path) in found.stderr


def command(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "minigen", *words],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


def test_a_part_with_old_methods_is_refused_with_the_new_ones(tiny_directory: Path) -> None:
    class Old:
        def __init__(self, manager: Any, max_num_seqs: int, max_num_batched_tokens: int): ...
        def add(self, sequence: Any) -> None: ...
        def next_batch(self) -> list[Any]:
            return []

        def commit(self, chunks: Any, tokens: Any) -> None: ...
        def abort(self, sequence: Any) -> None: ...

    with pytest.raises(OptionError, match="next_batch is called schedule now"):
        LLM.load(tiny_directory, scheduler=Old)
    assert not set(METHODS) & set(METHODS.values())


def test_a_saved_part_of_before_is_refused_and_works_once_migrated(
    tmp_path: Path, tiny_directory: Path
) -> None:
    path = tmp_path / "part.py"
    path.write_text(OLD_PART, encoding="utf-8")
    options: dict[str, Any] = {"weights": "float32", "max_num_batched_tokens": 32}
    with pytest.raises(OptionError, match=r"module minigen\.cache; `minigen migrate .*part\.py`"):
        LLM.load(tiny_directory, scheduler=f"{path}:OneByOne", **options)
    assert migrate(path) == [path]
    assert (tmp_path / "part.py.before").read_text(encoding="utf-8") == OLD_PART
    mine = LLM.load(tiny_directory, scheduler=f"{path}:OneByOne", **options)
    ours = LLM.load(tiny_directory, **options)
    prompts, greedy = ["a", "b" * 40], SamplingParams(temperature=0, max_tokens=20)
    assert [each.token_ids for each in mine.generate(prompts, greedy)] == [
        each.token_ids for each in ours.generate(prompts, greedy)
    ]
    assert migrate(path) == [], "there is nothing left to rewrite"


def test_a_workspace_of_before_passes_again_once_migrated(tmp_path: Path) -> None:
    (tmp_path / "exercises").mkdir()
    path = tmp_path / "exercises" / "22_paged.ipynb"
    cells = [{"cell_type": "code", "source": OLD_EXERCISE.splitlines(keepends=True)}]
    cells.append({"cell_type": "markdown", "source": "from minigen.teach import check"})
    path.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    assert "slots_of" not in passed(tmp_path)
    assert outdated(tmp_path) == [path]
    assert migrate(tmp_path) == [path]
    assert "slots_of" in passed(tmp_path)
    assert json.loads(path.read_text(encoding="utf-8"))["cells"][1] == cells[1]


def passed(folder: Path) -> set[str]:
    return {each.name for each in progress(folder) if each.chapter == "22" and each.passed}


def test_every_new_name_of_the_table_exists() -> None:
    for names in _names().values():
        for module, name in names.values():
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_todays_notebooks_need_no_migration() -> None:
    assert outdated(notebooks_folder()) == []


def test_imports_of_several_modules_are_divided() -> None:
    old = "from minigen.teach import (\n    check,  # a judge\n    measured as m,\n)\n"
    assert migrated(old) == "from minigen_course import check, measured as m\n"
    assert migrated("from minigen.llm import LLM\n") == "from minigen.llm import LLM\n"


@pytest.mark.parametrize("name", ["nowhere.py", "text.txt"])
def test_what_cannot_be_migrated_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "text.txt").write_text("", encoding="utf-8")
    with pytest.raises(OptionError, match=f"{name} is no notebook"):
        migrate(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.ipynb", b"{"), ("a.ipynb", b"[" * 100_000), ("a.py", b"\xff\xfe")],
    ids=["cut", "nested", "bytes"],
)
def test_a_file_that_cannot_be_read_is_named_and_nothing_changes(
    tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    part = tmp_path / "part.py"
    part.write_text(OLD_PART, encoding="utf-8")
    with pytest.raises(OptionError, match=rf"{name} cannot be read as "):
        migrate(tmp_path)
    assert part.read_text(encoding="utf-8") == OLD_PART
    assert outdated(tmp_path) == [part], "a hint at what is old skips it"


def test_only_the_files_of_a_workspace_are_looked_at(tmp_path: Path) -> None:
    other = tmp_path / "environment" / "lib"
    other.mkdir(parents=True)
    (other / "theirs.py").write_text(OLD_PART, encoding="utf-8")
    assert outdated(tmp_path) == []
    assert migrate(tmp_path) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def run(q, attend=None): return attend(q)", None),
        ("run_layer(layer, attend=attend)", None),
        ("prefix_cache=True\nprint(prefix_cache)", None),
        ("load(prefix_cache=MyCache)", None),
        ("'LLM.load(attend=f)'", None),
        ("load(attend=", None),
        ("LLM.load('é', attend = attend)", "LLM.load('é', attention_backend = attend)"),
        (
            "%time x = 1\nload = partial(load_model,\n    attend=f, prefix_cache=False)",
            "%time x = 1\nload = partial(load_model,\n    attention_backend=f, "
            "enable_prefix_caching=False)",
        ),
    ],
)
def test_options_whose_old_names_are_common_are_renamed_only_for_an_engine(
    old: str, new: str | None
) -> None:
    assert migrated(old) == (new or old)


def test_line_ends_stay_and_an_original_stays_byte_by_byte(tmp_path: Path) -> None:
    path, old = tmp_path / "part.py", OLD_PART.replace("\n", "\r\n").encode()
    path.write_bytes(old)
    assert migrate(path) == [path]
    assert (tmp_path / "part.py.before").read_bytes() == old
    assert path.read_bytes() == migrated(OLD_PART).replace("\n", "\r\n").encode()


def test_an_original_that_was_kept_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "part.py"
    for text in (OLD_PART, f"{OLD_PART}\n# again"):
        path.write_text(text, encoding="utf-8")
        assert migrate(path) == [path]
    assert (tmp_path / "part.py.before").read_text(encoding="utf-8") == OLD_PART
    assert (tmp_path / "part.py.before1").read_text(encoding="utf-8").endswith("# again")


def test_a_notebook_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "part.ipynb"
    notebook = {"cells": [{"cell_type": "code", "source": OLD_PART}]}
    path.write_text(json.dumps(notebook), encoding="utf-8-sig")
    assert migrate(path) == [path]
    (cell,) = json.loads(path.read_bytes())["cells"]
    assert cell["source"] == migrated(OLD_PART)


def test_methods_with_common_names_are_renamed_only_in_a_prefix_cache() -> None:
    thread = "class Clock(Thread):\n    def stop(self):\n        self.join()\n"
    assert migrated(thread) == thread
    cache = "def {0}(self, block_ids):\n    self.{1}(block_ids)\ndef {1}(self, block_ids): ..."
    assert migrated(cache.format("join", "leave")) == cache.format("acquire", "release")
