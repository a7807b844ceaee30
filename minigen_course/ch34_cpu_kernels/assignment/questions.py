"""Questions on chapter 34 that need no code."""

from random import Random
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import AutoMinorLocator

from minigen_course.figures import style
from minigen_course.grading.question import Question, Written


def _stored(random: Random) -> dict[str, Any]:
    return {
        "billions": random.choice((1, 3, 7, 8, 14)),
        "bits": random.choice((3, 4, 5, 8)),
        "group": random.choice((16, 32, 64)),
        "extra": random.choice(("a scale", "a scale and a minimum")),
        "bandwidth": random.choice((30, 50, 80, 100, 200, 400)),
    }


def _most_tokens(billions: int, bits: int, group: int, extra: str, bandwidth: int) -> float:
    bits_a_weight = bits + 16 * (1 + ("minimum" in extra)) / group
    return bandwidth / (billions * bits_a_weight / 8)


def _forms(random: Random) -> dict[str, Any]:
    """Return steps on a line: sizes in MB, the rate in GB/s, and the constant part in ms."""
    rate = random.choice((10, 20, 25, 40, 50))
    per_hundred = 100 / rate
    return {
        "megabytes": random.choice(([100, 170, 320], [150, 260, 480], [200, 340, 640])),
        "rate": rate,
        "constant": round(2 * per_hundred * random.choice((1, 1.4, 2))) / 2,
    }


def _rate(megabytes: list[int], rate: int, constant: float) -> float:
    return rate


def _step_times(megabytes: list[int], rate: int, constant: float) -> Figure:
    """Draw the time of each form's step against its bytes, over a fine grid."""
    made, axes = style.figure(7, 3.8)
    times = [each / rate + constant for each in megabytes]
    axes.plot(megabytes, times, "o", color=style.BLUE, zorder=3)
    for name, x, y in zip(("int4", "int8", "bfloat16"), megabytes, times, strict=True):
        axes.annotate(name, (x, y), (-8, 6), textcoords="offset points", ha="right", fontsize=9)
    axes.set_xlim(0, 1.1 * megabytes[-1])
    axes.xaxis.set_minor_locator(AutoMinorLocator(5))
    axes.set_ylim(0, 1.15 * times[-1])
    axes.yaxis.set_minor_locator(AutoMinorLocator(5))
    axes.grid(which="both", color=style.FAINT, linewidth=0.7)
    axes.set_xlabel("bytes that a step reads (MB = 10^6 bytes)")
    axes.set_ylabel("time of a step (ms)")
    style.title(axes, "Decode steps of one model in three forms")
    return made


def _outlier(random: Random) -> dict[str, Any]:
    """Return magnitudes below half a step, between half and a whole step, and above."""
    largest = random.choice((50, 100, 200, 500))
    half = largest / 254
    ranges = [(0.1, 0.6)] * random.randint(3, 8) + [(1.5, 1.8)] * 2 + [(4, 40)] * 5
    others = [half * random.uniform(*each) for each in ranges]
    random.shuffle(others)
    others.insert(random.randrange(len(others)), largest)
    return {"magnitudes": others}


def _rounded_to_zero(magnitudes: list[float]) -> float:
    step = max(magnitudes) / 127
    return sum(each < step / 2 for each in magnitudes)


def _dots(magnitudes: list[float]) -> Figure:
    """Draw the magnitudes on a logarithmic axis, with its lines."""
    made, axes = style.figure(8, 4.4)
    axes.semilogy(range(1, len(magnitudes) + 1), magnitudes, "o", color=style.BLUE, zorder=3)
    axes.grid(axis="y", which="both", color=style.FAINT, linewidth=0.7)
    axes.set_ylim(0.01, 1000)
    levels = [0.01, 0.1, 1, 10, 100, 1000]
    axes.set_yticks(levels, [f"{each:,g}" for each in levels])
    axes.set_xlim(0.5, len(magnitudes) + 0.5)
    axes.set_xticks(range(1, len(magnitudes) + 1))
    axes.set_xlabel("number of the input")
    axes.set_ylabel("magnitude (lines at 1, 2, ... 9, 10, 20, ...)")
    style.title(axes, "Inputs of one product")
    return made


