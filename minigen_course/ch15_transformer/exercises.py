"""Checks of chapter 15: the heads of one layer, and the forward pass of one layer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minigen.model.attention import attention
from minigen.model.layers import (
    apply_rotary,
    apply_rotary_interleaved,
    rms_norm,
    rotary_frequencies,
    rotary_tables,
    swiglu,
)
from minigen.model.transformer import Layer, project_qkv, run_layer
from minigen_course.grading.exercise import Wrong, expect, expect_close, expect_equal
from minigen_course.lab.small_model import EPS, HEAD_DIM, HIDDEN, Product, random_layer

RunLayer = Callable[..., Tensor]
ProjectQKV = Callable[..., tuple[Tensor, Tensor, Tensor]]

HEADS = ("token", "head", "dimension")
ROWS = ("token", "dimension")


def _silent(layer: Layer, name: str) -> Layer:
    """Return the layer with one product that returns zeros."""
    product: Any = getattr(layer, name)
    changed: dict[str, Any] = {
        name: Product(torch.zeros_like(product.matrix), product.parts),
    }
    return replace(layer, **changed)


def _x(num_tokens: int = 5) -> Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(4)) * 2


def _rotation(num_tokens: int = 5) -> tuple[Tensor, Tensor]:
    return rotary_tables(rotary_frequencies(HEAD_DIM, 100.0), torch.arange(3, 3 + num_tokens))


def _run(part: RunLayer, layer: Layer, num_tokens: int = 5) -> tuple[Tensor, list[Any]]:
    """Return the part's result, and the (q, k, v) that it passed to attention."""
    given: list[Any] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given.append((q, k, v))
        return attention(q, k, v)

    x = _x(num_tokens)
    before = x.clone()
    found = part(layer, x, _rotation(num_tokens), attend, HEAD_DIM, EPS)
    expect(torch.equal(x, before), "changed x; return a new tensor.")
    expect(isinstance(found, Tensor), f"returned {type(found).__name__}; return a tensor.")
    expect_equal(list(found.shape), [num_tokens, HIDDEN], "the shape of the result")
    expect_equal(len(given), 1, "the number of calls of attend")
    return found, given


def _expect(found: Any, right: Tensor, what: str, axes: Any, **mistakes: Tensor) -> None:
    """Do as `expect_close` does, but name a well-known mistake that gives the same result."""
    for mistake, made in mistakes.items():
        if isinstance(found, Tensor) and found.shape == made.shape and found.allclose(made):
            cause = mistake.replace("_", " ")
            raise Wrong(f"{what} is as if {cause}; it should be different.")
    expect_close(found, right, what, axes)


def _feed_forward(layer: Layer, x: Tensor) -> Tensor:
    gate, up = layer.gate_up(x).split(layer.gate_up.parts, dim=-1)
    return layer.down(swiglu(gate, up))


def where_both_halves_give_nothing_x_is_left(part: RunLayer) -> None:
    """attention's output and the feed-forward's are zeros here, so x is the result:"""
    layer = _silent(_silent(random_layer(), "out"), "down")
    expect_close(_run(part, layer)[0], _x(), "the result", ROWS)


def attention_gets_normalised_rotated_heads(part: RunLayer) -> None:
    """the arguments of attend:"""
    layer = random_layer()
    (found,), (right,) = _run(part, layer)[1], _run(run_layer, layer)[1]
    variants = {
        "x_is_not_normalised": _x(),
        "the_other_norm_is_used": rms_norm(_x(), layer.ffn_norm, EPS),
        "the_norm_has_another_epsilon": rms_norm(_x(), layer.attention_norm, 1e-6),
    }
    heads = {
        mistake: project_qkv(layer, x, _rotation(), HEAD_DIM, EPS)
        for mistake, x in variants.items()
    }
    for place, name in enumerate("qkv"):
        mistakes = {mistake: made[place] for mistake, made in heads.items()}
        if name != "v":
            mistakes["it_is_rotated_twice"] = apply_rotary(right[place], *_rotation())
            mistakes["keys_and_values_are_exchanged"] = right[2]
        _expect(found[place], right[place], name, HEADS, **mistakes)


def attention_adds_to_x(part: RunLayer) -> None:
    """the feed-forward returns zeros here, so x and attention's output are added:"""
    layer = _silent(random_layer(), "down")
    right = _run(run_layer, layer)[0]
    _expect(
        _run(part, layer)[0],
        right,
        "the result",
        ROWS,
        attention_is_not_added=_x(),
        x_is_not_added=right - _x(),
    )


