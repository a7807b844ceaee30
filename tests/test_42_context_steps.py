"""Steps divided over ranks by tokens: any batch gives the logits of one rank, messages as counted.

The ranks are threads here; `test_42_context_processes.py` has them as processes.
"""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from minigen import LLM, SamplingParams
from minigen.parallel.context_runner import Slices
from minigen.sequence import Sequence
from tests.context_ranks import ThreadedRanks, over_threads
from tests.ranks import GREEDY, PROMPTS, answers, save_eight_heads
from tests.tiny import TINY_VOCAB, VARIANTS, save_model, save_tokenizer

SAMPLED = SamplingParams(seed=3, n=2, max_tokens=12, temperature=0.8, ignore_eos=True)
CROWDED: dict[str, Any] = {"num_blocks": 11, "block_size": 12, "max_num_seqs": 6}
LONG = "abcdefghij" * 6


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_eight_heads(tmp_path_factory.mktemp("context"))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])
def test_every_token_of_the_cache_is_on_one_rank_in_order(num_ranks: int) -> None:
    slices, table = Slices(12, num_ranks), torch.tensor([7, 3, 9])
    slots = table.repeat_interleave(12) * 12 + torch.arange(12).repeat(3)
    owners = torch.full((36,), -1)
    for rank in range(num_ranks):
        owned, own_slots = slices.local(slots, rank)
        assert bool((owners[owned] == -1).all())
        owners[owned] = rank
        in_table = table.repeat_interleave(slices.size) * slices.size
        in_table += torch.arange(slices.size).repeat(3)
        assert torch.equal(own_slots, in_table), "a rank's slots of a table, in its order"
        assert torch.equal(slices.positions(len(in_table), rank), owned)
    assert torch.equal(owners, torch.arange(36) // slices.size % num_ranks)
    for num_tokens in range(37):
        counts = torch.bincount(owners[:num_tokens], minlength=num_ranks)
        assert slices.most(num_tokens) == counts.max() == counts[0]
        assert counts.max() - counts.min() <= slices.size


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    "num_ranks", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4))]
)
def test_answers_are_those_of_one_rank_with_preemptions_and_shared_prefixes(
    directory: Path, num_ranks: int
) -> None:
    small = CROWDED | {"block_size": 12 if num_ranks == 3 else 4}
    alone = LLM.load(directory, weights="float32", **small)
    llm, _ = over_threads(directory, num_ranks, **small)
    with llm.count_work() as counted:
        for params in (GREEDY, SAMPLED):
            assert answers(llm, params) == answers(alone, params)
    assert counted.tokens_cached > 0
    assert counted.blocks_copied > 0
    assert counted.preemptions > 0 or num_ranks == 3


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_gives_the_logits_of_one_rank_also_in_windows(
    variant: str, tmp_path: Path
) -> None:
    save_model(tmp_path, variant, vocab_size=TINY_VOCAB)
    save_tokenizer(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=1, logprobs=1)
    options: dict[str, Any] = {"max_num_batched_tokens": 20, "max_num_seqs": 4}
    alone = LLM.load(tmp_path, weights="float32", **options)
    llm, _ = over_threads(tmp_path, 2, **options)
    prompts = [LONG, "abc", "xyz" * 7]
    pairs = zip(llm.generate(prompts, params), alone.generate(prompts, params), strict=True)
    for ours, theirs in pairs:
        assert ours.token_ids == theirs.token_ids
        found, expected = (
            [*(each.prompt_logprobs or []), *(each.logprobs or [])] for each in (ours, theirs)
        )
        assert len(expected) > 8
        for mine, other in zip(found[1:], expected[1:], strict=True):
            assert mine is not None
            for token, logprob in (other or {}).items():
                assert mine[token].logprob == pytest.approx(logprob.logprob, abs=1e-4)


def chunked_logits(llm: LLM, seed: int) -> list[torch.Tensor]:
    """Return the logits of random steps: whole prompts, parts of prompts, and single tokens."""
    rng, found = random.Random(seed), []
    runner = llm.engine.runner

    class Recording:
        def logits(self, chunks: Any) -> torch.Tensor:
            found.append(runner.logits(chunks).clone())
            return found[-1]

    llm.engine.runner = Recording()
    prompts = [
        [rng.randrange(3, 60) for _ in range(rng.choice([1, 2, 5, 9, 30, 70]))] for _ in range(12)
    ]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    llm.engine.runner = runner
    return found


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 5))]
)
def test_prompts_in_pieces_beside_other_sequences_have_the_logits_of_one_rank(
    directory: Path, num_ranks: int, seed: int
) -> None:
    options: dict[str, Any] = {"block_size": 12, "max_num_batched_tokens": 23, "max_num_seqs": 5}
    alone = LLM.load(directory, weights="float32", **options)
    llm, ranks = over_threads(directory, num_ranks, **options)
    found, expected = chunked_logits(llm, seed), chunked_logits(alone, seed)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, atol=1e-4, rtol=0)
    least = 2 * num_ranks
    lengths = [end - first for first, end in chunks_of(ranks)]
    assert any(length >= least for length in lengths), "some chunks were divided"
    assert any(length < least for length in lengths), "and some were not"


