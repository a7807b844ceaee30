"""Questions on chapter 14 that need no code."""

import math
from random import Random
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from minigen.model.attention import causal_mask
from minigen_course.figures import style
from minigen_course.grading.question import Question, Written


def _text(random: Random) -> dict[str, Any]:
    heads, kv_heads = random.choice(((32, 8), (64, 8), (40, 8), (16, 4), (28, 4)))
    return {
        "layers": random.choice((28, 32, 40, 64, 80)),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": random.choice((64, 128)),
        "tokens": 1000 * random.choice((2, 5, 8, 20, 50)),
    }


def _text_bytes(layers: int, heads: int, kv_heads: int, head_dim: int, tokens: int) -> float:
    return 2 * layers * kv_heads * head_dim * 2 * tokens / 1e6


def _chunk(random: Random) -> dict[str, Any]:
    chunk = random.choice((8, 10, 16, 20, 32))
    return {"chunk": chunk, "number": random.randint(2, 6), "prompt": chunk * random.randint(6, 9)}


def _visible(chunk: int, number: int, prompt: int) -> float:
    return int(causal_mask(chunk, chunk * number).sum())


WORDS = ("the", "old", "keeper", "lost", "lamp")


def _weight(dots: list[int], head_dim: int, word: str) -> float:
    scores = [each / math.sqrt(head_dim) for each in dots]
    return math.exp(scores[WORDS.index(word)]) / sum(map(math.exp, scores))


def _dots(random: Random) -> dict[str, Any]:
    while True:
        head_dim, word = random.choice((4, 16, 64)), random.choice(WORDS)
        scores = random.choices(range(4), k=len(WORDS))
        dots = [each * math.isqrt(head_dim) for each in scores]
        right = _weight(dots, head_dim, word)
        others = (
            _weight(dots, 1, word),  # not divided
            _weight(dots, head_dim**2, word),  # divided by the dimension
            dots[WORDS.index(word)] / max(1, sum(dots)),  # a share of the scores
        )
        near = any(right / 1.15 < each < right * 1.15 for each in others)
        if 0.05 < right < 0.8 and len(set(scores)) >= 3 and not near:
            return {"dots": dots, "head_dim": head_dim, "word": word}


def _dot_products(dots: list[int], head_dim: int, word: str) -> Figure:
    """Draw the dot product of one query with each key."""
    made, axes = style.figure(7, 3)
    axes.bar_label(axes.bar(WORDS, dots, color=style.BLUE, width=0.6), padding=3, fontsize=9)
    axes.set_ylim(0, 1.15 * max(dots))
    axes.set(xlabel="token that is looked at", ylabel="q · k, not divided")
    style.title(axes, 'Dot products of the query of "lamp" with all keys that it sees')
    return made


MISTAKES = (
    "nothing",
    "one position ahead",
    "window too wide",
    "own position hidden",
    "queries at the first positions",
)


def _drawn_mask(mistake: str, num_queries: int, num_keys: int, window: int) -> Tensor:
    """Return the mask that code with this mistake makes."""
    first = 0 if mistake == "queries at the first positions" else num_keys - num_queries
    query = torch.arange(first, first + num_queries).unsqueeze(-1)
    behind = query - torch.arange(num_keys)
    nearest = {"one position ahead": -1, "own position hidden": 1}.get(mistake, 0)
    farthest = window if mistake == "window too wide" else window - 1
    return (behind >= nearest) & (behind <= farthest)


def _one_mask(random: Random) -> dict[str, Any]:
    num_queries, window = random.randint(3, 4), random.randint(3, 4)
    return {
        "num_queries": num_queries,
        "num_keys": num_queries + window + random.randint(0, 2),
        "window": window,
        "mistake": random.choice(MISTAKES),
    }


def _mistake(num_queries: int, num_keys: int, window: int, mistake: str) -> float | str:
    return mistake