def the_feed_forward_adds_to_x(part: RunLayer) -> None:
    """attention returns zeros here, so x and the feed-forward's output are added:"""
    layer, x = _silent(random_layer(), "out"), _x()
    ready = rms_norm(x, layer.ffn_norm, EPS)
    gate, up = layer.gate_up(ready).split(layer.gate_up.parts, dim=-1)
    _expect(
        _run(part, layer)[0],
        _run(run_layer, layer)[0],
        "the result",
        ROWS,
        gate_and_up_are_exchanged=x + layer.down(swiglu(up, gate)),
        the_gate_has_no_SiLU=x + layer.down(gate * up),
        x_is_not_normalised_before_the_feed_forward=x + _feed_forward(layer, x),
        x_is_not_added=_feed_forward(layer, ready),
    )


def the_feed_forward_reads_what_attention_added(part: RunLayer) -> None:
    """attention and feed-forward together:"""
    layer = random_layer()
    for num_tokens in (5, 1):
        right, x = _run(run_layer, layer, num_tokens)[0], _x(num_tokens)
        after = _run(run_layer, _silent(layer, "down"), num_tokens)[0]
        old = after + _feed_forward(layer, rms_norm(x, layer.ffn_norm, EPS))
        _expect(
            _run(part, layer, num_tokens)[0],
            right,
            "the result",
            ROWS,
            the_feed_forward_reads_x_without_attention=old,
        )


def a_layer_with_norms_for_queries_and_keys_runs_too(part: RunLayer) -> None:
    """a layer with norms for queries and keys, as in Qwen3:"""
    layer = random_layer(head_norms=True)
    expect_close(_run(part, layer)[0], _run(run_layer, layer)[0], "the result", ROWS)


def _projected(part: ProjectQKV, layer: Layer) -> list[Tensor]:
    found = part(layer, _x(), _rotation(), HEAD_DIM, EPS)
    expect(isinstance(found, tuple | list), "should return three tensors: q, k, v.")
    expect_equal(len(found), 3, "the number of returned tensors")
    return list(found)


def _compare(part: ProjectQKV, layer: Layer, which: str) -> None:
    found, right = _projected(part, layer), _projected(project_qkv, layer)
    cos, sin = _rotation()
    for name, mine, expected in zip("qkv", found, right, strict=True):
        plain = expected if name == "v" else apply_rotary(expected, cos, -sin)
        mistakes = {"the_pairs_are_(2i,_2i_+_1)": apply_rotary_interleaved(plain, cos, sin)}
        if name == "v":
            mistakes["values_are_rotated"] = apply_rotary(plain, cos, sin)
        else:
            mistakes["it_is_not_rotated"] = plain
            mistakes["it_is_rotated_backwards"] = apply_rotary(plain, cos, -sin)
        if name in which:
            _expect(mine, expected, name, HEADS, **mistakes)


def each_part_has_its_own_heads(part: ProjectQKV) -> None:
    """four query heads and two KV heads, of six numbers each:"""
    for name, found, heads in zip("qkv", _projected(part, random_layer()), (4, 2, 2), strict=True):
        expect(isinstance(found, Tensor), f"{name} should be a tensor.")
        expect_equal(list(found.shape), [5, heads, HEAD_DIM], f"the shape of {name}")


def values_are_not_rotated(part: ProjectQKV) -> None:
    """values, which stay as the product returns them:"""
    _compare(part, random_layer(), "v")


def queries_and_keys_are_rotated_by_position(part: ProjectQKV) -> None:
    """queries and keys, which are rotated:"""
    _compare(part, random_layer(), "qk")


def norms_act_on_each_head_before_the_rotation(part: ProjectQKV) -> None:
    """a layer with norms for queries and keys, as in Qwen3:"""
    _compare(part, random_layer(head_norms=True), "qkv")


CHECKS = {
    "run_layer": (
        where_both_halves_give_nothing_x_is_left,
        attention_gets_normalised_rotated_heads,
        attention_adds_to_x,
        the_feed_forward_adds_to_x,
        the_feed_forward_reads_what_attention_added,
        a_layer_with_norms_for_queries_and_keys_runs_too,
    ),
    "project_qkv": (
        each_part_has_its_own_heads,
        values_are_not_rotated,
        queries_and_keys_are_rotated_by_position,
        norms_act_on_each_head_before_the_rotation,
    ),
}
