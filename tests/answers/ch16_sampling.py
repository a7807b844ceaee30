"""Answers to the exercises of chapter 16."""

import math
from collections.abc import Callable
from typing import Any

import torch

from tests.answers import Answers


def top_p_by_sorting(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Right, and not as the package does it."""
    probabilities, ids = logits.double().softmax(-1).sort(descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities
    kept = before < top_p.unsqueeze(-1) - 1e-9
    kept[:, 0] = True
    mask = torch.zeros_like(kept).scatter(-1, ids, kept)
    return logits.masked_fill(~mask, -math.inf)


def top_p_by_rows(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Right, and slow."""
    out = torch.full_like(logits, -math.inf)
    for row in range(len(logits)):
        probabilities = logits[row].double().softmax(-1).tolist()
        mass = 0.0
        for token in sorted(range(len(probabilities)), key=lambda each: -probabilities[each]):
            out[row, token] = logits[row, token]
            mass += probabilities[token]
            if mass >= float(top_p[row]) - 1e-9:
                break
    return out


def wrong_top_p(name: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def part(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        descending = name != "ascending"
        probabilities = logits.double().softmax(-1)
        if name == "softmax over rows":
            probabilities = logits.double().softmax(0)
        ordered, ids = probabilities.sort(descending=descending, stable=True)
        mass = ordered.cumsum(-1)
        limit = top_p.unsqueeze(-1)
        if name == "rows mixed":
            limit = top_p[0]
        kept = (mass - ordered) < limit - 1e-9
        if name == "without the one that crosses":
            kept = mass < limit
        if name == "one too many":
            kept = kept.roll(1, -1)
            kept[:, 0] = True
        if name == "one more than reaches":
            kept = (mass - ordered) <= limit + 1e-9
        if name == "not brought back":
            return logits.masked_fill(~kept, -math.inf)
        mask = torch.zeros_like(kept).scatter(-1, ids, kept)
        if name == "last of equals":
            mask = torch.zeros_like(kept).scatter(-1, ids.flip(-1), kept)
        if name == "zeros for dropped":
            return logits.masked_fill(~mask, 0.0)
        if name == "probabilities":
            return probabilities.float().masked_fill(~mask, -math.inf)
        if name == "in place":
            return logits.masked_fill_(~mask, -math.inf)
        if name == "one row":
            return logits.masked_fill(~mask, -math.inf)[0]
        return logits.masked_fill(~mask, -math.inf)

    return part


WRONG_TOP_P = [
    *("ascending", "softmax over rows", "rows mixed", "without the one that crosses"),
    *("one too many", "one more than reaches", "not brought back", "last of equals"),
    *("zeros for dropped", "probabilities", "in place", "one row"),
]


def penalties_written_out(
    logits: torch.Tensor,
    in_prompt: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Right, and one number at a time."""
    out = logits.clone()
    for row in range(len(logits)):
        for token in range(logits.shape[1]):
            count = float(output_counts[row, token])
            if count or in_prompt[row, token]:
                value, factor = float(out[row, token]), float(repetition[row])
                out[row, token] = value / factor if value > 0 else value * factor
            out[row, token] -= count * float(frequency[row]) + (count > 0) * float(presence[row])
    return out


def wrong_penalties(name: str) -> Callable[..., torch.Tensor]:
    def part(logits: Any, in_prompt: Any, counts: Any, *given: Any) -> Any:
        repetition, presence, frequency = (each.unsqueeze(-1) for each in given)
        was_there = in_prompt | (counts > 0)
        if name == "output only":
            was_there = counts > 0
        if name == "prompt only":
            was_there = in_prompt
        if name == "everywhere":
            was_there = torch.ones_like(in_prompt)
        if name == "rows mixed":
            repetition = repetition[:1]
        factor = torch.where(was_there, repetition, 1.0)
        divided = torch.where(logits > 0, logits / factor, logits * factor)
        if name == "divides negatives":
            divided = logits / factor
        if name == "multiplies":
            divided = torch.where(logits > 0, logits * factor, logits / factor)
        present = was_there if name == "presence in prompt" else counts > 0
        if name == "presence counted":
            present = counts
        often = (counts > 0) if name == "frequency once" else counts
        taken = frequency * often + presence * present
        if name == "added":
            return divided + taken
        if name == "repetition last":
            late = logits - taken
            return torch.where(late > 0, late / factor, late * factor)
        return divided - taken

    return part


WRONG_PENALTIES = [
    *("output only", "prompt only", "everywhere", "rows mixed", "divides negatives"),
    *("multiplies", "presence in prompt", "presence counted", "frequency once", "added"),
    "repetition last",
]


ANSWERS = {
    "keep_top_p": Answers(
        right=(top_p_by_sorting, top_p_by_rows, wrong_top_p("nothing")),
        wrong={name: wrong_top_p(name) for name in WRONG_TOP_P},
        equivalent={
            "2 -> 3": "only leaves out fewer tokens before sorting",
            "probabilities >= floor -> probabilities > floor": "a token at the floor is not needed",
        },
    ),
    "apply_penalties": Answers(
        right=(penalties_written_out, wrong_penalties("nothing")),
        wrong={name: wrong_penalties(name) for name in WRONG_PENALTIES},
        equivalent={"logits > 0 -> logits >= 0": "a logit of 0 stays 0 either way"},
    ),
}