def _mask_drawn(num_queries: int, num_keys: int, window: int, mistake: str) -> Figure:
    """Draw the mask: blue where a query may attend to a key."""
    made, axes = style.figure(6, 2.9)
    mask = _drawn_mask(mistake, num_queries, num_keys, window)
    for query in range(num_queries):
        for key in range(num_keys):
            colour = style.BLUE if mask[query, key] else style.FAINT
            axes.add_patch(Rectangle((key + 0.06, query + 0.06), 0.88, 0.88, color=colour))
    axes.set(xlim=(0, num_keys), ylim=(num_queries, 0), aspect="equal")
    axes.set_xticks([each + 0.5 for each in range(num_keys)], range(num_keys))
    queries = range(num_keys - num_queries, num_keys)
    axes.set_yticks([each + 0.5 for each in range(num_queries)], queries)
    axes.tick_params(length=0)
    axes.set(xlabel="key's position", ylabel="query's position")
    style.title(axes, "Blue: this query sees this key")
    return made


QUESTIONS = {
    "cache_of_a_text": Question(
        "estimate",
        "A model has {layers} layers, {heads} query heads, and {kv_heads} KV heads of {head_dim} "
        "numbers each. A number takes 2 bytes. How many MB (10^6 bytes) of KV cache does a text of "
        "{tokens} tokens take?",
        "layers, heads, KV heads, head dimension, tokens",
        _text,
        _text_bytes,
        "A token leaves 2 x {layers} x {kv_heads} x {head_dim} numbers of 2 bytes: a key and a "
        "value for each layer and KV head; query heads do not count.",
        within=1.02,
    ),
    "visible_keys": Question(
        "estimate",
        "A prompt of {prompt} tokens is computed in chunks of {chunk}, without a sliding window. "
        "How many entries of the causal mask are True for chunk number {number}, if the first "
        "chunk is number 1?",
        "size of a chunk, its number",
        _chunk,
        _visible,
        "Each of the {chunk} queries sees all tokens of the {number} - 1 chunks before its own, "
        "and in its own chunk the first query sees 1 key, the second 2, and so on up to {chunk}.",
        within=1.0,
    ),
    "one_weight": Question(
        "reading",
        "A head has a dimension of {head_dim}. The figure shows the dot products of the query of "
        '"lamp" with the keys of all tokens that it sees. Which attention weight, a number from 0 '
        'to 1, does "lamp" give to "{word}"?',
        "head dimension, dot products, the word",
        _dots,
        _weight,
        "Divide {dots} by the square root of {head_dim}, take the exponentials, and divide that of "
        '"{word}" by the sum of all.',
        figure=_dot_products,
    ),
    "what_is_wrong_with_the_mask": Question(
        "diagnosis",
        "The figure shows a mask that a program made for {num_queries} queries at the last "
        "positions of a context of {num_keys} keys. The model has a sliding window of {window} "
        "positions, the query's own included. What is wrong with the mask?",
        "queries, keys, window, the mistake",
        _one_mask,
        _mistake,
        "A query at position p sees the keys from p - {window} + 1 to p, {window} in number, and "
        "the {num_queries} queries have the last of {num_keys} positions.",
        choices=MISTAKES,
        figure=_mask_drawn,
    ),
}

WRITTEN = {
    "keys_without_queries": Written(
        "An engine keeps the keys and values of all tokens in its KV cache, but no queries. Say "
        "why queries are not kept, why grouped-query attention makes the cache smaller although "
        "the number of query heads stays the same, and what it costs.",
        "The query of a token is used only in the step that computes this token, for the token's "
        "own result. Its key and its value are used by every later token, which compares its query "
        "with this key and mixes in this value. With groups, several query heads share one key "
        "head and one value head, so each token leaves fewer keys and values: the cache shrinks by "
        "the number of query heads for each KV head, and new tokens also read less. The price is "
        "quality, since several questions must share one set of keys and values.",
        {
            "a query serves only its own token, in one step": 2,
            "keys and values are read by every later token": 2,
            "the cache grows with the number of KV heads, not of query heads": 3,
            "the factor: query heads per KV head": 1,
            "the cost is some quality, because query heads share keys and values": 2,
        },
    ),
}
