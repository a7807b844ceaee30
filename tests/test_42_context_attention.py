"""Attention over parts of the keys: the merge, the ring and the split cache, to derived bounds.

An output is a mean of values, so errors are stated as shares of the largest value. With u = eps/2,
scores of d products are wrong by at most s = u (d + 2) S, where S is the largest sum of |q| |k|
over sqrt(d). Over m keys, an output is then wrong by at most s + u (2 m + 2 ln(m) + 3): all weights
are wrong by s, the rounding of their exponents adds 2 ln(m) (the entropy of the weights), `exp` and
the quotient 3, and the sums of m terms 2 m. A log-sum-exp is wrong by at most
s + u (m + 3 ln(m) + 4 + L), where L is the largest log-sum-exp, which moves an output by as much.
`merge_bound` has the rest.
"""

import math
from decimal import Decimal, localcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from minigen.model.attention import attention
from minigen.model.partial_attention import PartialAttention, attend_part, merge, merge_bound
from minigen.parallel.comm import (
    Comm,
    MessageCounters,
    SoloComm,
    ThreadComm,
    TracedComm,
    run_ranks,
)
from minigen.parallel.context import (
    Parts,
    most_rows,
    plain_parts,
    prompt_tiles,
    ring_attention,
    split_attention,
    work_by_turn,
    zigzag_parts,
)
from minigen.trace.events import Trace
from minigen.trace.timeline import Timeline
from minigen_course.ch32_flash_attention import flash

HEAD_DIM = 16
DTYPES = [torch.float32, torch.float64]
DIVISIONS = {"plain": plain_parts, "zig-zag": zigzag_parts}


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    own = torch.Generator().manual_seed(seed)  # ranks are threads, which would share torch's
    return torch.randn(*shape, generator=own, dtype=torch.float64).to(dtype)


