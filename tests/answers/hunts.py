"""What learners might submit for the bug hunts: tests and mended parts, good and bad."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from minigen.kv_cache.block_allocator import BlockAllocator
from minigen_course.ch22_paged import hunt as hunt_22
from minigen_course.ch23_prefix import hunt as hunt_23
from minigen_course.ch24_scheduler import hunt as hunt_24
from minigen_course.ch35_quantization import hunt as hunt_35
from minigen_course.ch35_quantization.hunts import nibble_order, seen_text
from minigen_course.ch36_speculative import hunt as hunt_36
from minigen_course.ch41_tensor_parallel import hunt as hunt_41
from minigen_course.ch42_pipeline import hunt as hunt_42
from minigen_course.ch53_structured_output import hunt as hunt_53
from minigen_course.lab.toy_engine import serve_toy
from tests.answers import (
    blank_hunt,
    buffer_hunt,
    draft_hunt,
    order_hunt,
    rank_hunt,
    slots_hunt,
    split_hunt,
    zeros_hunt,
)

Test = Callable[[Any], object]


@dataclass(frozen=True)
class Catches:
    """Good tests; bad tests, each with words of its message; good parts; bad parts."""

    tests: tuple[Test, ...]
    bad_tests: Mapping[str, tuple[Test, str]]
    parts: tuple[Any, ...]
    bad_parts: Mapping[str, Any]


def empty(part: Any) -> None:
    raise NotImplementedError


def nothing(part: Any) -> None:
    return None


def says_no(part: Any) -> bool:
    return False


def always_fails(part: Any) -> None:
    raise AssertionError("this part is bad")


COMMON = {
    "empty": (empty, "still empty"),
    "asserts nothing": (nothing, "it passes, and should fail"),
    "returns a verdict": (says_no, "states what must hold with `assert`"),
    "always fails": (always_fails, "should pass on the mended one"),
    "no function": (7, "should be a function"),
}

# Chapter 23


def asks_twice(Cache: Any) -> None:
    for num_blocks in (1, 3):
        cache = Cache(BlockAllocator(30), 2)
        text = list(range(2 * num_blocks))
        for tokens in (text, [*text, 7, 8]):
            matched = cache.match(tokens)
            assert 2 * len(matched) < len(tokens)
            own = cache.allocator.allocate(len(tokens) // 2 - len(matched))
            cache.insert(tokens, [*matched, *own], len(matched))
        assert 2 * len(cache.match(text)) < len(text)


def in_the_toy_engine(Cache: Any) -> None:
    prompts = [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4]]
    for prompt in (*prompts, [1, 2, 3, 4, 5, 6, 7, 8]):
        serve_toy([*prompts, prompt], prefix_cache=Cache, max_num_seqs=1, max_tokens=5)
    serve_toy([prompts[1]] * 2, prefix_cache=Cache, max_num_seqs=1, max_tokens=1)


def never_whole_blocks(Cache: Any) -> None:
    cache = Cache(BlockAllocator(9), 4)
    cache.insert(list(range(4)), cache.allocator.allocate(1), 0)
    assert len(cache.match(list(range(5)))) == 1


def one_block_only(Cache: Any) -> None:
    cache = Cache(BlockAllocator(9), 4)
    cache.insert(list(range(4)), cache.allocator.allocate(1), 0)
    assert cache.match(list(range(4))) == []


def many_blocks_only(Cache: Any) -> None:
    cache = Cache(BlockAllocator(9), 4)
    cache.insert(list(range(8)), cache.allocator.allocate(2), 0)
    assert len(cache.match(list(range(8)))) == 1


def wants_nothing_found(Cache: Any) -> None:
    cache = Cache(BlockAllocator(9), 4)
    cache.insert(list(range(8)), cache.allocator.allocate(2), 0)
    assert cache.match(list(range(8))) == []


class Shortened(hunt_23.ChainedPrefixCache):
    """Right: looks only at blocks that end before the last token."""

    def match(self, token_ids: Any, salt: Any = None) -> list[int]:
        return super().match(token_ids[: max(len(token_ids) - 1, 0)], salt)


class NeverTheLastBlock(hunt_23.ChainedPrefixCache):
    def match(self, token_ids: Any, salt: Any = None) -> list[int]:
        return super().match(token_ids[: -self.block_size], salt)


class PopsWithoutReleasing(hunt_23.ChainedPrefixCache):
    def match(self, token_ids: Any, salt: Any = None) -> list[int]:
        matched = super().match(token_ids, salt)
        if len(matched) * self.block_size == len(token_ids) and matched:
            matched.pop()
        return matched


class NothingForWholeBlocks(hunt_23.ChainedPrefixCache):
    def match(self, token_ids: Any, salt: Any = None) -> list[int]:
        if len(token_ids) % self.block_size == 0:
            return []
        return super().match(token_ids, salt)


class ForgetsToInsert(hunt_23.ChainedPrefixCache):
    """Changes `ends` for `insert` too, so the last full block is never cached."""

    def ends(self, token_ids: Any) -> range:
        return range(self.block_size, len(token_ids), self.block_size)


# Chapter 24

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 9], [3, 1, 4, 1, 5, 9]]


def whole_results(Scheduler: Any) -> None:
    undisturbed = serve_toy(PROMPTS, scheduler=Scheduler)
    short = serve_toy(PROMPTS, scheduler=Scheduler, num_blocks=6)
    assert short.num_preempted > 0
    assert short == undisturbed


def with_one_at_a_time(Scheduler: Any) -> None:
    for number, prompt in enumerate(PROMPTS):
        (alone,) = serve_toy([prompt], scheduler=Scheduler).streamed
        for num_blocks in range(5, 12):
            short = serve_toy(PROMPTS, scheduler=Scheduler, num_blocks=num_blocks)
            assert short.streamed[number] == alone == short.answers[number]


def plenty_of_memory(Scheduler: Any) -> None:
    assert serve_toy(PROMPTS, scheduler=Scheduler) == serve_toy(PROMPTS, scheduler=Scheduler)


def answers_only(Scheduler: Any) -> None:
    short = serve_toy(PROMPTS, scheduler=Scheduler, num_blocks=6)
    assert short.answers == serve_toy(PROMPTS, scheduler=Scheduler).answers


def lengths_only(Scheduler: Any) -> None:
    for answer in serve_toy(PROMPTS, scheduler=Scheduler, num_blocks=6).answers:
        assert len(answer) == 12


def forbids_preemption(Scheduler: Any) -> None:
    assert serve_toy(PROMPTS, scheduler=Scheduler, num_blocks=6).num_preempted == 0


def same_number_of_steps(Scheduler: Any) -> None:
    short = serve_toy(PROMPTS, scheduler=Scheduler, num_blocks=6)
    assert short.num_steps == serve_toy(PROMPTS, scheduler=Scheduler).num_steps


class TokensFromBoth(hunt_24.PlainScheduler):
    """Right: the prompt and the output are joined again."""

    def preempt(self, victim: Any) -> None:
        super().preempt(victim)
        victim.token_ids = [*victim.prompt_ids, *victim.output_ids]


class OneByOne(hunt_24.PlainScheduler):
    def __init__(self, manager: Any, max_num_seqs: int, max_num_batched_tokens: int):
        super().__init__(manager, 1, max_num_batched_tokens)


class OutputIntoPrompt(hunt_24.PlainScheduler):
    """The output becomes part of the prompt and is deleted as output."""

    def preempt(self, victim: Any) -> None:
        victim.prompt_ids = tuple(victim.token_ids)
        victim.output_ids.clear()
        super().preempt(victim)


class KeepsItsBlocks(hunt_24.PlainScheduler):
    """Removes the victim from the batch, but never frees its blocks."""

    def preempt(self, victim: Any) -> None:
        self.running.remove(victim)
        self.waiting.appendleft(victim)


CATCHES = {  # by the name of a hunt
    "slots": Catches(
        (slots_hunt.every_slot_once, slots_hunt.by_formula),
        COMMON
        | {
            "looks at the first block only": (
                slots_hunt.only_the_first_block,
                "it passes, and should fail",
            ),
            "looks at decode steps only": (slots_hunt.only_decode, "in the middle of a chunk"),
            "has adjacent blocks only": (
                slots_hunt.only_adjacent_blocks,
                "it passes, and should fail",
            ),
            "no chunk starts inside a block": (slots_hunt.only_whole_prompts, "start of its block"),
            "expects a wrong result": (
                slots_hunt.wants_other_slots,
                "should pass on the mended one",
            ),
        },
        (slots_hunt.mended_by_size, *hunt_22.HUNT.right.values()),
        {
            "unchanged": hunt_22.next_slots,
            "the last block, whichever it is": slots_hunt.mended_one_block_early,
            "uses the block after the last": slots_hunt.mended_by_the_next_block,
            "returns nothing": slots_hunt.returns_nothing,
        },
    ),
    "full_hit": Catches(
        (asks_twice, in_the_toy_engine),
        COMMON
        | {
            "has one token more": (never_whole_blocks, "it passes, and should fail"),
            "asks for one block only": (one_block_only, "several blocks long"),
            "asks for several blocks only": (many_blocks_only, "if it is one block long"),
            "expects no match": (wants_nothing_found, "should pass on the mended one"),
        },
        (Shortened, *hunt_23.HUNT.right.values()),
        {
            "unchanged": hunt_23.ChainedPrefixCache,
            "never finds the last block": NeverTheLastBlock,
            "stays an owner of a block that it does not return": PopsWithoutReleasing,
            "finds nothing for whole blocks": NothingForWholeBlocks,
            "never caches the last block": ForgetsToInsert,
        },
    ),
    "preempted": Catches(
        (whole_results, with_one_at_a_time),
        COMMON
        | {
            "has enough memory": (plenty_of_memory, "it passes, and should fail"),
            "looks at the answers only": (answers_only, "gets the same tokens twice"),
            "counts tokens only": (lengths_only, "it passes, and should fail"),
            "forbids preemption": (forbids_preemption, "should pass on the mended one"),
            "expects as many steps": (same_number_of_steps, "should pass on the mended one"),
        },
        (TokensFromBoth, *hunt_24.HUNT.right.values()),
        {
            "unchanged": hunt_24.PlainScheduler,
            "runs one at a time": OneByOne,
            "turns output into a prompt": OutputIntoPrompt,
            "does not free the victim's blocks": KeepsItsBlocks,
        },
    ),
    "minus_one": Catches(
        (zeros_hunt.every_number_at_every_place, zeros_hunt.random_zeros),
        COMMON
        | {
            "has version 2 only": (zeros_hunt.only_version_2, "it passes, and should fail"),
            "looks at the first number only": (
                zeros_hunt.only_the_first,
                "it passes, and should fail",
            ),
            "has numbers that are all alike": (zeros_hunt.all_alike, "does not wrap"),
            "has no zero point of 0": (zeros_hunt.never_zero, "does not wrap"),
            "has one word only": (
                zeros_hunt.one_word_only,
                "adds one to the first word only",
            ),
            "expects 16": (zeros_hunt.wants_16, "should pass on the mended one"),
        },
        (zeros_hunt.by_numpy, zeros_hunt.by_table, *hunt_35.HUNT.right.values()),
        {
            "unchanged": hunt_35.read_zeros,
            "carries": zeros_hunt.ones_with_carry,
            "takes the magnitude": zeros_hunt.without_sign,
            "adds one to all": zeros_hunt.adds_one_to_all,
            "does not wrap": zeros_hunt.not_wrapped,
        },
    ),
    "nibble_order": Catches(
        (order_hunt.random_matrices, order_hunt.one_zero_at_a_time),
        COMMON
        | {
            "has zero points of 8": (order_hunt.zeros_all_8, "it passes, and should fail: repeat"),
            "has equal codes": (order_hunt.codes_all_alike, "reads the codes in plain order"),
            "has equal scales": (order_hunt.scales_all_alike, "reorders the scales too"),
            "has one group": (order_hunt.one_group, "the first group's zero points"),
            "has groups of one row": (order_hunt.groups_of_one_row, "row by row"),
            "has one word per row": (order_hunt.one_word, "the first word's zero points"),
            "looks at the ends of a word": (
                order_hunt.ends_of_a_word,
                "it passes, and should fail",
            ),
            "expects a plain order": (
                order_hunt.wants_plain_order,
                "should pass on the mended one",
            ),
        },
        (order_hunt.by_numpy, order_hunt.by_place, *nibble_order.HUNT.right.values()),
        {
            "unchanged": nibble_order.read_awq,
            "reads all in plain order": order_hunt.plain_order,
            "applies the order instead of undoing it": order_hunt.order_the_wrong_way,
            "takes 8 for every zero point": order_hunt.zeros_of_8,
            "reorders the scales": order_hunt.reordered_scales,
            "takes whole bytes for zero points": order_hunt.whole_bytes,
        },
    ),
    "seen_text": Catches(
        (split_hunt.many_sizes, split_hunt.a_text_with_ample_space),
        COMMON
        | {
            "compares starts": (split_hunt.starts_only, "it passes, and should fail: repeat"),
            "tries one seed": (split_hunt.one_seed, "begin later only"),
            "has one test window": (split_hunt.one_test_window, "begin earlier only"),
            "looks for overlaps only": (
                split_hunt.overlap_only,
                "returns fewer calibration windows",
            ),
            "does not look at the end": (
                split_hunt.without_the_end,
                "goes past the end of the text",
            ),
            "expects its own test windows": (
                split_hunt.wants_a_sorted_test,
                "should pass on one that tests on the end",
            ),
            "forbids overlaps in the calibration": (
                split_hunt.wants_apart,
                "should pass on the mended one",
            ),
        },
        (
            split_hunt.tests_the_front,
            split_hunt.drawn_again,
            *seen_text.HUNT.right.values(),
        ),
        {
            "unchanged": seen_text.split_text,
            "compares first tokens only": split_hunt.last_token_forgotten,
            "leaves windows out": split_hunt.fewer_windows,
            "goes past the end": split_hunt.past_the_end,
            "tests on other windows with each seed": split_hunt.tests_by_seed,
            "ignores the seed": split_hunt.same_for_every_seed,
        },
    ),
    "first_draft": Catches(
        (draft_hunt.every_place_wrong_once, draft_hunt.random_drafts),
        COMMON
        | {
            "has a proposer that is always right": (
                draft_hunt.right_drafts_only,
                "it passes, and should fail: repeat",
            ),
            "has a proposer that is always wrong": (
                draft_hunt.wrong_drafts_only,
                "does not verify the last draft",
            ),
            "has drafts of one token": (
                draft_hunt.single_drafts,
                "accepts all drafts if the first",
            ),
            "looks at the first tokens only": (
                draft_hunt.beginnings_only,
                "returns more tokens than were asked for",
            ),
            "counts tokens only": (draft_hunt.lengths_only, "it passes, and should fail: repeat"),
            "expects a token after right drafts": (
                draft_hunt.wants_one_step_for_all,
                "should pass on one that takes no further token",
            ),
            "expects what it was given": (
                draft_hunt.wants_the_drafts,
                "should pass on the mended one",
            ),
        },
        (draft_hunt.by_index, draft_hunt.one_row_more, *hunt_36.HUNT.right.values()),
        {
            "unchanged": hunt_36.speculate,
            "ignores all drafts": draft_hunt.ignores_drafts,
            "asks the model for each draft": draft_hunt.one_step_per_draft,
            "takes the token after the first draft": draft_hunt.wrong_row,
            "drops the first draft": draft_hunt.without_the_first,
            "verifies the first draft alone": draft_hunt.first_alone,
        },
    ),
    "agreed_blocks": Catches(
        (rank_hunt.least_of_all, rank_hunt.agrees_and_fits),
        COMMON
        | {
            "ranks are equal": (rank_hunt.ranks_alike, "it passes, and should fail"),
            "checks only that ranks agree": (rank_hunt.only_agreement, "takes what fits rank 0"),
            "rank 0 is the small one": (rank_hunt.only_rank_0_is_small, "takes what fits rank 0"),
            "has two ranks only": (rank_hunt.two_ranks_only, "first two ranks only"),
            "looks at answers of equal ranks": (
                rank_hunt.only_answers,
                "it passes, and should fail",
            ),
            "expects own numbers": (rank_hunt.wants_own_numbers, "should pass on the mended one"),
        },
        (hunt_41.HUNT.mended, *hunt_41.HUNT.right.values()),
        {
            "unchanged": hunt_41.agreed_blocks,
            "wastes memory": rank_hunt.least_and_most,
            "one fewer than fit": rank_hunt.one_fewer,
            "only rank 0 asks": rank_hunt.only_rank_0_asks,
            "none at all": rank_hunt.none_at_all,
        },
    ),
    "reused_buffer": Catches(
        (buffer_hunt.late_and_open, buffer_hunt.every_lateness, buffer_hunt.own_link),
        COMMON
        | {
            "reads at once": (buffer_hunt.early_link_only, "it passes, and should fail: repeat"),
            "has one micro-batch": (
                buffer_hunt.one_batch_only,
                "it passes, and should fail: repeat",
            ),
            "looks at results only": (buffer_hunt.results_only, "waits for each result at once"),
            "has two micro-batches": (buffer_hunt.two_batches_only, "two arrays, and waits for"),
            "does not look at the last": (
                buffer_hunt.without_the_last,
                "returns before the last result",
            ),
            "wants one on its way": (buffer_hunt.wants_one_open, "should pass on"),
            "expects what it was given": (
                buffer_hunt.wants_equal_results,
                "it passes, and should fail: repeat",
            ),
        },
        (buffer_hunt.by_copying, buffer_hunt.by_a_second_array, *hunt_42.HUNT.right.values()),
        {
            "unchanged": hunt_42.run_stage,
            "waits before computing": buffer_hunt.waits_before_computing,
            "never waits": buffer_hunt.never_waits,
            "copies the first result only": buffer_hunt.copies_the_first,
            "sends in reverse": buffer_hunt.sends_in_reverse,
            "sends all at the end": buffer_hunt.sends_at_the_end,
        },
    ),
    "object_pattern": Catches(
        (blank_hunt.by_runs, blank_hunt.by_the_longest_match),
        COMMON
        | {
            "tries the middle only": (blank_hunt.after_the_colon_only, "after the opening brace"),
            "tries spaces only": (blank_hunt.spaces_only, "any number of line ends"),
            "forgets that texts must match": (blank_hunt.only_forbids, "no space after a comma"),
            "has one name only": (blank_hunt.one_name_only, "between a comma and the next name"),
            "forbids every blank": (blank_hunt.forbids_all, "should pass on the mended one"),
            "wants one regex": (blank_hunt.wants_one_regex, "should pass on one with up to 16"),
        },
        (hunt_53.HUNT.mended, *hunt_53.HUNT.right.values()),
        {
            "unchanged": hunt_53.object_pattern,
            "forbids long numbers": blank_hunt.short_numbers,
            "17 blanks": blank_hunt.seventeen,
            "names as regexes": blank_hunt.raw_names,
            "none at all": blank_hunt.none_at_all,
        },
    ),
}
