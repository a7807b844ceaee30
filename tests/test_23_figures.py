"""The drawn tree is the cache's own at every step; prompts show the prefixes that they found."""

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from minigen.kv_cache.block_allocator import BlockAllocator
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.radix_cache import Node, RadixPrefixCache
from minigen.sampling.params import SamplingParams
from minigen.sequence import Sequence
from minigen.trace.events import EventKind, Recorder, Trace
from minigen_course.ch23_prefix.figures import (
    by_share,
    by_turn,
    radix_tree,
    tree_states,
    visits_figure,
)
from minigen_course.ch23_prefix.lesson import Visits, visit
from minigen_course.figures.style import AMBER, FAINT, GREEN, ORANGE, SKY

BLOCK = 2


class Office:
    """A manager with a recorder; its requests are computed without a model, a step at a time."""

    def __init__(self, num_blocks: int):
        self.trace, self.recorder = Trace(), Recorder()
        self.trace.subscribe(self.recorder)
        allocator = BlockAllocator(num_blocks)
        self.cache = RadixPrefixCache(allocator, BLOCK)
        self.manager = BlockManager(allocator, self.cache, BLOCK, 4, num_blocks, self.trace)
        self.prompts: list[list[int]] = []
        self.trees: list[set[tuple[int, ...]]] = []

    def arrive(self, *prompt: int) -> Sequence:
        made = Sequence(len(self.prompts), prompt, SamplingParams(), 0, 9, frozenset())
        self.prompts.append(list(prompt))
        self.trace.emit(EventKind.QUEUED, made.sequence_id, prompt_tokens=len(prompt), waited_ns=0)
        return made

    def compute(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            if sequence not in self.manager.rows:
                assert self.manager.allocate(sequence, len(sequence))
            else:
                assert self.manager.allocate_slots(sequence, len(sequence.new_ids))
            self.trace.emit(
                EventKind.SCHEDULED,
                sequence.sequence_id,
                tokens=len(sequence.new_ids),
                computed=sequence.num_computed,
            )
            self.manager.mark_computed(sequence, len(sequence.new_ids))
        self.step()

    def write(self, sequence: Sequence, token_id: int) -> None:
        sequence.append(token_id)
        self.trace.emit(EventKind.NEW_TOKEN, sequence.sequence_id, token=token_id)

    def finish(self, sequence: Sequence) -> None:
        sequence.finish_reason = "stop"
        self.manager.free(sequence)
        self.trace.emit(EventKind.FINISHED, sequence.sequence_id, output_tokens=0, stopped=1)

    def step(self) -> None:
        self.trees.append({path for root in self.cache.roots.values() for path in _paths(root, ())})
        self.trace.emit(EventKind.STEP, sequences=1, tokens=1, duration_ns=1)


def _paths(node: Node, above: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return all tokens on the way to each node below this one."""
    found = []
    for child in node.children.values():
        path = above + child.key
        found += [path, *_paths(child, path)]
    return found


@pytest.fixture
def busy() -> Office:
    """Two prompts with a shared prefix, an answer that continues, and a third prompt evicting."""
    office = Office(num_blocks=6)
    first = office.arrive(1, 2, 3, 4, 5)
    office.compute(first)
    second = office.arrive(1, 2, 3, 4, 7, 8, 9)
    office.compute(second)
    office.write(first, 6)
    office.compute(first)
    office.finish(first)
    office.finish(second)
    office.compute(office.arrive(*range(20, 29)))
    return office


def paths_of(cached: dict[int, object]) -> set[tuple[int, ...]]:
    found = set()
    for each in cached.values():
        path, node = each.tokens, each  # type: ignore[attr-defined]
        while node.above is not None:  # type: ignore[attr-defined]
            node = cached[node.above]  # type: ignore[attr-defined]
            path = node.tokens + path  # type: ignore[attr-defined]
        found.add(path)
    return found


def test_the_tree_of_every_step_is_the_caches_own(busy: Office) -> None:
    states = tree_states(busy.recorder.events, busy.prompts, BLOCK)
    assert [paths_of(state.cached) for state in states] == busy.trees
    assert sum(len(state.evicted) for state in states) == 3


def test_users_and_hits_are_those_of_the_requests(busy: Office) -> None:
    first, second, third, last = tree_states(busy.recorder.events, busy.prompts, BLOCK)
    assert {each.users for each in first.cached.values()} == {frozenset({0})}
    assert [len(each.users) for each in second.cached.values()] == [2, 2, 1]
    assert len(third.grown) == 1
    assert {each.users for each in last.cached.values()} == {frozenset(), frozenset({2})}
    assert [each.num_found for each in last.requests.values()] == [0, 4, 0]


def test_a_block_that_two_computed_at_once_is_cached_once() -> None:
    office = Office(num_blocks=8)
    one, other = office.arrive(1, 2, 3), office.arrive(1, 2, 4)
    office.manager.allocate(one, 3)
    office.manager.allocate(other, 3)
    office.compute(one, other)
    (state,) = tree_states(office.recorder.events, office.prompts, BLOCK)
    assert [(each.tokens, each.users) for each in state.cached.values()] == [
        ((1, 2), frozenset({0, 1}))
    ]


def test_events_without_a_step_or_of_unknown_prompts_are_refused(busy: Office) -> None:
    with pytest.raises(ValueError, match="more requests than the 2 prompts"):
        tree_states(busy.recorder.events, busy.prompts[:2], BLOCK)
    with pytest.raises(ValueError, match="no step in these events"):
        tree_states([], [], BLOCK)


def boxes(axes: object) -> list[Rectangle]:
    return [each for each in axes.patches if isinstance(each, Rectangle)]  # type: ignore[attr-defined]


def test_a_box_is_drawn_for_every_block_in_the_colour_of_its_use(busy: Office) -> None:
    states = tree_states(busy.recorder.events, busy.prompts, BLOCK)
    for step, state in enumerate(states):
        tree, prompts = radix_tree(states, step, BLOCK, str).axes
        fills = [to_hex(each.get_facecolor()) for each in boxes(tree)]
        assert len(fills) == len({**state.evicted, **state.cached})
        assert fills.count(SKY) == sum(bool(each.users) for each in state.cached.values())
        assert fills.count(FAINT) == sum(not each.users for each in state.cached.values())
        edges = [to_hex(each.get_edgecolor()) for each in boxes(tree)]
        assert edges.count(ORANGE) == len(state.grown)
        assert len(boxes(prompts)) == sum(
            -(-len(each.prompt) // 2) for each in state.requests.values()
        )
    assert "has 5 blocks, 1 of them unused" in tree.get_title(loc="left")
    shown = [to_hex(each.get_facecolor()) for each in boxes(prompts)]
    assert (shown.count(GREEN), shown.count(AMBER)) == (2, 10)
    assert prompts.get_title(loc="left") == "Prompts so far: 4 of 21 tokens were found in the tree"


def test_no_two_blocks_are_drawn_at_the_same_place(busy: Office) -> None:
    states = tree_states(busy.recorder.events, busy.prompts, BLOCK)
    for step in range(len(states)):
        for axes in radix_tree(states, step, BLOCK, str).axes:
            places = [each.get_xy() for each in boxes(axes)]
            assert len(set(places)) == len(places)


def test_a_step_that_does_not_exist_is_refused(busy: Office) -> None:
    states = tree_states(busy.recorder.events, busy.prompts, BLOCK)
    with pytest.raises(ValueError, match=r"steps 0 to 3: there is no step 4\."):
        radix_tree(states, 4, BLOCK, str)


def test_visits_find_shared_prefixes_and_evict_only_when_memory_is_short() -> None:
    roomy = visit(num_users=3, shared_tokens=32, own_tokens=32, num_blocks=40, num_requests=12)
    assert roomy.asked == [64] * 12
    assert roomy.found[0] == 0
    assert set(roomy.found[1:]) == {32, 48}, "the shared prompt, or all but the last block"
    assert sum(roomy.evicted) == 0
    tight = visit(num_users=3, shared_tokens=32, own_tokens=32, num_blocks=5, num_requests=12)
    assert sum(tight.evicted) > 0
    assert tight.hit_rate < roomy.hit_rate == sum(roomy.found) / (64 * 12)
    with pytest.raises(ValueError, match="prompt of 64 tokens does not fit"):
        visit(num_users=3, shared_tokens=32, own_tokens=32, num_blocks=3, num_requests=12)


def test_bars_of_visits_turns_and_shares_are_the_numbers_they_are_given() -> None:
    above, below = visits_figure(Visits([8, 8], [0, 6], [0, 3])).axes
    assert [each.get_height() for each in above.patches] == [0, 6, 8, 2]
    assert [each.get_height() for each in below.patches] == [0, 3]
    assert above.get_title(loc="left").startswith("38% of the prompts' tokens were found, 3 ")
    (axes,) = by_turn({"a": [3, 5], "b": [1, 2]}).axes
    assert [each.get_height() for each in axes.patches] == [3, 5, 1, 2]
    (axes,) = by_share({"long": {0.5: 0.6, 0.0: 1.0}, "short": {0.0: 1.0, 0.75: 0.8}}).axes
    assert [list(each.get_ydata()) for each in axes.lines] == [[1, 0], [1.0, 0.6], [1.0, 0.8]]