def qkv_of(
    num_tokens: int, q_heads: int, kv_heads: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    q = 3 * numbers(num_tokens, q_heads, HEAD_DIM, seed=1, dtype=dtype)  # some sharp weights
    k, v = (numbers(num_tokens, kv_heads, HEAD_DIM, seed=seed, dtype=dtype) for seed in (2, 3))
    return q, k, v


def in_thirds(q: Tensor, k: Tensor, v: Tensor) -> list[PartialAttention]:
    ends = [0, len(k) // 3, 2 * len(k) // 3, len(k)]
    return [attend_part(q, k[a:b], v[a:b]) for a, b in pairwise(ends)]


def largest_sum(part: PartialAttention) -> float:
    return float(part.log_sum_exp.abs().max())


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_parts_merge_into_attention_over_all_keys(kv_heads: int) -> None:
    q, k, v = qkv_of(30, 6, kv_heads)
    merged = merge(in_thirds(q[-1:], k, v))
    torch.testing.assert_close(merged.output, attention(q[-1:], k, v))
    scores = attend_part(q[-1:], k, v)
    torch.testing.assert_close(merged.log_sum_exp, scores.log_sum_exp)


def test_the_merge_gives_what_sums_of_weights_give() -> None:
    """The other form of the same merge keeps sums instead of a mean: the largest score, the sum."""
    q, k, v = qkv_of(30, 6, 2)
    seen = torch.ones(30, 10, dtype=torch.bool)
    one, other = (flash.attend_tile(q, k[a : a + 10], v[a : a + 10], seen) for a in (0, 10))
    both = flash.merge(one, other)
    merged = merge([attend_part(q, k[:10], v[:10]), attend_part(q, k[10:20], v[10:20])])
    torch.testing.assert_close(merged.output, both.mixed / both.total.unsqueeze(-1))
    torch.testing.assert_close(merged.log_sum_exp, both.maximum + both.total.log())


def test_a_part_that_no_key_is_in_adds_nothing() -> None:
    q, k, v = qkv_of(8, 6, 2)
    hidden = torch.zeros(8, 8, dtype=torch.bool)
    whole, nothing = attend_part(q, k, v), attend_part(q, k, v, hidden)
    for empty in (nothing, attend_part(q, k[:0], v[:0])):
        assert torch.equal(empty.output, torch.zeros_like(q))
        assert bool((empty.log_sum_exp == -math.inf).all())
    for parts in ([whole, nothing], [nothing, whole]):
        assert torch.equal(merge(parts).output, whole.output)
        assert torch.equal(merge(parts).log_sum_exp, whole.log_sum_exp)
    both = merge([nothing, nothing])
    assert torch.equal(both.output, nothing.output)
    assert torch.equal(both.log_sum_exp, nothing.log_sum_exp)


def test_many_queries_in_turns_are_those_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv_of(21, 6, 2)
    mask = torch.ones(21, 21, dtype=torch.bool).tril()
    at_once = attend_part(q, k, v, mask)
    monkeypatch.setattr("minigen.model.partial_attention._MOST_SCORES", 4 * 6 * 21)
    in_turns = attend_part(q, k, v, mask)
    torch.testing.assert_close(in_turns.output, at_once.output)
    torch.testing.assert_close(in_turns.log_sum_exp, at_once.log_sum_exp)


def test_scores_of_any_size_merge_without_overflow() -> None:
    q, k, v = qkv_of(12, 6, 2, torch.float64)
    merged = merge(in_thirds(1000 * q, k, v))
    assert bool(merged.output.isfinite().all())
    torch.testing.assert_close(merged.output, attend_part(1000 * q, k, v).output)


def one_by_one(parts: list[PartialAttention]) -> PartialAttention:
    so_far = parts[0]
    for part in parts[1:]:
        so_far = merge([so_far, part])
    return so_far


@pytest.mark.parametrize("num_parts", [2, 3, 8])
@pytest.mark.parametrize("at_once", [True, False])
def test_merges_in_float32_are_within_their_bound(num_parts: int, at_once: bool) -> None:
    parts = [
        PartialAttention(numbers(500, 4, HEAD_DIM, seed=part), 9 * numbers(500, 4, seed=50 + part))
        for part in range(num_parts)
    ]
    exact = merge([PartialAttention(p.output.double(), p.log_sum_exp.double()) for p in parts])
    found = merge(parts) if at_once else one_by_one(parts)
    shape = (num_parts, 1) if at_once else (2, num_parts - 1)
    largest = max(largest_sum(part) for part in [*parts, exact])
    bound = merge_bound(*shape, largest, torch.finfo(torch.float32).eps)
    error = float((found.output.double() - exact.output).abs().max())
    assert 0 < error <= bound * max(float(part.output.abs().max()) for part in parts)


@pytest.mark.parametrize("at_once", [True, False])
def test_merges_in_float64_are_within_their_bound_of_50_digits(at_once: bool) -> None:
    outputs, sums = numbers(5, 9, seed=1).double(), 9 * numbers(5, 9, seed=2).double()
    parts = [
        PartialAttention(output.reshape(9, 1, 1), own.reshape(9, 1))
        for output, own in zip(outputs, sums, strict=True)
    ]
    found = merge(parts) if at_once else one_by_one(parts)
    shape = (5, 1) if at_once else (2, 4)
    bound = merge_bound(*shape, float(sums.abs().max()) + 2, torch.finfo(torch.float64).eps)
    with localcontext(prec=50):
        for query in range(9):
            weights = [Decimal(x).exp() for x in sums[:, query].tolist()]
            terms = zip(weights, outputs[:, query].tolist(), strict=True)
            exact = sum((weight * Decimal(x) for weight, x in terms), Decimal()) / sum(weights)
            error = abs(Decimal(found.output[query].item()) - exact)
            assert error <= Decimal(bound * float(outputs.abs().max()))


def bound_of(q: Tensor, k: Tensor, v: Tensor, num_merges: int) -> float:
    """Return how far the ring may be from one process (this file's docstring)."""
    u, context = torch.finfo(q.dtype).eps / 2, len(k)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    sizes = torch.einsum("qhd,khd->hqk", q.abs(), k.abs()) / math.sqrt(HEAD_DIM)
    scores = u * (HEAD_DIM + 2) * float(sizes.max())
    signed = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(HEAD_DIM)
    largest = float(signed.abs().max()) + math.log(context)
    of_output = scores + u * (2 * context + 2 * math.log(context) + 3)
    of_sum = scores + u * (context + 3 * math.log(context) + 4 + largest)
    merges = merge_bound(2, num_merges, largest, 2 * u)
    return float(v.abs().max()) * (2 * of_output + of_sum + merges)


def over_ring(parts: Parts, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Return the ring's attention, in the order of the prompt's tokens."""
    num_rows, places = most_rows(parts), [torch.cat([*map(torch.tensor, p)]) for p in parts]

    def work(comm: ThreadComm) -> Tensor:
        own = places[comm.rank].long()
        padded = torch.cat([own, own.new_zeros(num_rows - len(own))])
        tiles = prompt_tiles(parts, comm.rank, window)
        return ring_attention(comm, q[padded], k[padded], v[padded], tiles)[: len(own)]

    found = torch.empty_like(q)
    for own, output in zip(places, run_ranks(len(parts), work), strict=True):
        found[own.long()] = output
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize(("num_tokens", "kv_heads"), [(48, 2), (37, 6), (11, 1)])
def test_a_ring_gives_the_attention_of_one_process_within_the_bound(
    num_tokens: int, kv_heads: int, division: str, num_ranks: int, dtype: torch.dtype
) -> None:
    q, k, v = qkv_of(num_tokens, 6, kv_heads, dtype)
    parts = DIVISIONS[division](num_tokens, num_ranks)
    error = (over_ring(parts, q, k, v) - attention(q, k, v)).abs().max()
    assert error <= bound_of(q, k, v, num_merges=3 * num_ranks)
    assert error < (1e-5 if dtype == torch.float32 else 1e-13)


@pytest.mark.parametrize("window", [1, 7, 40])
@pytest.mark.parametrize("division", DIVISIONS)
def test_a_ring_with_a_sliding_window_is_that_of_one_process(division: str, window: int) -> None:
    q, k, v = qkv_of(37, 6, 2)
    found = over_ring(DIVISIONS[division](37, 3), q, k, v, window)
    torch.testing.assert_close(found, attention(q, k, v, window))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_ranks_parts_of_a_cache_give_its_whole_attention_to_all_of_them(
    num_ranks: int,
) -> None:
    q, k, v = qkv_of(41, 6, 2)

    def work(comm: ThreadComm) -> Tensor:
        own = torch.arange(41) % num_ranks == comm.rank
        return split_attention(comm, attend_part(q[-1:], k[own], v[own]))

    everyones = run_ranks(num_ranks, work)
    assert all(torch.equal(each, everyones[0]) for each in everyones)
    error = (everyones[0] - attention(q[-1:], k, v)).abs().max()
    assert error <= bound_of(q[-1:], k, v, num_merges=num_ranks)


def test_a_rank_without_a_key_of_a_short_context_changes_nothing() -> None:
    q, k, v = qkv_of(2, 6, 2)

    def work(comm: ThreadComm) -> Tensor:
        own = slice(comm.rank, comm.rank + 1) if comm.rank < 2 else slice(0, 0)
        return split_attention(comm, attend_part(q[-1:], k[own], v[own]))

    torch.testing.assert_close(run_ranks(4, work)[3], attention(q[-1:], k, v))


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_zig_zag_parts_have_equal_work_in_every_turn_and_plain_parts_do_not(
    num_ranks: int,
) -> None:
    chunk = 5
    num_tokens = 2 * num_ranks * chunk
    zigzag = work_by_turn(zigzag_parts(num_tokens, num_ranks))
    assert zigzag[0] == [2 * chunk**2 + chunk] * num_ranks
    assert zigzag[1:] == [[2 * chunk**2] * num_ranks] * (num_ranks - 1)
    plain = work_by_turn(plain_parts(num_tokens, num_ranks))
    run = 2 * chunk
    assert plain[0] == [run * (run + 1) // 2] * num_ranks
    for turn in range(1, num_ranks):
        assert plain[turn] == [0] * turn + [run**2] * (num_ranks - turn)
    for work in (zigzag, plain):
        assert sum(map(sum, work)) == num_tokens * (num_tokens + 1) // 2
    longest = [sum(map(max, work)) for work in (plain, zigzag)]
    in_squares = [(2 * num_ranks - 1) * run**2 / 2, num_ranks * run**2 / 2]
    assert [longest[0] - run / 2, longest[1] - chunk] == in_squares


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("num_tokens", [1, 7, 61, 100])
def test_parts_of_any_length_have_each_token_once_and_near_equal_work(
    num_tokens: int, num_ranks: int
) -> None:
    for divide in DIVISIONS.values():
        parts = divide(num_tokens, num_ranks)
        each = sorted(token for part in parts for run in part for token in run)
        assert each == list(range(num_tokens))
        work = work_by_turn(parts)
        assert sum(map(sum, work)) == num_tokens * (num_tokens + 1) // 2
    most = -(-num_tokens // (2 * num_ranks))  # tokens of a chunk
    for turn in work_by_turn(zigzag_parts(num_tokens, num_ranks)):
        assert max(turn) - min(turn) <= 4 * most + 1


def counted(comm: Comm, work: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Return the number and the bytes of the messages that `work(comm)` sends."""
    trace, counters = Trace(), MessageCounters()
    with trace.subscribed(Timeline(on_message=counters)):
        work(TracedComm(comm, trace))
    return counters.num_messages, counters.num_bytes


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_messages_and_bytes_are_those_of_the_formulas(num_ranks: int) -> None:
    q, k, v = qkv_of(37, 6, 2)
    parts = zigzag_parts(37, num_ranks)
    rows = most_rows(parts)

    def ring(comm: Comm) -> None:
        ring_attention(comm, q[:rows], k[:rows], v[:rows], prompt_tiles(parts, comm.rank))

    def split(comm: Comm) -> None:
        split_attention(comm, attend_part(q[:5], k, v))

    for number, size in run_ranks(num_ranks, lambda comm: counted(comm, ring)):
        shifts = num_ranks - 1
        assert number == ({"shifted": shifts} if shifts else {})
        assert sum(size.values()) == shifts * 2 * rows * 2 * HEAD_DIM * 4
    for number, size in run_ranks(num_ranks, lambda comm: counted(comm, split)):
        assert number == {"all_gathered": 1}
        assert size == {"all_gathered": 5 * 6 * (HEAD_DIM + 1) * 4}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_shift_gives_each_rank_the_tensor_of_the_one_before(num_ranks: int) -> None:
    def work(comm: ThreadComm) -> list[int]:
        x, seen = torch.tensor([comm.rank]), []
        for _ in range(num_ranks):
            x = comm.shift(x)
            seen.append(int(x))
        return seen

    for rank, seen in enumerate(run_ranks(num_ranks, work)):
        assert seen == [(rank - turn) % num_ranks for turn in range(1, num_ranks + 1)]
    assert SoloComm().shift(torch.tensor([7])).tolist() == [7]
