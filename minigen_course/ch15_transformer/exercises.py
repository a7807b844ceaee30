"""Checks of chapter 15: FLOPs, the forward pass of one layer, its heads, a model to port."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from minigen.checkpoint.model_config import ModelConfig
from minigen.model.attention import attention, attention_naive
from minigen.model.layers import (
    apply_rotary,
    apply_rotary_interleaved,
    rms_norm,
    rotary_frequencies,
    rotary_tables,
    swiglu,
)
from minigen.model.transformer import Layer, project_qkv, run_layer
from minigen_course.ch15_transformer.lesson import TinyModel, tiny_model
from minigen_course.ch15_transformer.reference import prompt_flops, run_parallel_layer, token_flops
from minigen_course.grading.exercise import Wrong, expect, expect_close, expect_equal, of_pure_part
from minigen_course.lab.cost_model import config_of
from minigen_course.lab.small_model import EPS, HEAD_DIM, HIDDEN, Product, random_layer

RunLayer = Callable[..., Tensor]
Flops = Callable[[ModelConfig, int], int]
Port = Callable[..., Tensor]
ProjectQKV = Callable[..., tuple[Tensor, Tensor, Tensor]]

HEADS = ("token", "head", "dimension")
ROWS = ("token", "dimension")


SMALL = replace(  # all sizes differ, and the query heads are wider than the residual stream
    config_of("SmolLM2-135M"),
    vocab_size=7,
    hidden=3,
    num_layers=1,
    q_heads=4,
    kv_heads=2,
    head_dim=5,
    ffn=11,
)


def _flops(part: Flops, config: ModelConfig, tokens: int) -> int:
    found = part(config, tokens)
    expect(isinstance(found, int), f"returned {type(found).__name__}; it should return an int.")
    return found


def _expect_flops(found: int, right: int, what: str, **mistakes: int) -> None:
    """Do as `expect_equal` does, but name a well-known mistake that gives the same number."""
    for mistake, made in mistakes.items():
        if found == made != right:
            cause = mistake.replace("_", " ")
            raise Wrong(f"{what}: {found:,} is what it is if {cause}; it should be {right:,}.")
    expect_equal(found, right, what)


def the_head_costs_two_flops_per_weight(part: Flops) -> None:
    """one more token in the vocabulary, where each token has 3 numbers:"""
    more = replace(SMALL, vocab_size=8)
    _expect_flops(
        _flops(part, more, 1) - _flops(part, SMALL, 1),
        2 * 3,
        "FLOPs that one more row of the head adds",
        a_multiplication_and_an_addition_count_as_one=3,
        the_head_is_not_counted=0,
        looking_up_the_embedding_is_a_product_too=2 * 2 * 3,
    )


def feed_forward_has_three_matrices(part: Flops) -> None:
    """one more hidden unit in the feed-forward network:"""
    wider = replace(SMALL, ffn=12)
    _expect_flops(
        _flops(part, wider, 1) - _flops(part, SMALL, 1),
        2 * 3 * 3,
        "FLOPs that one more hidden unit adds",
        the_network_has_two_matrices=2 * 2 * 3,
        a_multiplication_and_an_addition_count_as_one=3 * 3,
    )


def attention_has_four_matrices(part: Flops) -> None:
    """the weights of attention: one token's FLOPs without context, head and feed-forward:"""
    without_context = 2 * _flops(part, SMALL, 1) - _flops(part, SMALL, 2)
    _expect_flops(
        without_context - 2 * 3 * 7 - 2 * 3 * (3 * 11),
        2 * 3 * (20 + 10 + 10 + 20),
        "FLOPs of W_q, W_k, W_v and W_o",
        keys_and_values_have_as_many_heads_as_queries=2 * 3 * 4 * 20,
        the_output_matrix_is_forgotten=2 * 3 * (20 + 10 + 10),
        queries_are_as_wide_as_the_residual_stream=2 * 3 * (3 + 10 + 10 + 3),
    )


def each_attended_token_costs_a_score_and_a_mix(part: Flops) -> None:
    """one more token in the context, for one layer and for three:"""
    for num_layers in (1, 3):
        config = replace(SMALL, num_layers=num_layers)
        _expect_flops(
            _flops(part, config, 9) - _flops(part, config, 8),
            4 * num_layers * 20,
            f"FLOPs that one more attended token adds in {num_layers} layer(s)",
            only_the_score_is_counted=2 * num_layers * 20,
            KV_heads_are_counted_instead_of_query_heads=4 * num_layers * 10,
            one_layer_is_counted=4 * 20,
        )


