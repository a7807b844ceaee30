"""Questions on chapter 15 that need no code."""

from random import Random
from typing import Any

from matplotlib.figure import Figure

from minigen_course.figures import style
from minigen_course.grading.question import Question, Written


def _shape(random: Random) -> dict[str, Any]:
    q_heads, kv_heads = random.choice(((16, 4), (32, 8), (40, 8), (48, 8), (64, 8)))
    head_dim = random.choice((64, 128))
    return {
        "layers": random.choice((24, 32, 48, 80)),
        "hidden": q_heads * head_dim,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": round(q_heads * head_dim * random.choice((2.5, 3, 3.5, 4))),
    }


def _equal_context(
    layers: int, hidden: int, q_heads: int, kv_heads: int, head_dim: int, ffn: int
) -> float:
    q_width, kv_width = q_heads * head_dim, kv_heads * head_dim
    matrices = 2 * layers * hidden * (2 * q_width + 2 * kv_width + 3 * ffn)
    return matrices / (4 * layers * q_width)


def _budget(random: Random) -> dict[str, Any]:
    return {
        "tied": random.random() < 0.5,
        "table": 10 * random.randint(6, 15),
        "attention": 10 * random.randint(6, 15),
        "ffn": 10 * random.randint(20, 40),
    }


def _gflop(tied: bool, table: int, attention: int, ffn: int) -> float:
    return 2 * (table + attention + ffn) / 1000


def _bars(tied: bool, table: int, attention: int, ffn: int) -> Figure:
    """Draw the parameters by kind of tensor; a tied table is one bar."""
    bars = {"attention: four matrices": attention, "feed-forward": ffn}
    if tied:
        bars = {"embedding = output head": table} | bars
    else:
        bars = {"embedding": table} | bars | {"output head": table}
    made, axes = style.figure(8, 2.6)
    drawn = axes.barh(list(bars), list(bars.values()), color=style.BLUE)
    axes.bar_label(drawn, padding=3, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("parameters (millions)")
    style.title(axes, "Parameters of a model, all layers together")
    return made


NO_MASK, NO_ROTATION, NO_NORM, EXCHANGED = MISTAKES = (
    "no causal mask",
    "no rotation",
    "no last norm",
    "gate and up exchanged",
)


def _wrong_port(random: Random) -> dict[str, Any]:
    tokens = random.choice((5, 6))
    return {
        "mistake": random.choice(MISTAKES),
        "found": [[random.uniform(0.1, 2) for _ in range(tokens)] for _ in range(3)],
    }


def _differences(mistake: str, found: list[list[float]]) -> str:
    """Return a table of differences by token, with zeros where the mistake changes nothing."""
    after_first, after_second, logits = (list(row) for row in found)
    if mistake == NO_ROTATION:
        after_first[0] = after_second[0] = logits[0] = 0.0
    if mistake == NO_MASK:
        after_first[-1] = 0.0
    if mistake == NO_NORM:
        after_first = after_second = [0.0] * len(logits)
    rows = {"x after layer 0": after_first, "x after layer 1": after_second, "logits": logits}
    lines = [f"{'token':<16}" + "".join(f"{token:>7}" for token in range(len(logits)))]
    for name, row in rows.items():
        lines.append(f"{name:<16}" + "".join(f"{each:>7.2f}" for each in row))
    return "\n".join(lines)


QUESTIONS = {
    "attention_catches_up": Question(
        "estimate",
        "A model has {layers} layers and a residual stream of {hidden} numbers, {q_heads} query "
        "heads and {kv_heads} KV heads of {head_dim} numbers each, and feed-forward networks "
        "(SwiGLU) that are {ffn} wide inside. One token attends to `s` tokens, itself included. At "
        "which `s` do the scores and the mix cost as many FLOPs as all matrices of the layers? "
        "Count as in the chapter, without norms, rotation, softmax and output head.",
        "layers, width, heads, head dimension, feed-forward width",
        _shape,
        _equal_context,
        "In each layer the matrices cost 2 x {hidden} x (2 x {q_heads} x {head_dim} + 2 x "
        "{kv_heads} x {head_dim} + 3 x {ffn}) FLOPs, and each attended token costs 4 x {q_heads} x "
        "{head_dim}; the number of layers does not count.",
        within=1.005,
        minutes=8,
    ),
    "gflop_of_a_token": Question(
        "reading",
        "The figure shows the parameters of a model in millions. How many GFLOP (10^9 FLOPs) does "
        "one token cost, from its id to its logits? Leave out scores, mix and norms.",
        "parameters of each kind, and whether embedding and head are one table",
        _budget,
        _gflop,
        "Each weight that the token is multiplied with costs two FLOPs; looking up the embedding "
        "costs none, but the output head is a product, also if it is the same table.",
        within=1.01,
        figure=_bars,
    ),
    "mistake_of_a_port": Question(
        "diagnosis",
        "A model with two layers and rotary embedding was ported to another program, with one "
        "mistake: the causal mask is missing in both layers, or queries and keys are not rotated, "
        "or the norm before the output head is missing, or gate and up are exchanged in both "
        "feed-forward networks. For one text, whose positions begin at 0, the table shows the "
        "largest difference between the port and the original, at each token: in the residual "
        "stream x after each layer, and in the logits. Which mistake is it?",
        "the mistake, and the differences",
        _wrong_port,
        lambda mistake, found: str(mistake),
        "Look at what is right: without a mask the last token is still right after layer 0, "
        "because it may see all tokens anyway; without rotation token 0 is right everywhere, "
        "because position 0 is not rotated and token 0 sees only itself; without the last norm "
        "both layers are right; with gate and up exchanged nothing is.",
        choices=MISTAKES,
        figure=_differences,
        points=8,
        minutes=8,
    ),
}

WRITTEN = {
    "why_layers_add": Written(
        "In a transformer, attention and the feed-forward network add to the residual stream "
        "instead of replacing it. Say what this gains for later layers and for training, what each "
        "layer has to compute as a consequence, and why most single layers can be left out of a "
        "trained model without ruining it.",
        "What earlier layers wrote stays in the stream, so a layer need not copy what later layers "
        "will need. In training, the derivative of x + g(x) is 1 + g'(x): the gradient has a "
        "direct path through all additions, and does not become tiny or huge as a product of many "
        "factors can. Each layer only has to compute what should change. If one layer is left out, "
        "the stream still carries everything past the gap, and only one addition is missing.",
        {
            "nothing is lost: a layer need not copy what others wrote": 3,
            "the gradient has a direct path past each layer": 3,
            "a layer computes a change": 2,
            "without a layer the rest of the stream still arrives": 2,
        },
    ),
    "which_rows": Written(
        "A prompt of 1,000 tokens goes through a model, and only the next token is wanted. Which "
        "rows does the engine need in the layers, which rows in the output head, and why do the "
        "two differ?",
        "The layers compute all 1,000 rows: attention at a later token reads the keys and values "
        "of all earlier tokens, and these are made from the earlier tokens' rows of x, in every "
        "layer. The output head treats each row alone, and the next token follows from the last "
        "row, so only this row goes through it. That saves 2 x vocabulary x width FLOPs for each "
        "of the other 999 rows.",
        {
            "all rows go through the layers, because of their keys and values": 4,
            "only the last row goes through the output head": 3,
            "the head treats each row alone, whereas attention mixes rows": 3,
        },
        minutes=8,
    ),
}
