"""Sampling in one pass over a row's logits: the most likely token, or a random draw.

A draw needs no softmax: the argmax of logits / temperature + Gumbel noise is distributed as the
softmax's probabilities (the Gumbel-max trick, Gumbel 1954). Source of the hash: Wellons 2018,
lowbias32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
_MASK = 2**32 - 1


@triton.jit
def _mixed_bits(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def choose_kernel(
    logits_ptr, temperatures_ptr, seeds_ptr, tokens_ptr, vocab, row_stride, BLOCK: tl.constexpr
):
    """One program per row: each lane tracks its own maximum, and the lanes are reduced once.

    It reads 4 bytes per token and writes one number, while softmax, cumulative sum and search read
    the row four times and write it twice. A temperature of 0 is greedy. It writes -1 if a number is
    NaN or +infinity, or if none is finite.
    """
    row = tl.program_id(0)
    temperature = tl.load(temperatures_ptr + row)
    seed = tl.load(seeds_ptr + row).to(tl.uint32)
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_at = tl.zeros((BLOCK,), tl.int32)
    num_broken = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        columns = start + lanes
        logits_ptrs = logits_ptr + row.to(tl.int64) * row_stride + columns
        score = tl.load(logits_ptrs, mask=columns < vocab, other=float("-inf")).to(tl.float32)
        num_broken += ((score != score) | (score == float("inf"))).to(tl.int32)
        if temperature > 0:
            bits = _mixed_bits(_mixed_bits(columns.to(tl.uint32)) ^ seed)
            uniform = ((bits >> 9).to(tl.float32) + 0.5) * (2.0**-23)
            score = score / temperature - tl.log(-tl.log(uniform))
        better = score > best
        best = tl.where(better, score, best)
        best_at = tl.where(better, columns, best_at)
    largest = tl.max(best, axis=0)
    token = tl.min(tl.where(best == largest, best_at, vocab), axis=0)
    whole = (tl.sum(num_broken, axis=0) == 0) & (largest > float("-inf"))
    tl.store(tokens_ptr + row, tl.where(whole, token, -1).to(tl.int64))


def choose_triton(logits: Tensor, temperatures: Tensor, seeds: Tensor) -> Tensor:
    """Return a token per row, int64; -1 if a row holds NaN or +infinity, or no finite number.

    A row is greedy if its temperature (float32) is 0; among equal maxima the first token is chosen.
    `seeds`, int64 from 0 to 2^32 - 1, determine the random draws.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    choose_kernel[(len(logits),)](
        logits,
        temperatures,
        seeds,
        tokens,
        logits.shape[1],
        logits.stride(0),
        BLOCK=BLOCK,
        num_warps=16,
    )
    return tokens


def choose_torch(logits: Tensor, temperatures: Tensor, seeds: Tensor) -> Tensor:
    """Compute `choose_triton` in plain PyTorch, with the same noise."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    bits = _mixed_bits_torch(_mixed_bits_torch(columns) ^ seeds.unsqueeze(-1))
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    warm = temperatures.unsqueeze(-1)
    noisy = logits.float() / warm.where(warm > 0, 1) - (-uniform.log()).log()
    scores = torch.where(warm > 0, noisy, logits.float())
    largest, tokens = scores.max(dim=-1)
    whole = ~(logits.isnan() | (logits == torch.inf)).any(dim=-1) & (largest > -torch.inf)
    first = (scores == largest.unsqueeze(-1)).int().argmax(dim=-1)
    return torch.where(whole, torch.where(warm.squeeze(-1) > 0, tokens, first), -1)


def _mixed_bits_torch(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
