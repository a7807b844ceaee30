"""Seconds of device work, and the bandwidth of the device's memory."""

import statistics
from collections.abc import Callable

import torch

GiB = 2**30


def seconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Return the median of `repeats` calls after five uncounted ones, by the device's own clock.

    Before each call, half a GiB is read. Then the device's cache holds nothing of the work and
    nothing that must still be written back; and the processor has queued the work before the device
    reaches it, so that the launch is not timed.
    """
    other = torch.ones(GiB // 8, device="cuda")
    for _ in range(5):
        work()
    spans = []
    for _ in range(repeats):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        other.sum()
        started.record()
        work()
        ended.record()
        ended.synchronize()
        spans.append(started.elapsed_time(ended) / 1000)
    return statistics.median(spans)


def replayed(work: Callable[[], object]) -> Callable[[], object]:
    """Capture the work as a CUDA graph, so that launches cost nothing; call it to replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph.replay


def copy_bandwidth() -> float:
    """Return bytes per second that a copy of 4 GiB reads and writes, together."""
    source = torch.empty(4 * GiB, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))
