"""Questions on chapter 31 that need no code."""

from random import Random
from typing import Any

from matplotlib.figure import Figure

from minigen_course.ch31_triton.lesson import SECTOR, WARP, programs_that_fit
from minigen_course.figures import style
from minigen_course.grading.question import Question, Written


def _strided(random: Random) -> dict[str, Any]:
    return {"stride": random.choice((2, 3, 4, 5, 6, 12, 20)), "itemsize": random.choice((2, 4))}


def _bytes_fetched(stride: int, itemsize: int) -> float:
    return min(stride * itemsize, WARP) * SECTOR


def _activation(random: Random) -> dict[str, Any]:
    return {
        "tokens": random.choice((1024, 2048, 4096, 8192)),
        "ffn": random.choice((8192, 11008, 14336)),
        "bandwidth": random.choice((2039, 3350)),
    }


def _microseconds_saved(tokens: int, ffn: int, bandwidth: int) -> float:
    return 5 * 2 * tokens * ffn / (bandwidth * 1000)


def _program(random: Random) -> dict[str, Any]:
    pairs = ((2, 34), (2, 42), (2, 82), (2, 98), (8, 50), (8, 66), (8, 90))
    warps, registers = random.choice(pairs)
    return {"warps": warps, "registers": registers}


def _occupancy(warps: int, registers: int) -> float:
    return 100 * programs_that_fit(warps, registers, shared=0).occupancy


HBM = 2000  # GB/s, of the diagnosis

CAUSES = ("launches", "needed bytes", "wasted sectors")


def _kernels(random: Random) -> dict[str, Any]:
    cause = random.choice(CAUSES)
    kernel_us = random.choice((1, 2)) if cause == "launches" else random.choice((20, 25, 30, 40))
    share = 0.125 if cause == "wasted sectors" else random.choice((0.8, 0.85, 0.9))
    return {
        "launch_us": random.choice((6, 7, 8)),
        "kernel_us": kernel_us,
        "megabytes": round(kernel_us * HBM * share / 1000, 1),
    }


def _cause(launch_us: int, kernel_us: int, megabytes: float) -> str:
    if kernel_us < launch_us:
        return "launches"
    return "needed bytes" if 1000 * megabytes / kernel_us > HBM / 2 else "wasted sectors"


def _timeline(launch_us: int, kernel_us: int, megabytes: float, num: int = 8) -> Figure:
    """Draw the launches of the CPU above the kernels of the GPU."""
    made, axes = style.figure(8.5, 2.4)
    begin, kernels = 0, []
    for number in range(num):
        begin = max(begin, (number + 1) * launch_us)
        kernels.append((begin, kernel_us))
        begin += kernel_us
    launches = [(number * launch_us, launch_us) for number in range(num)]
    for row, (spans, colour) in enumerate(((launches, style.AMBER), (kernels, style.BLUE))):
        axes.broken_barh(spans, (row - 0.35, 0.7), color=colour, edgecolor="white")
    axes.set_yticks([0, 1], ["CPU launches", "GPU computes"])
    axes.invert_yaxis()
    axes.set(xlabel="microseconds", xlim=(0, None))
    style.title(axes, f"{num} kernels of one kind, launched one after the other")
    return made