def real_models_cost_what_their_sizes_say(part: Flops) -> None:
    """models of today, from their configurations:"""
    for name, context, right in (
        ("SmolLM2-135M", 6, 269_374_464),
        ("Qwen3-0.6B", 1000, 1_421_344_768),
        ("Llama-3-8B", 8192, 19_304_284_160),
        ("Llama-3-70B", 8192, 160_478_265_344),
    ):
        what = f"FLOPs of one token of {name} with a context of {context:,} tokens"
        _expect_flops(_flops(part, config_of(name), context), right, what)


def torch_counts_the_same(part: Flops) -> None:
    """a tiny model, whose products torch counts while it runs five tokens without a mask:"""
    tiny = tiny_model("llama")
    usual = attention_naive  # it computes all 5 x 5 scores, and masks afterwards
    with torch.inference_mode(), FlopCounterMode(display=False) as counted:
        _forward(tiny, [3, 1, 4, 1, 5], usual)
    found = 5 * _flops(part, tiny.config, 5)
    expect_equal(found, counted.get_total_flops(), "FLOPs of five tokens that see all five")


def _forward(tiny: TinyModel, token_ids: list[int], attend: Callable[..., Tensor]) -> None:
    """Run the products of a tiny model that has no biases and no head norms."""
    config = tiny.config

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ tiny.weights[f"{name}.weight"].T

    x = tiny.weights["model.embed_tokens.weight"][token_ids]
    for layer in (f"model.layers.{layer_id}" for layer_id in range(config.num_layers)):
        q, k, v = (
            linear(f"{layer}.self_attn.{name}_proj", x).unflatten(-1, (-1, config.head_dim))
            for name in "qkv"
        )
        x = x + linear(f"{layer}.self_attn.o_proj", attend(q, k, v).flatten(-2))
        gate, up = (linear(f"{layer}.mlp.{name}_proj", x) for name in ("gate", "up"))
        x = x + linear(f"{layer}.mlp.down_proj", gate * up)
    linear("lm_head", x)


def one_token_is_a_prompt_too(part: Flops) -> None:
    """a prompt of one token, which costs what one token costs:"""
    for config in (SMALL, config_of("Llama-3-8B")):
        expect_equal(_flops(part, config, 1), token_flops(config, 1), "FLOPs of one token")


def logits_are_computed_once(part: Flops) -> None:
    """what one more token in the vocabulary adds to a prompt of five tokens:"""
    more = replace(SMALL, vocab_size=8)
    _expect_flops(
        _flops(part, more, 5) - _flops(part, SMALL, 5),
        2 * 3,
        "FLOPs that one more row of the head adds",
        every_token_gets_logits=5 * 2 * 3,
        no_token_gets_logits=0,
    )


def the_mask_halves_the_scores(part: Flops) -> None:
    """prompts of 4 and 100 tokens, and one of 8,192 of Llama-3-8B:"""
    for config, num_tokens in ((SMALL, 4), (SMALL, 100), (config_of("Llama-3-8B"), 8192)):
        right = prompt_flops(config, num_tokens)
        head = 2 * config.vocab_size * config.hidden
        square = num_tokens * (token_flops(config, num_tokens) - head) + head
        _expect_flops(
            _flops(part, config, num_tokens),
            right,
            f"FLOPs of a prompt of {num_tokens:,} tokens",
            every_token_attends_to_all=square,
            no_token_attends_to_itself=right - num_tokens * 4 * config.num_layers * _width(config),
        )


def _width(config: ModelConfig) -> int:
    return config.q_heads * config.head_dim


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
        is_mistake = made.shape != right.shape or not made.allclose(right)
        same = isinstance(found, Tensor) and found.shape == made.shape and found.allclose(made)
        if is_mistake and same:
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


def parallel_halves_read_the_same_norm(part: RunLayer) -> None:
    """attention and feed-forward, both from the x before the layer:"""
    layer = random_layer()
    for num_tokens in (5, 1):
        x = _x(num_tokens)
        _expect(
            _run(part, layer, num_tokens)[0],
            _run(run_parallel_layer, layer, num_tokens)[0],
            "the result",
            ROWS,
            one_half_comes_after_the_other=_run(run_layer, layer, num_tokens)[0],
            the_feed_forward_has_its_own_norm=_run(run_layer, _silent(layer, "down"), num_tokens)[0]
            + _feed_forward(layer, rms_norm(x, layer.ffn_norm, EPS)),
            x_is_not_normalised_before_the_feed_forward=_run(
                run_layer, _silent(layer, "down"), num_tokens
            )[0]
            + _feed_forward(layer, x),
        )