QUESTIONS = {
    "most_tokens_per_second": Question(
        "estimate",
        "A laptop's memory delivers {bandwidth} GB/s (10^9 bytes per second). A model has "
        "{billions} billion weights, stored with {bits} bits each, and every {group} weights of a "
        "row have {extra}, each of 16 bits. A token reads all of this once. At most how many "
        "tokens per second does one sequence get, if nothing but reading takes time?",
        "weights, bits, group size, scale or scale and minimum, bandwidth",
        _stored,
        _most_tokens,
        "A weight takes {bits} bits and its part of {extra} of 16 bits for every {group}; the "
        "bound is {bandwidth} GB/s divided by the bytes of {billions} billion such weights.",
        within=1.015,
    ),
    "rate_of_steps": Question(
        "reading",
        "The figure shows how long a decode step takes in three forms of one model, against the "
        "bytes that it reads. The dots lie on a straight line: a step reads at a rate R, and takes "
        "a constant time besides. What is R, in GB/s (10^9 bytes per second)?",
        "bytes of the forms, rate, constant part",
        _forms,
        _rate,
        "R is the additional bytes from one form to another, divided by the additional time; bytes "
        "divided by time would count the constant part of {constant} ms as reading.",
        within=1.08,
        figure=_step_times,
    ),
    "rounded_to_zero": Question(
        "reading",
        "The figure shows the magnitudes of a product's inputs. They are quantised to bytes with "
        "one scale for all of them, so that the largest becomes 127 or -127, and each number goes "
        "to the nearest step. How many of them become 0?",
        "the numbers, and their outlier",
        _outlier,
        _rounded_to_zero,
        "A step is the largest magnitude divided by 127, and a number below half a step goes to 0.",
        within=1.0,
        figure=_dots,
    ),
}

WRITTEN = {
    "gain_of_four_bits": Written(
        "Someone replaces a model's weights in 16 bits by weights of 4 bits, and expects four "
        "times as many tokens per second on a CPU, for one sequence. Give three reasons for "
        "which the gain may be smaller, and say what you would measure to tell whether time is "
        "lost by reading slowly or by something else.",
        "A group of 4-bit weights also has a scale, and often a minimum: 5 bits per weight with "
        "both for each 32. Some matrices, such as the output head, may keep more bits. Besides, a "
        "step has a constant part that does not shrink with the bytes, and kernels for 4 bits may "
        "not reach the memory's bandwidth. I would measure the bandwidth and the steps of several "
        "forms, and draw a line through time against bytes: its slope gives the rate of reading, "
        "its value at zero bytes the constant part.",
        {
            "scales and minima need bits, too": 2,
            "some weights, such as the head, keep more bits": 2,
            "a constant part of the step, or a kernel that does not reach the bandwidth": 2,
            "time against bytes for several forms, and the measured bandwidth": 2,
            "slope and constant of the line are kept apart": 2,
        },
        minutes=12,
    ),
    "scales_outside_the_sum": Written(
        "In the chapter's products of bytes, weights and inputs have one scale for each 32 numbers "
        "of a row. Why is one scale for all inputs not enough? Why may both scales stay outside of "
        "a group's sum, and what does that gain?",
        "A scale is set by the largest magnitude that shares it. Inputs have outliers, and with "
        "one scale for all of them the steps are so wide that most other numbers become 0; with a "
        "scale for each 32, only the outlier's 31 neighbours suffer. Within a group both scales "
        "are the same for every product, so they can be multiplied once, after the sum. The sum "
        "then has only integers, which one instruction multiplies and adds four bytes at a time in "
        "each lane, and fewer conversions to floats are needed.",
        {
            "an outlier sets the step of all numbers that share its scale": 3,
            "with groups only its neighbours are affected": 2,
            "within a group the scales are common factors": 3,
            "integers inside: byte instructions, fewer conversions": 2,
        },
    ),
}
