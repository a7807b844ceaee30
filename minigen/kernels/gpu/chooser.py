"""The sampling kernel for the engine; what it does not know is chosen on the CPU."""

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from minigen.kernels.gpu.attend import sent
from minigen.kernels.gpu.choose import choose_triton
from minigen.params import SamplingParams
from minigen.sampling import choose_tokens, uniform_draws
from minigen.sequence import Sequence


def choose_on_device(logits: Tensor, sequences: SequenceOf[Sequence]) -> list[int]:
    """A token for each row; -1 where its logits are not finite.

    Rows that want the likeliest token or a plain draw take one pass on the device. Where one row
    wants more (top-k, penalties, bans, ...), all go to the CPU.
    """
    if not all(_is_plain(each.params) for each in sequences):
        return choose_tokens(logits.cpu(), sequences)
    if all(each.params.greedy for each in sequences):
        temperatures = torch.zeros(len(sequences), device=logits.device)
        seeds = torch.zeros(len(sequences), dtype=torch.int64, device=logits.device)
    else:
        wanted = [float(each.params.temperature) for each in sequences]  # some say 1
        temperatures = sent(torch.tensor(wanted), logits.device)
        seeds = sent(_seeds(sequences), logits.device)
    found: list[int] = choose_triton(logits, temperatures, seeds).tolist()
    return found


def _seeds(sequences: SequenceOf[Sequence]) -> Tensor:
    """A number from 0 to 2^32 - 1 for each sequence's next draw."""
    uniform = uniform_draws(
        [sequence.seed for sequence in sequences],
        [sequence.choice for sequence in sequences],
        [len(sequence.output_ids) for sequence in sequences],
    )
    return (uniform * 2**32).long()


def _is_plain(params: SamplingParams) -> bool:
    if params.greedy:
        return params.plainly_greedy
    changed = params.min_tokens > 0 or params.has_penalties or len(params.logit_bias) > 0
    cut = params.top_k is not None or params.top_p < 1 or params.min_p > 0
    return not changed and not cut