def _compare_logits(part: Port, tiny: TinyModel, token_ids: list[int], **mistakes: Tensor) -> None:
    before = {name: tensor.clone() for name, tensor in tiny.weights.items()}
    found = part(tiny.config, tiny.weights, list(token_ids))
    for name, tensor in tiny.weights.items():
        expect(torch.equal(tensor, before[name]), f"changed {name}; it should stay as it is.")
    _expect(found, tiny.logits(token_ids), "logits", ("token", "vocabulary"), **mistakes)


IDS = [3, 1, 4, 1, 5, 9, 2]


def without_layers_norm_and_head_are_left(part: Port) -> None:
    """a model of no layers, with a head of its own, and tied:"""
    own = tiny_model("qwen3")
    own = TinyModel(replace(own.config, num_layers=0, sliding_windows=()), own.weights)
    embedding = own.weights["model.embed_tokens.weight"]
    tied = TinyModel(
        replace(own.config, tied_embeddings=True),
        {name: each for name, each in own.weights.items() if name != "lm_head.weight"},
    )
    ready = rms_norm(embedding[IDS], own.weights["model.norm.weight"], own.config.norm_eps)
    for tiny in (own, tied):
        _compare_logits(
            part,
            tiny,
            IDS,
            the_head_is_the_embedding=ready @ embedding.T,
            the_last_norm_is_forgotten=embedding[IDS] @ own.weights["lm_head.weight"].T,
        )


def one_token_has_the_packages_logits(part: Port) -> None:
    """one token in two layers, where attention can only return the token's own value:"""
    _compare_logits(part, tiny_model("qwen3"), IDS[:1])


def a_text_has_the_packages_logits(part: Port) -> None:
    """seven tokens in two layers, with a head of its own, and tied:"""
    for tied in (False, True):
        tiny = tiny_model("qwen3", tie_word_embeddings=tied)
        names = [name for name in tiny.weights if "q_norm" in name or "k_norm" in name]
        plain = {name: each for name, each in tiny.weights.items() if name not in names}
        llama = TinyModel(replace(tiny.config, qk_norm=False), plain)
        _compare_logits(part, tiny, IDS, queries_and_keys_are_not_normalised=llama.logits(IDS))


def other_sizes_have_the_packages_logits(part: Port) -> None:
    """three layers, one KV head, another epsilon and another theta:"""
    sizes = {"num_hidden_layers": 3, "num_key_value_heads": 1, "hidden_size": 20}
    tiny = tiny_model("qwen3", rms_norm_eps=0.3, rope_theta=9.0, head_dim=6, **sizes)
    _compare_logits(part, tiny, [*IDS, *IDS])


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
    "token_flops": (
        the_head_costs_two_flops_per_weight,
        feed_forward_has_three_matrices,
        attention_has_four_matrices,
        each_attended_token_costs_a_score_and_a_mix,
        real_models_cost_what_their_sizes_say,
        torch_counts_the_same,
    ),
    "prompt_flops": (
        one_token_is_a_prompt_too,
        logits_are_computed_once,
        the_mask_halves_the_scores,
    ),
    "run_layer": (
        where_both_halves_give_nothing_x_is_left,
        attention_gets_normalised_rotated_heads,
        attention_adds_to_x,
        the_feed_forward_adds_to_x,
        the_feed_forward_reads_what_attention_added,
        a_layer_with_norms_for_queries_and_keys_runs_too,
    ),
    "run_parallel_layer": (
        where_both_halves_give_nothing_x_is_left,
        attention_gets_normalised_rotated_heads,
        attention_adds_to_x,
        parallel_halves_read_the_same_norm,
    ),
    "project_qkv": of_pure_part(
        each_part_has_its_own_heads,
        values_are_not_rotated,
        queries_and_keys_are_rotated_by_position,
        norms_act_on_each_head_before_the_rotation,
    ),
    "qwen3_logits": (
        without_layers_norm_and_head_are_left,
        one_token_has_the_packages_logits,
        a_text_has_the_packages_logits,
        other_sizes_have_the_packages_logits,
    ),
}
