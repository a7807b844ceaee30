"""Answers to the exercises of chapter 35."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.answers import Answers

# A scale and a zero point


def grid_by_tensors(weights: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Right, with tensors of one number."""
    low, high = weights.amin().clamp(max=0), weights.amax().clamp(min=0)
    scale = (high - low) / (2**bits - 1)
    scale = torch.where(scale > 0, scale, torch.ones(()))
    return scale, torch.round(-low / scale)


def grid_by_sorting(weights: Tensor, bits: int) -> list[Any]:
    """Right, with lists."""
    numbers = sorted([*weights.tolist(), 0.0])
    span = numbers[-1] - numbers[0]
    if not span:
        return [1.0, 0]
    scale = span / ((1 << bits) - 1)
    return [scale, round(abs(numbers[0]) / scale)]


def wrong_grid(name: str) -> Callable[[Tensor, int], Any]:
    def part(weights: Tensor, bits: int) -> Any:
        low, high = min(float(weights.min()), 0.0), max(float(weights.max()), 0.0)
        most = 2**bits - 1
        if name == "without 0 in the range":
            low, high = float(weights.min()), float(weights.max())
        if name == "0 is added below only":
            high = float(weights.max())
        if name == "0 is added above only":
            low = float(weights.min())
        if name == "as many steps as codes":
            most = 2**bits
        if name == "one step too few":
            most = 2**bits - 2
        if name == "the largest magnitude":
            low, high = -max(-low, high), max(-low, high)
        if low == high and name != "divides by 0":
            return (0.0, 0) if name == "a scale of 0" else (1.0, 0)
        scale = (high - low) / most if high > low else float("nan")
        if scale != scale:
            return scale, 0
        zero: Any = -low / scale
        if name == "a zero point that is not rounded":
            return scale, zero
        if name == "cut instead of rounded":
            return scale, int(zero)
        if name == "rounded up":
            return scale, -int(-zero // 1)
        if name == "the sign":
            return scale, round(-zero)
        if name == "one too many":
            return scale, round(zero) + 1
        if name == "one too few":
            return scale, round(zero) - 1
        if name == "the minimum itself":
            return scale, low
        if name == "the scale alone":
            return scale
        if name == "the wrong order":
            return round(zero), scale
        if name == "the way back":
            return 1 / scale, round(zero)
        return scale, round(zero)

    return part


WRONG_GRIDS = [
    *("without 0 in the range", "0 is added below only", "0 is added above only"),
    *("as many steps as codes", "one step too few", "the largest magnitude", "divides by 0"),
    *("a scale of 0", "a zero point that is not rounded", "cut instead of rounded", "rounded up"),
    *("the sign", "one too many", "one too few", "the minimum itself", "the scale alone"),
    *("the wrong order", "the way back"),
]

# Packing


def packed_by_pairs(codes: Tensor) -> Tensor:
    """Right, with one more code where the number is odd."""
    padded = torch.cat([codes, torch.zeros(len(codes) % 2, dtype=torch.uint8)])
    return (padded.view(-1, 2) * torch.tensor([1, 16], dtype=torch.uint8)).sum(1).to(torch.uint8)


def packed_by_loop(codes: Tensor) -> Tensor:
    """Right, in Python."""
    numbers = codes.tolist()
    found = [0] * ((len(numbers) + 1) // 2)
    for place, code in enumerate(numbers):
        found[place // 2] |= code << (4 * (place % 2))
    return torch.tensor(found, dtype=torch.uint8)


def wrong_packed(name: str) -> Callable[[Tensor], Any]:
    def part(codes: Tensor) -> Any:
        numbers = codes.tolist()
        half = len(numbers) // 2
        if name == "halves of the list":
            low, high = numbers[: len(numbers) - half], numbers[len(numbers) - half :]
        else:
            low, high = numbers[0::2], numbers[1::2]
        if name == "the last odd code is lost":
            low = low[: len(high)]
        shift = {"three bits": 3, "five bits": 5}.get(name, 4)
        pairs = [(each, high[place] if place < len(high) else 0) for place, each in enumerate(low)]
        if name == "the first code high":
            pairs = [(b, a) for a, b in pairs]
        if name == "an odd code high":
            pairs = [*pairs[: len(high)], *((0, a) for a, _ in pairs[len(high) :])]
        if name == "an odd code twice":
            pairs = [*pairs[: len(high)], *((a, a) for a, _ in pairs[len(high) :])]
        if name == "from the end":
            pairs = pairs[::-1]
        found = torch.tensor([(a | b << shift) & 255 for a, b in pairs], dtype=torch.uint8)
        if name == "low halves only":
            found &= 15
        if name == "changes the codes":
            codes.zero_()
        if name == "32 bits":
            return found.int()
        return found.tolist() if name == "a list" else found

    return part


WRONG_PACKED = [
    *("halves of the list", "the last odd code is lost", "three bits", "five bits"),
    *("the first code high", "an odd code high", "an odd code twice", "from the end"),
    *("low halves only", "changes the codes", "32 bits", "a list"),
]

# Groups


def groups_by_padding(weight: Tensor, bits: int, size: int) -> Tensor:
    """Right, with rows filled up by zeros."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % size)).view(rows, -1, size)
    most = 2 ** (bits - 1) - 1
    scales = padded.abs().amax(-1, keepdim=True) / most
    codes = torch.where(scales > 0, padded / scales, 0.0).round()
    return (codes.clamp(-most - 1, most) * scales).view(rows, -1)[:, :columns]


def groups_by_parts(weight: Tensor, bits: int, size: int) -> Tensor:
    """Right, with the parts of a split matrix."""
    most = 2 ** (bits - 1) - 1
    parts = []
    for part in weight.split(size, dim=1):
        scale = (part.abs().max(dim=1, keepdim=True).values / most).clamp(min=1e-30)
        parts.append(torch.round(part / scale).clamp(-most - 1, most) * scale)
    return torch.cat(parts, dim=1)


def groups_multiplied_first(weight: Tensor, bits: int, size: int) -> Tensor:
    """Right, with the product before the quotient, halves up, and a clamp that changes nothing."""
    most = 2 ** (bits - 1) - 1
    parts = []
    for group in weight.double().split(size, dim=1):
        largest = group.abs().amax(1, keepdim=True).clamp(min=1e-12)
        codes = (group * most / largest + 0.5).floor().clamp(-most, most)
        parts.append(codes * largest / most)
    return torch.cat(parts, dim=1).float()


def groups_over_rows(weight: Tensor, bits: int, size: int) -> Tensor:
    """Wrong: a group goes on in the next row."""
    return groups_by_padding(weight.reshape(1, -1), bits, size).view_as(weight)


def wrong_groups(name: str) -> Callable[[Tensor, int, int], Any]:
    def part(weight: Tensor, bits: int, size: int) -> Any:
        most = 2 ** (bits - 1) - 1
        rounded = weight.clone()
        columns = weight.shape[1]
        ends = range(0, columns, size)
        if name == "a last small group is left out":
            ends = range(0, columns - size + 1, size)
        for start in ends:
            group = weight[:, start : start + size]
            if name == "one scale for the matrix":
                scale = weight.abs().max().expand(len(weight), 1) / most
            elif name == "a scale per row":
                scale = weight.abs().amax(1, keepdim=True) / most
            elif name == "a scale per group of all rows":
                scale = group.abs().max().expand(len(weight), 1) / most
            elif name == "a scale per column":
                scale = group.abs().amax(0, keepdim=True) / most
            elif name == "the largest, not the largest magnitude":
                scale = group.amax(1, keepdim=True) / most
            else:
                scale = group.abs().amax(1, keepdim=True) / most
            if name == "as many steps as codes":
                scale = scale * most / (most + 1)
            if name == "unsigned":
                scale = scale * most / (2**bits - 1)
            if name != "divides by 0":
                scale = torch.where(scale > 0, scale, torch.ones_like(scale))
            codes = group / scale
            codes = codes.trunc() if name == "cut instead of rounded" else codes.round()
            if name == "the codes":
                scale = torch.ones_like(scale)
            codes = codes.clamp(-most - 1, most)
            rounded[:, start : start + size] = codes * scale
        if name == "changes the matrix":
            weight.copy_(rounded)
        return rounded.T if name == "transposed" else rounded

    return part


WRONG_GROUPS = [
    *("a last small group is left out", "one scale for the matrix", "a scale per row"),
    *("a scale per group of all rows", "a scale per column", "as many steps as codes"),
    *("the largest, not the largest magnitude", "unsigned", "divides by 0"),
    *("cut instead of rounded", "the codes", "changes the matrix", "transposed"),
]

# AWQ's search


def searched_by_hessian(weight: Tensor, x: Tensor, rounded: Any) -> float:
    """Right, with X^T X."""
    hessian, size = x.double().T @ x.double(), x.abs().mean(0)
    errors = []
    for step in range(20):
        factors = size.pow(step / 20)
        change = (rounded(weight * factors) / factors - weight).double()
        errors.append(float((change @ hessian * change).sum()))
    least = min(errors)
    return next(i for i, each in enumerate(errors) if each <= least * (1 + 1e-9)) / 20


def searched_by_min(weight: Tensor, x: Tensor, rounded: Any) -> float:
    """Right, with `min`."""

    def error(exponent: float) -> float:
        factors = x.abs().mean(0) ** exponent
        change = rounded(weight * factors) / factors - weight
        return float((x @ change.T).norm())

    return min((step / 20 for step in range(20)), key=error)


def searched_with_normalized_factors(weight: Tensor, x: Tensor, rounded: Any) -> Tensor:
    """Right, with factors around 1: a common factor changes no grid that follows the weights."""
    size, errors = x.abs().mean(0), []
    for step in range(20):
        factors = size ** (step / 20)
        factors = factors / (factors.max() * factors.min()).sqrt()
        change = rounded(weight * factors) / factors - weight
        errors.append((x @ change.T).square().mean())
    return torch.stack(errors).argmin() / 20


def wrong_search(name: str) -> Callable[[Tensor, Tensor, Any], Any]:
    def part(weight: Tensor, x: Tensor, rounded: Any) -> Any:
        size = x.abs().mean(0)
        if name == "the mean, not the mean magnitude":
            size = x.mean(0).abs()
        if name == "the largest magnitude":
            size = x.abs().amax(0)
        if name == "the weights' magnitudes":
            size = weight.abs().mean(0)
        if name == "one size for all":
            size = x.abs().mean().expand(x.shape[1])
        steps = range(1 if name == "never 0" else 0, 20)
        if name == "up to the half":
            steps = range(10)
        if name == "up to 1":
            steps = range(21)
        errors = {}
        for step in steps:
            factors = size ** (step / 20)
            if name == "divides instead":
                factors = 1 / factors
            change = rounded(weight * factors) / factors - weight
            if name == "factors are not undone":
                change = rounded(weight * factors) - weight
            if name == "factors for rows":
                change = rounded(weight * factors) - weight * factors
            error = float((x @ change.T).square().sum())
            if name == "the outputs themselves":
                error = float((x @ (change + weight).T).square().sum())
            if name == "magnitudes, not squares":
                error = float((x @ change.T).abs().sum())
            if name == "the first token only":
                error = float((x[0] @ change.T).square().sum())
            if name == "the mean over tokens first":
                error = float((x @ change.T).mean(0).square().sum())
            if name == "inputs without correlation":
                error = float((change.square() * x.square().mean(0)).sum())
            if name == "the error of the weights":
                error = float(change.square().sum())
            if name == "the largest error of an output":
                error = float((x @ change.T).abs().max())
            if name == "signs cancel":
                error = abs(float((x @ change.T).sum()))
            errors[step] = error
            if name == "stops when it grows" and error > errors.get(step - 1, error):
                break
        best = min(errors, key=lambda each: errors[each])
        if name == "the largest error":
            best = max(errors, key=lambda each: errors[each])
        if name == "the last of equals":
            least = min(errors.values())
            best = max(step for step, each in errors.items() if each == least)
        if name == "the error":
            return errors[best]
        if name == "the number of the step":
            return best
        return size ** (best / 20) if name == "the factors" else best / 20

    return part


WRONG_SEARCHES = [
    *("the mean, not the mean magnitude", "the weights' magnitudes", "one size for all"),
    *("the largest magnitude", "never 0", "up to the half", "divides instead"),
    *("factors are not undone", "factors for rows", "the error of the weights"),
    *("the largest error of an output", "signs cancel", "the largest error"),
    *("the last of equals", "the error", "the number of the step", "the factors", "up to 1"),
    *("the outputs themselves", "magnitudes, not squares", "the first token only"),
    *("the mean over tokens first", "inputs without correlation", "stops when it grows"),
]

# GPTQ's columns


def columns_by_loops(weight: Tensor, factor: Tensor, rounded: Any) -> Tensor:
    """Right, column by column."""
    columns = [weight[:, i].clone() for i in range(weight.shape[1])]
    for i, column in enumerate(columns):
        columns[i] = rounded(column, i)
        step = (column - columns[i]) / factor[i, i]
        for j in range(i + 1, len(columns)):
            columns[j] = columns[j] - step * factor[i, j]
    return torch.stack(columns, dim=1)


def columns_by_errors(weight: Tensor, factor: Tensor, rounded: Any) -> Tensor:
    """Right, with all errors so far kept, and applied when a column comes."""
    errors = torch.zeros_like(weight)
    found = torch.empty_like(weight)
    for i in range(weight.shape[1]):
        now = weight[:, i] - errors[:, :i] @ factor[:i, i]
        found[:, i] = rounded(now, i)
        errors[:, i] = (now - found[:, i]) / factor[i, i]
    return found


def columns_in_double(weight: Tensor, factor: Tensor, rounded: Any) -> Tensor:
    """Right, with a factor whose rows are divided by their diagonal first, and in float64."""
    unit = (factor / factor.diagonal()[:, None]).double()
    free = weight.double()
    for i in range(free.shape[1]):
        nearest = rounded(free[:, i].float(), i).double()
        free -= (free[:, i] - nearest)[:, None] * unit[i] * (torch.arange(len(unit)) >= i)
    return free.float()


def wrong_columns(name: str) -> Callable[[Tensor, Tensor, Any], Any]:
    def part(weight: Tensor, factor: Tensor, rounded: Any) -> Any:
        free = weight if name == "changes the matrix" else weight.clone()
        size = free.shape[1]
        order = range(size - 1, -1, -1) if name == "from right to left" else range(size)
        for i in order:
            column = weight[:, i] if name == "rounds what was there at first" else free[:, i]
            nearest = rounded(column.clone(), 0 if name == "the first column's grid" else i)
            error = (free[:, i] - nearest) / factor[i, i]
            if name == "not divided by the diagonal":
                error = free[:, i] - nearest
            if name == "divided by its square":
                error = (free[:, i] - nearest) / factor[i, i] ** 2
            if name == "spread evenly":
                free[:, i + 1 :] += (free[:, i] - nearest)[:, None] / max(size - i - 1, 1)
                free[:, i] = nearest
                continue
            if name == "the inverse instead of its factor":
                inverse = factor.T @ factor
                error = (free[:, i] - nearest) / inverse[i, i]
            if name == "the sign":
                error = -error
            if name == "the error of the original":
                error = (weight[:, i] - nearest) / factor[i, i]
            free[:, i] = nearest
            if name == "no error goes on":
                continue
            row = factor[:, i] if name == "a column of the factor" else factor[i]
            if name == "the inverse instead of its factor":
                row = inverse[i]
            last = i + 2 if name == "the next column only" else size
            if name == "itself, too":
                free[:, i:] -= torch.outer(error, row[i:])
            elif name == "one column too far":
                free[:, i + 2 :] -= torch.outer(error, row[i + 2 :])
            else:
                free[:, i + 1 : last] -= torch.outer(error, row[i + 1 : last])
        if name == "rounds all at the end again":
            return torch.stack([rounded(free[:, i] + 0.5, i) for i in range(size)], 1)
        return free.T if name == "transposed" else free

    return part


WRONG_COLUMNS = [
    *("changes the matrix", "from right to left", "rounds what was there at first"),
    *("the first column's grid", "not divided by the diagonal", "divided by its square"),
    *("the sign", "the error of the original", "no error goes on", "a column of the factor"),
    *("the next column only", "itself, too", "one column too far"),
    *("rounds all at the end again", "transposed", "spread evenly"),
    "the inverse instead of its factor",
]

# Bits


def bits_by_sorting(options: Any, max_bytes: int) -> dict[str, int]:
    """Right, with the steps of all matrices sorted again each time."""
    place = dict.fromkeys(options, 0)
    left = max_bytes - sum(own[0][1] for own in options.values())
    if left < 0:
        raise ValueError("too few bytes")
    while True:
        steps = []
        for name, own in options.items():
            at = place[name]
            if at + 1 < len(own):
                size, saved = own[at + 1][1] - own[at][1], own[at][2] - own[at + 1][2]
                if size <= left and saved > 0:
                    steps.append((saved / size, name, size))
        if not steps:
            return {name: own[place[name]][0] for name, own in options.items()}
        _, name, size = max(steps, key=lambda each: each[0])
        place[name] += 1
        left -= size


def _bits_sorted_once(in_order: bool) -> Callable[[Any, int], dict[str, int]]:
    """Go through the steps of all matrices once, those with the largest gain first."""

    def part(options: Any, max_bytes: int) -> dict[str, int]:
        place = dict.fromkeys(options, 0)
        left = max_bytes - sum(own[0][1] for own in options.values())
        if left < 0:
            raise ValueError("too few bytes")
        steps = [
            ((own[at][2] - own[at + 1][2]) / (own[at + 1][1] - own[at][1]), each, at)
            for each, own in options.items()
            for at in range(len(own) - 1)
        ]
        for gain, each, at in sorted(steps, key=lambda step: -step[0]):
            size = options[each][at + 1][1] - options[each][at][1]
            if gain > 0 and size <= left and (place[each] == at or not in_order):
                place[each], left = at + 1, left - size
        return {each: own[place[each]][0] for each, own in options.items()}

    return part


def _bits_from_above(options: Any, max_bytes: int) -> dict[str, int]:
    """Begin with the most bits, and take away where it costs least per byte."""
    place = {each: len(own) - 1 for each, own in options.items()}
    if sum(own[0][1] for own in options.values()) > max_bytes:
        raise ValueError("too few bytes")

    def cost(each: str) -> float:
        (_, less, more_loss), (_, now, loss) = options[each][place[each] - 1 :][:2]
        return (more_loss - loss) / (now - less)

    while sum(options[each][at][1] for each, at in place.items()) > max_bytes:
        place[min((each for each, at in place.items() if at), key=cost)] -= 1
    return {each: own[place[each]][0] for each, own in options.items()}


def _bits_of_any_later_choice(options: Any, max_bytes: int) -> dict[str, int]:
    """Make a step to any later choice, not to the next one only."""
    place = dict.fromkeys(options, 0)
    left = max_bytes - sum(own[0][1] for own in options.values())
    if left < 0:
        raise ValueError("too few bytes")
    while True:
        steps = []
        for each, own in options.items():
            _, now, loss = own[place[each]]
            for to in range(place[each] + 1, len(own)):
                size, saved = own[to][1] - now, loss - own[to][2]
                if size <= left and saved > 0:
                    steps.append((saved / size, each, to, size))
        if not steps:
            return {each: own[place[each]][0] for each, own in options.items()}
        _, each, to, size = max(steps)
        place[each], left = to, left - size


def wrong_bits(name: str) -> Callable[[Any, int], Any]:
    def part(options: Any, max_bytes: int) -> Any:
        place = dict.fromkeys(options, 0)
        used = sum(own[0][1] for own in options.values())
        if used > max_bytes:
            if name == "no error":
                return {each: own[0][0] for each, own in options.items()}
            if name == "an empty dict":
                return {}
            if name == "a KeyError":
                raise KeyError("bytes")
            raise ValueError("" if name == "no sentence" else "too few bytes")
        while True:
            steps = {}
            for each, own in options.items():
                at = place[each]
                if at + 1 == len(own) or (name == "one step each" and at):
                    continue
                size, saved = own[at + 1][1] - own[at][1], own[at][2] - own[at + 1][2]
                fits = used + size <= max_bytes
                if name == "never quite full":
                    fits = used + size < max_bytes
                if name == "one step too large":
                    fits = used <= max_bytes
                gain = saved / size
                if name == "the loss saved alone":
                    gain = saved
                if name == "the loss itself":
                    gain = own[at][2]
                if name == "per byte of the whole":
                    gain = saved / own[at + 1][1]
                if name == "a share of the loss":
                    gain = saved / own[at][2] / size if own[at][2] else 0.0
                if name == "from the first choice":
                    gain = (own[0][2] - own[at + 1][2]) / (own[at + 1][1] - own[0][1])
                if name == "the fewest bytes first":
                    gain = 1 / size
                if name == "the smallest gain":
                    gain = 1 / gain if gain > 0 else 0
                useful = saved > 0 or name in ("also without a gain", "the loss itself")
                if useful and (fits or name == "stops at the first that does not fit"):
                    steps[each] = gain, fits, size
            best = max(steps, key=lambda each: steps[each][0]) if steps else None
            if best is None or not steps[best][1]:
                break
            place[best] += 1
            if name != "bytes are not added up":
                used += steps[best][2]
        if name == "the place":
            return place
        found = {each: own[place[each]][0] for each, own in options.items()}
        if name == "with the bytes":
            return found, used
        return list(found.values()) if name == "a list" else found

    return part


WRONG_BITS = [
    *("no error", "an empty dict", "a KeyError", "no sentence", "one step each"),
    *("never quite full", "one step too large", "the loss saved alone", "the loss itself"),
    *("per byte of the whole", "the fewest bytes first", "the smallest gain"),
    *("also without a gain", "stops at the first that does not fit", "the place"),
    *("with the bytes", "a list", "a share of the loss", "from the first choice"),
    "bytes are not added up",
]

# The residual window


def window_by_counting(num_tokens: int, residual: int) -> tuple[int, int]:
    """Right, token by token."""
    keys = values = 0
    for seen in range(1, num_tokens + 1):
        if seen % residual == 0:
            keys = seen
        values += seen > residual
    return keys, values


def window_by_remainder(num_tokens: int, residual: int) -> list[int]:
    """Right, by what stays in full precision."""
    return [num_tokens - num_tokens % residual, num_tokens - min(num_tokens, residual)]


def wrong_window(name: str) -> Callable[[int, int], Any]:
    def part(num_tokens: int, residual: int) -> Any:
        keys, values = num_tokens // residual * residual, max(num_tokens - residual, 0)
        if name == "keys one token late":
            keys = max(num_tokens - 1, 0) // residual * residual
        if name == "keys as values":
            keys = values
        if name == "values as keys":
            values = keys
        if name == "values can be negative":
            values = num_tokens - residual
        if name == "one value too many":
            values = max(num_tokens - residual + 1, 0)
        if name == "one value too few":
            values = max(num_tokens - residual - 1, 0)
        if name == "a whole group of keys stays":
            keys = max(keys - residual, 0)
        if name == "groups of keys":
            keys = num_tokens // residual
        if name == "all keys have codes":
            keys = num_tokens
        if name == "keys rounded up":
            keys = -(-num_tokens // residual) * residual
        if name == "what stays":
            keys, values = num_tokens - keys, num_tokens - values
        if name == "the other order":
            keys, values = values, keys
        return keys if name == "keys alone" else (keys, values)

    return part


WRONG_WINDOWS = [
    *("keys one token late", "keys as values", "values as keys", "values can be negative"),
    *("one value too many", "one value too few", "a whole group of keys stays"),
    *("groups of keys", "all keys have codes", "keys rounded up", "what stays"),
    *("the other order", "keys alone"),
]


ANSWERS = {
    "scale_and_zero": Answers(
        right=(grid_by_tensors, grid_by_sorting, wrong_grid("nothing")),
        wrong={name: wrong_grid(name) for name in WRONG_GRIDS},
        equivalent={},
    ),
    "pack_nibbles": Answers(
        right=(packed_by_pairs, packed_by_loop, wrong_packed("nothing")),
        wrong={name: wrong_packed(name) for name in WRONG_PACKED},
        equivalent={},
    ),
    "round_by_groups": Answers(
        right=(
            groups_by_padding,
            groups_by_parts,
            groups_multiplied_first,
            wrong_groups("nothing"),
        ),
        wrong={
            **{name: wrong_groups(name) for name in WRONG_GROUPS},
            "a group goes on in the next row": groups_over_rows,
        },
        equivalent={"1 -> 2 #2": "zeros stay zeros, whatever they are divided by"},
    ),
    "search_factors": Answers(
        right=(
            searched_by_hessian,
            searched_by_min,
            searched_with_normalized_factors,
            wrong_search("nothing"),
        ),
        wrong={name: wrong_search(name) for name in WRONG_SEARCHES},
        equivalent={"0.0 -> 1.0": "the first exponent always replaces it"},
    ),
    "round_columns": Answers(
        right=(columns_by_loops, columns_by_errors, columns_in_double, wrong_columns("nothing")),
        wrong={name: wrong_columns(name) for name in WRONG_COLUMNS},
        equivalent={},
    ),
    "choose_bits": Answers(
        right=(bits_by_sorting, wrong_bits("nothing")),
        wrong={
            **{name: wrong_bits(name) for name in WRONG_BITS},
            "steps sorted once": _bits_sorted_once(in_order=False),
            "steps sorted once, in order": _bits_sorted_once(in_order=True),
            "from the most bits down": _bits_from_above,
            "a step to any later choice": _bits_of_any_later_choice,
        },
        equivalent={},
    ),
    "residual_window": Answers(
        right=(window_by_counting, window_by_remainder, wrong_window("nothing")),
        wrong={name: wrong_window(name) for name in WRONG_WINDOWS},
        equivalent={},
    ),
}