def chunks_of(ranks: ThreadedRanks) -> list[tuple[int, int]]:
    return [pair for step in ranks.steps for pair in pairwise(step.batch.query_starts)]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_messages_and_bytes_of_each_step_are_those_of_the_formulas(
    directory: Path, num_ranks: int
) -> None:
    options: dict[str, Any] = {"block_size": 12, "max_num_batched_tokens": 32, "max_num_seqs": 2}
    llm, ranks = over_threads(directory, num_ranks, enable_prefix_caching=False, **options)
    prompt = [5 + each % 50 for each in range(50)]  # steps of 32 and 18 tokens, then 3 of one
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    config = llm.config
    token = 2 * config.kv_heads * config.head_dim * 4  # bytes of a key and a value
    chunks, parts = [32, 18], 2 * num_ranks
    rows = [max_rows(chunk, parts) for chunk in chunks]
    slices = Slices(12, num_ranks)
    sent = rows[0] + rows[1] + slices.most(32)  # tokens of a message: the second has a context
    layers, shifts = config.num_layers, num_ranks - 1
    for counter in ranks.counters:
        assert counter.num_messages == {
            "shifted": layers * shifts * len(chunks),
            "all_gathered": layers * 3,
        }
        assert counter.num_bytes == {
            "shifted": layers * shifts * sent * token,
            "all_gathered": layers * 3 * config.q_heads * (config.head_dim + 1) * 4,
        }


def max_rows(num_tokens: int, num_chunks: int) -> int:
    ends = [num_tokens * chunk // num_chunks for chunk in range(num_chunks + 1)]
    sizes = [end - first for first, end in pairwise(ends)]
    pairs = zip(sizes, reversed(sizes), strict=True)
    return max(first + last for first, last in pairs)


def test_logits_of_a_prompts_middle_cost_one_sum(directory: Path) -> None:
    llm, ranks = over_threads(directory, 2)
    llm.generate("abcdefghij", SamplingParams(max_tokens=1))
    assert "all_reduced" not in ranks.counters[0].num_messages
    llm.generate("bcdefghijk", SamplingParams(max_tokens=1, prompt_logprobs=1))
    rows, hidden = 10, llm.config.hidden
    assert ranks.counters[0].num_messages["all_reduced"] == 1
    num_bytes = ranks.counters[0].num_bytes["all_reduced"]
    assert num_bytes % (hidden * 4) == 0
    assert num_bytes >= rows * hidden * 4


@pytest.mark.usefixtures("unchecked_shapes")
def test_verified_drafts_are_shared_or_divided_like_other_tokens(directory: Path) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 8, "adaptive": False}
    alone = LLM.load(directory, weights="float32")
    llm, _ = over_threads(directory, 2, speculative_config=speculative)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with llm.count_work() as counted:
        for prompt in PROMPTS[:3]:
            expected = alone.generate(prompt, params).token_ids
            assert llm.generate(prompt, params).token_ids == expected
    assert counted.tokens_drafted > 0


def tokens_of_200(llm: LLM) -> dict[int, tuple[list[int], str | None]]:
    """Run 200 requests, of which every seventh is aborted in a random step; return all tokens."""
    rng, params = random.Random(42), SamplingParams(temperature=0, max_tokens=8)
    beginnings = [[rng.randrange(3, 60) for _ in range(12)] for _ in range(10)]
    sequences = [
        Sequence(
            number,
            (*beginnings[number % 10], *(rng.randrange(3, 60) for _ in range(rng.randrange(1, 9)))),
            params,
            0,
            8,
            frozenset(),
        )
        for number in range(200)
    ]
    for sequence in sequences:
        llm.engine.add(sequence)
    doomed = set(range(0, 200, 7))
    while llm.engine.has_work():
        llm.engine.step()
        running = sorted(doomed & llm.engine.live.keys())
        if running and rng.random() < 0.5:
            llm.engine.abort(running[0])
            doomed.remove(running[0])
    return {each.sequence_id: (each.output_ids, each.finish_reason) for each in sequences}


@pytest.mark.long
@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_200_requests_with_preemptions_and_aborts_get_the_tokens_of_one_rank(
    directory: Path, num_ranks: int
) -> None:
    small: dict[str, Any] = {"block_size": 12, "num_blocks": 7, "max_num_seqs": 6}
    llm, _ = over_threads(directory, num_ranks, **small)
    with llm.count_work() as counted:
        found = tokens_of_200(llm)
    assert found == tokens_of_200(LLM.load(directory, weights="float32", **small))
    reasons = [reason for _, reason in found.values()]
    assert reasons.count("abort") > 5
    assert counted.preemptions > 5
    assert llm.manager.num_available == 7
