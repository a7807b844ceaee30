"""Answers to the exercises of chapter 16."""

import math
from collections.abc import Callable
from typing import Any

import torch

from minigen_course.ch16_sampling.lesson import by_hand
from tests.answers import Answers


def by_formula() -> dict[str, float]:
    """Right, and computed."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).double().log()
    warm = (logits / 0.5).softmax(-1)
    penalized = (logits - math.log(2) * torch.tensor([0, 2, 0, 0])).softmax(-1)
    return {
        "top_k for greedy": 1,
        "top_p without effect": 1.0,
        "min_p without effect": 0.0,
        "repetition_penalty without effect": 1.0,
        "A at temperature 1/2": float(warm[0]),
        "A at endless temperature": float((logits / 1e9).softmax(-1)[0]),
        "kept by top_p 0.9": 1 + int((logits.exp().cumsum(0) < 0.9).sum()),
        "kept by top_p 0.9 at temperature 1/2": 1 + int((warm.cumsum(0) < 0.9).sum()),
        "kept by min_p 0.2": int((logits.exp() >= 0.1).sum()),
        "B after frequency_penalty": float(penalized[1]),
    }


def by_hand_rounded() -> dict[str, float]:
    """Right, with two digits, in another order."""
    return dict(reversed([(name, float(f"{each:.3g}")) for name, each in by_hand().items()]))


def changed(name: str, value: Any) -> Callable[[], dict[str, Any]]:
    return lambda: by_hand() | {name: value}


WRONG_BY_HAND = {
    "top-k of 0": changed("top_k for greedy", 0),
    "top-p of 0": changed("top_p without effect", 0),
    "min-p of 1": changed("min_p without effect", 1),
    "a penalty of 0": changed("repetition_penalty without effect", 0),
    "temperature as a root": changed("A at temperature 1/2", 0.4),
    "not divided by the sum": changed("A at temperature 1/2", 0.25),
    "endless temperature keeps A": changed("A at endless temperature", 0.5),
    "without the one that crosses": changed("kept by top_p 0.9", 2),
    "top-p before temperature": changed("kept by top_p 0.9 at temperature 1/2", 3),
    "min-p of the probability itself": changed("kept by min_p 0.2", 2),
    "penalty once": changed("B after frequency_penalty", 0.15 / 0.85),
    "penalty without a new sum": changed("B after frequency_penalty", 0.075),
    "a name is missing": lambda: {"top_k for greedy": 1},
    "a list": lambda: list(by_hand().values()),
    "words": changed("kept by top_p 0.9", "three"),
}


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
        if name == "frequency of the first row":
            frequency = frequency[:1]
        factor = torch.where(was_there, repetition, 1.0)
        if name == "twice if in both":
            factor = factor * torch.where(in_prompt & (counts > 0), repetition, 1.0)
        if name == "repetition per occurrence":
            factor = torch.where(counts > 0, repetition**counts, factor)
        divided = torch.where(logits > 0, logits / factor, logits * factor)
        if name == "divides negatives":
            divided = logits / factor
        if name == "multiplies":
            divided = torch.where(logits > 0, logits * factor, logits / factor)
        present = was_there if name == "presence in prompt" else counts > 0
        if name == "presence counted":
            present = counts
        often = (counts > 0) if name == "frequency once" else counts
        if name == "frequency counts the prompt":
            often = counts + in_prompt
        taken = frequency * often + presence * present
        if name == "added":
            return divided + taken
        if name == "in place":
            return logits.copy_(divided - taken)
        if name == "repetition last":
            late = logits - taken
            return torch.where(late > 0, late / factor, late * factor)
        return divided - taken

    return part


WRONG_PENALTIES = [
    *("output only", "prompt only", "everywhere", "rows mixed", "divides negatives"),
    *("multiplies", "presence in prompt", "presence counted", "frequency once", "added"),
    *("repetition last", "in place", "frequency of the first row", "twice if in both"),
    *("repetition per occurrence", "frequency counts the prompt"),
]


def draw_by_loops(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Right, and one token at a time."""
    drawn = []
    for row, number in zip(logits.double().softmax(-1).tolist(), uniform.tolist(), strict=True):
        wanted, last = number * math.fsum(row), -1
        for token, share in enumerate(row):
            if share > 0:
                last = token
                if wanted < share:
                    break
                wanted -= share
        drawn.append(last)
    return torch.tensor(drawn)


def draw_by_comparing(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Right, without a search."""
    weights = (logits - logits.amax(-1, keepdim=True)).double().exp()
    passed = weights.cumsum(-1)
    return (passed <= uniform[:, None] * passed[:, -1:]).sum(-1)


def wrong_draw(name: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def part(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        probabilities = logits.softmax(0 if name == "softmax over rows" else -1)
        if name == "most likely":
            return probabilities.argmax(-1)
        if name == "multinomial":
            return torch.multinomial(probabilities, 1).squeeze(-1)
        if name == "sorted":
            probabilities = probabilities.sort(descending=True).values
        cumulated = probabilities.double().cumsum(-1)
        passed = uniform[:, None] * cumulated[:, -1:]
        if name == "total of 1 hoped for":
            cumulated = probabilities.cumsum(-1).double() * (1 - 1e-7)
            passed = uniform[:, None]
        if name == "the first row's number":
            passed = passed[:1].expand(len(logits), -1).contiguous()
        if name == "in place":
            logits.clamp_(min=-100)
        found = torch.searchsorted(cumulated, passed, right=name != "not exceeded")
        if name == "one too far":
            found = found + 1
        if name == "the token before":
            found = (found - 1).clamp(min=0)
        if name == "last token as a fallback":
            found = torch.where(passed > 0.99, logits.shape[-1] - 1, found)
        if name == "a column":
            return found
        if name == "int32":
            return found.squeeze(-1).int()
        if name == "turned round":
            return torch.searchsorted(cumulated, cumulated[:, -1:] - passed).squeeze(-1)
        return found.squeeze(-1)

    return part


WRONG_DRAWS = [
    *("softmax over rows", "most likely", "multinomial", "sorted", "total of 1 hoped for"),
    *("the first row's number", "in place", "not exceeded", "one too far", "the token before"),
    *("last token as a fallback", "a column", "int32", "turned round"),
]


ANSWERS = {
    "by_hand": Answers(
        right=(by_formula, by_hand_rounded),
        wrong=WRONG_BY_HAND,
        equivalent={},
    ),
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
    "draw": Answers(
        right=(draw_by_loops, draw_by_comparing, wrong_draw("nothing")),
        wrong={name: wrong_draw(name) for name in WRONG_DRAWS},
        equivalent={},
    ),
}