QUESTIONS = {
    "bytes_fetched": Question(
        "estimate",
        "In a load, lane i of a warp's 32 lanes wants number {stride} x i of a tensor. A number "
        "has {itemsize} bytes, and the tensor begins at a sector of 32 bytes. How many bytes does "
        "this load fetch from memory, if no cache has any of them?",
        "stride, bytes of a number",
        _strided,
        _bytes_fetched,
        "Memory gives whole sectors: neighbouring lanes lie {stride} x {itemsize} bytes apart, so "
        "the load touches {stride} x {itemsize} sectors, but at most one for each of the 32 lanes.",
        within=1.0,
        points=3,
        minutes=3,
    ),
    "microseconds_saved": Question(
        "estimate",
        "SiLU(gate) x up is computed by three operators, one after the other: s = sigmoid(gate), "
        "then t = gate x s, then t x up. Each tensor has {tokens} x {ffn} numbers in bfloat16. A "
        "single kernel replaces the three. Memory gives {bandwidth} GB/s (10^9 bytes per second), "
        "the time is that of the bytes alone, and no cache helps. How many microseconds does the "
        "kernel save?",
        "tokens, width of the feed-forward layer, memory bandwidth",
        _activation,
        _microseconds_saved,
        "The operators read 1 + 2 + 2 tensors and write 3, the kernel reads 2 and writes 1, so 5 "
        "tensors of {tokens} x {ffn} x 2 bytes are saved, at {bandwidth} x 10^9 bytes per second.",
        within=1.03,
    ),
    "occupancy_percent": Question(
        "estimate",
        "A program of a kernel has {warps} warps and takes {registers} registers per thread, which "
        "the GPU deals out in units of 8. An SM has four parts, each with 16,384 registers; a "
        "warp has 32 threads and takes all its registers from one part. The SM has 64 places for "
        "warps and 32 for programs, and shared memory is no limit. What is the occupancy in "
        "percent?",
        "warps of a program, registers per thread",
        _program,
        _occupancy,
        "Round {registers} up to a multiple of 8, count the warps that fit in a part and in four, "
        "round down to whole programs of {warps} warps, and divide their warps by 64.",
        within=1.01,
        minutes=8,
    ),
    "what_takes_the_time": Question(
        "diagnosis",
        "The figure shows eight kernels on a GPU. Each of them needs {megabytes} MB (10^6 "
        "bytes) in all, loads and stores together, and does almost no arithmetic. Memory gives "
        "2,000 GB/s (10^9 bytes per second). What takes most of the time? 'launches': the GPU "
        "mostly waits for the CPU. 'needed bytes': the GPU is nearly always busy, and moves the "
        "needed bytes at more than half of the memory's rate. 'wasted sectors': the GPU is nearly "
        "always busy, but moves the needed bytes at less than half of this rate, because its loads "
        "are not coalesced.",
        "time of a launch and of a kernel, bytes that a kernel needs",
        _kernels,
        _cause,
        "A launch takes {launch_us} µs and a kernel {kernel_us} µs: compare the two, and the "
        "{megabytes} MB in {kernel_us} µs with 2,000 GB/s.",
        choices=CAUSES,
        figure=_timeline,
    ),
}

WRITTEN = {
    "why_fuse": Written(
        "A layer's RMSNorm runs as six operators of torch, and you replace them by one kernel. Say "
        "what this saves for a prompt of thousands of tokens, what it saves for a decode step of a "
        "few tokens, and why the whole model gains far less than the norm does.",
        "With many tokens, the norm is limited by bytes: each operator reads its input from memory "
        "and writes its result there. The kernel loads a row once, keeps it in registers for all "
        "steps, and stores the result once. With few tokens, the tensors are small, and the time "
        "is that of launches, which take microseconds each: one launch replaces six. The model "
        "gains less because matrix products and attention take most of its time, and fusing the "
        "norm leaves them as they are.",
        {
            "many tokens: memory traffic limits the norm, and intermediate results cause it": 3,
            "the kernel keeps the row in registers, so it is loaded once and stored once": 2,
            "few tokens: launches limit it, and there are fewer of them": 3,
            "the other operations, mainly matrix products, take as long as before": 2,
        },
    ),
    "masked_lanes": Written(
        "A kernel finds the largest number of each row. It loads a row with mask=columns < "
        "num_columns, without other=. All tests on an NVIDIA GPU pass; their numbers are positive. "
        "Explain why the kernel is wrong, why the tests pass, which test would show it, and how to "
        "mend it.",
        "A reduction takes all lanes of a block, also the masked ones. What a masked lane holds "
        "without other= is not defined. Today's compiler puts 0 there on NVIDIA GPUs, and 0 is "
        "never the maximum of positive numbers, so the tests pass. A row of negative numbers that "
        "is shorter than its block would show it: the result would be 0. The load should have "
        'other=float("-inf"), which no number is below.',
        {
            "a reduction counts masked lanes, too": 3,
            "their value is undefined without other=; it happens to be 0": 2,
            "a test with only negative numbers and a block longer than the row": 3,
            "the fix: minus infinity in masked lanes, by other= or tl.where": 2,
        },
    ),
}
