"""Bug hunts check tests and parts: good ones pass, bad ones get a message with the mistake."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from minigen_course.grading.hunt import HUNTS, Caught, Hunt, cell_of, hunt, hunt_of, hunts_of
from minigen_course.grading.judge import verdict_on
from minigen_course.handout.sheet import exercise_notebook
from minigen_course.handout.workspace import progress
from minigen_course.lab.toy_engine import serve_toy
from tests.answers.hunts import CATCHES, Catches, empty

PIN = """


from minigen.kv_cache.block_allocator import BlockAllocator


def pin(PrefixCache, size):
    cache = PrefixCache(BlockAllocator(9), 4)
    cache.insert(list(range(12)), cache.allocator.allocate(3), 0)
    assert 4 * len(cache.match(list(range(size)))) < size
"""


KNOWN = [(chapter, each) for chapter in HUNTS for each in hunts_of(chapter)]


@pytest.fixture(params=KNOWN, ids=[each.name for _, each in KNOWN])
def found(request: pytest.FixtureRequest) -> tuple[str, Hunt]:
    chapter, hunted = request.param
    return chapter, hunted


@pytest.fixture
def hunted(found: tuple[str, Hunt]) -> Hunt:
    return found[1]


@pytest.fixture
def catches(hunted: Hunt) -> Catches:
    return CATCHES[hunted.name]


def judged(hunted: Hunt, test: Any, mended: Any) -> tuple[bool, str]:
    return verdict_on(hunted.all_checks(), Caught(test, mended))


def test_a_hunts_own_solution_fixes_it(hunted: Hunt) -> None:
    passed, message = judged(hunted, hunted.test, hunted.mended)
    assert passed, message


def test_good_tests_pass_with_good_parts(hunted: Hunt, catches: Catches) -> None:
    assert len(catches.tests) >= 2
    assert len(catches.parts) >= 2
    pairs = [(test, catches.parts[0]) for test in catches.tests]
    pairs += [(catches.tests[0], part) for part in catches.parts[1:]]
    for test, part in pairs:
        passed, message = judged(hunted, test, part)
        assert passed, f"{test} with {part}: {message}"


@pytest.mark.parametrize("end", [pytest.fail, sys.exit])
def test_a_test_may_fail_as_a_test_of_pytest_does(hunted: Hunt, end: Any) -> None:
    def test(part: Any) -> None:
        try:
            hunted.test(part)
        except Exception as error:
            end(str(error))

    passed, message = judged(hunted, test, hunted.mended)
    assert passed, message


def test_bad_tests_get_a_message_with_what_they_miss(hunted: Hunt, catches: Catches) -> None:
    assert len(catches.bad_tests) >= 8
    for name, (test, words) in catches.bad_tests.items():
        passed, message = judged(hunted, test, hunted.mended)
        assert not passed, name
        assert words in message, f"{name}: {message}"


def test_bad_parts_get_a_message_with_the_mistake(hunted: Hunt, catches: Catches) -> None:
    assert len(catches.bad_parts) >= 4
    for name, part in catches.bad_parts.items():
        passed, message = judged(hunted, hunted.test, part)
        assert not passed, name
        assert "the mended part" in message, f"{name}: {message}"


def test_every_variant_is_a_mistake_that_the_parts_own_checks_catch(hunted: Hunt) -> None:
    assert hunted.variants
    for name, part in hunted.variants.items():
        assert not judged(hunted, hunted.test, part)[0], name


def test_a_right_test_alone_gets_the_next_step(hunted: Hunt) -> None:
    passed, message = judged(hunted, hunted.test, None)
    assert not passed
    assert "your test is right. Mend the part" in message


def test_a_cell_contains_the_part_and_an_empty_test(hunted: Hunt) -> None:
    cell, names = cell_of(hunted.module), dict[str, Any]()
    exec(cell, names)
    assert cell.startswith(f"# hunt: {hunted.module}\n")
    with pytest.raises(NotImplementedError):
        names[hunted.test.__name__](None)
    passed, message = judged(hunted, hunted.test, names[hunted.handed.__name__])
    assert not passed
    assert "the mended part" in message


def test_a_hunt_runs_in_a_separate_process_and_returns_a_usable_part(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = hunt_of("22")
    assert hunt(22, test=empty, mended=found.handed, hint=1) is found.mended
    printed = capsys.readouterr().out
    assert printed.startswith("✗ test_slots: is still empty")
    assert "hint 1: Use blocks" in printed
    mine = CATCHES["slots"].parts[0]
    assert hunt(22, test=CATCHES["slots"].tests[0], mended=mine) is mine
    assert capsys.readouterr().out == "✓ slots: all 7 checks passed.\n"


def test_a_chapter_without_a_hunt_is_refused() -> None:
    message = r"Chapter 99 has no hunt; these have one: 22, 23, 24, 35, 36, 41, 42, 53\."
    with pytest.raises(ValueError, match=message):
        hunt(99, test=empty)


def test_a_hunt_of_a_chapter_with_several_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert [each.name for each in hunts_of("35")] == ["minus_one", "nibble_order", "seen_text"]
    assert hunts_of("99") == ()
    assert hunt_of("35").name == "minus_one"
    mine = CATCHES["nibble_order"].parts[0]
    assert hunt(35, name="nibble_order", test=CATCHES["nibble_order"].tests[0], mended=mine) is mine
    assert capsys.readouterr().out == "✓ nibble_order: all 6 checks passed.\n"
    cells = [cell["source"] for cell in exercise_notebook("35")["cells"]]
    assert 'hunt(35, name="seen_text", test=test_split, mended=split_text)' in cells[-1]
    with pytest.raises(ValueError, match=r"no hunt slots; it has minus_one, nibble_order, seen_te"):
        hunt(35, name="slots", test=empty)


def test_the_exercises_of_a_chapter_end_with_its_hunt() -> None:
    cells = [cell["source"] for cell in exercise_notebook("23")["cells"]]
    assert cells[-3].startswith("## A bug hunt: full_hit")
    assert cells[-2] == cell_of(HUNTS["23"][0])
    assert "hunt(23, test=test_prefix_cache, mended=ChainedPrefixCache)" in cells[-1]


def test_the_toy_engine_gives_the_same_answers_together_and_alone() -> None:
    prompts = [[1, 2, 3], [1, 2, 3, 4, 5, 6], [9] * 9]
    alone = [serve_toy([prompt]).answers[0] for prompt in prompts]
    assert serve_toy(prompts).answers == alone
    tight = serve_toy(prompts, num_blocks=6)
    assert (tight.answers, tight.streamed) == (alone, alone)
    assert tight.num_preempted > 0


def test_a_workspace_keeps_a_hunts_answer_and_checks_it(tmp_path: Path) -> None:
    folder = tmp_path / "exercises"
    folder.mkdir()
    notebook = exercise_notebook("23")
    (cell,) = (each for each in notebook["cells"] if each["source"] == cell_of(HUNTS["23"][0]))
    mended = cell["source"].replace("in self.ends(token_ids):", "in self.ends(token_ids[:-1]):")
    body = "for size in (4, 8, 12): pin(PrefixCache, size)"
    cell["source"] = mended.replace("raise NotImplementedError", body) + PIN
    notebook["cells"] = [cell]
    (folder / "23_prefix.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    found = {each.name: each for each in progress(tmp_path)}
    assert found["full_hit"].passed, found["full_hit"].message
