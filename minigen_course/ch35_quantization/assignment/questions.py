"""Questions on chapter 35 that need no code."""

from random import Random
from typing import Any

from minigen_course.grading.question import Question, Written


def _stored(random: Random) -> dict[str, Any]:
    return {
        "bits": random.choice((2, 3, 4, 8)),
        "size": random.choice((16, 32, 64, 128)),
        "scale": random.choice((8, 16)),
    }


def _bits_per_weight(bits: int, size: int, scale: int) -> float:
    return bits + scale / size


def _cache(random: Random) -> dict[str, Any]:
    return {
        "layers": random.choice((24, 30, 32)),
        "heads": random.choice((2, 4, 8)),
        "tokens": random.choice((2000, 4000, 8000)),
        "bits": random.choice((2, 4, 8)),
    }


def _megabytes(layers: int, heads: int, tokens: int, bits: int) -> float:
    return layers * 2 * heads * 64 * tokens * (bits + 32 / 32) / 8 / 1e6


OUTLIER, SHIFTED, ORDER, SEEN = (
    "one scale for the whole matrix, and an outlier in it",
    "a zero point that is wrong by one",
    "codes that were unpacked in another order",
    "calibrated on the text that is judged",
)


def _report(random: Random) -> dict[str, Any]:
    cause = random.choice((OUTLIER, SHIFTED, ORDER, SEEN))
    error = {OUTLIER: (30, 45), SHIFTED: (20, 32), ORDER: (135, 145), SEEN: (9, 12)}[cause]
    mean = {OUTLIER: (0, 2), SHIFTED: (95, 104), ORDER: (0, 2), SEEN: (0, 2)}[cause]
    zeros = {OUTLIER: (85, 96), SHIFTED: (5, 12), ORDER: (5, 12), SEEN: (5, 12)}[cause]
    own = random.randint(1, 4) if cause == SEEN else random.randint(20, 40)
    return {
        "error": random.randint(*error),
        "mean": random.randint(*mean),
        "zeros": random.randint(*zeros),
        "own": own,
        "other": own + (random.randint(25, 60) if cause == SEEN else random.randint(0, 3)),
    }


def _cause(error: int, mean: int, zeros: int, own: int, other: int) -> str:
    if other - own > 10:
        return SEEN
    if mean > 50:
        return SHIFTED
    return OUTLIER if zeros > 50 else ORDER


def _report_text(error: int, mean: int, zeros: int, own: int, other: int) -> str:
    return "\n".join(
        [
            f"error of a 4-bit matrix, relative            {error:4} %",
            f"mean of (rounded - original), in scales      {mean / 100:6.2f}",
            f"codes that mean 0                            {zeros:4} %",
            f"perplexity on the text of the report         +{own} %",
            f"perplexity on another text of the same kind  +{other} %",
        ]
    )


QUESTIONS = {
    "bits_per_weight": Question(
        "estimate",
        "A format stores {bits}-bit codes. Groups of {size} weights share a scale of {scale} bits, "
        "and there are no zero points. How many bits per weight does it store?",
        "the bits of codes and scales, and the group",
        _stored,
        _bits_per_weight,
        "Each weight has its code, and its share of a scale: {scale} / {size}.",
        within=1.01,
    ),
    "cache_size": Question(
        "estimate",
        "A KV cache holds {tokens} tokens in {layers} layers with {heads} KV heads of 64 channels. "
        "Keys and values have {bits} bits per number, and each group of 32 numbers has a low end "
        "and a step of 16 bits each. How many MB (10^6 bytes) are that?",
        "layers, heads, tokens, bits",
        _cache,
        _megabytes,
        "Count the numbers, layers x 2 x heads x 64 x tokens, and give each its bits and 32 / 32 "
        "bits of its group.",
        within=1.02,
    ),
    "what_went_wrong": Question(
        "diagnosis",
        "A colleague quantised a model to 4 bits and reports what follows. What went wrong?",
        "the error, the mean shift, the codes that mean 0, both perplexities",
        _report,
        _cause,
        "A shift of a whole scale in the mean comes from zero points, nearly all codes at 0 from "
        "an outlier that makes the scale large, an error above 100 % from weights in the wrong "
        "places, and two texts of one kind that differ from a text that calibration saw.",
        choices=(OUTLIER, SHIFTED, ORDER, SEEN),
        figure=_report_text,
    ),
}

WRITTEN = {
    "first_token": Written(
        "GPTQ minimises the error of each matrix's outputs on the calibration text, summed over "
        "all tokens. Yet on a small model it made the values' matrices worse than rounding to "
        "nearest. The first token of a text is one of 512, and most heads attend to it. Explain "
        "what goes wrong, and give a cure.",
        "The sum counts every token alike. The first token is one of hundreds, so an error of its "
        "value hardly counts, and GPTQ lets it grow if the other tokens' errors fall by it. But "
        "all later tokens attend to the first one, so its value is added to all of them, and its "
        "error with it. A cure weighs tokens in X^T X by how much they are attended to, for "
        "example the first one as often as all others together, or it keeps the first token's "
        "keys and values in full precision.",
        {
            "the sum over tokens counts the first token once in hundreds": 3,
            "all tokens read its value, so its error reaches all of them": 4,
            "weigh the tokens by attention, or keep its keys and values": 3,
        },
    ),
    "which_text": Written(
        "On a text like that of its calibration GPTQ is better than AWQ, and on another kind of "
        "text it is worse. Why can that be? What would you measure before you publish a model "
        "that GPTQ has quantised?",
        "GPTQ changes every weight so that errors cancel in the directions that the calibration "
        "inputs have. Another text has other directions, in which the changes do not cancel. AWQ "
        "chooses one exponent per input, which hardly can fit one text. Before publishing, "
        "measure the divergence from the original on texts of several kinds, none of which "
        "calibration saw, with intervals; calibrate on a mixture of texts like those that users "
        "send.",
        {
            "GPTQ fits many weights to the directions of the calibration inputs": 4,
            "AWQ has few free choices": 2,
            "measure on several kinds of text that calibration did not see": 3,
            "calibrate on text like that of the users": 1,
        },
    ),
}
