"""The sampling kernel for the engine; what it does not know is chosen on the CPU."""

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

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
    temperatures = torch.tensor([each.params.temperature for each in sequences])
    uniform = uniform_draws(
        [sequence.seed for sequence in sequences],
        [sequence.choice for sequence in sequences],
        [len(sequence.output_ids) for sequence in sequences],
    )
    seeds = (uniform * 2**32).long().to(logits.device)
    found: list[int] = choose_triton(logits, temperatures.to(logits.device), seeds).tolist()
    return found


def _is_plain(params: SamplingParams) -> bool:
    changed = params.min_tokens > 0 or params.has_penalties or len(params.logit_bias) > 0
    cut = params.top_k is not None or params.top_p < 1 or params.min_p > 0
    return not changed and (params.greedy or not cut)
