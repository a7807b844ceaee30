"""The cost of one scheduler step, for short and long queues: `python benchmarks/24_scheduler.py`.

It times `schedule` and `commit` with 256 running sequences, all in decode, and fake tokens; with 10
and with 10,000 more sequences waiting.
"""

import statistics
from itertools import count

from common import interleaved, json_option, write_results

from minigen import SamplingParams
from minigen.engine.scheduler import ContinuousScheduler
from minigen.kv_cache.block_allocator import BlockAllocator
from minigen.kv_cache.block_manager import BlockManager
from minigen.kv_cache.radix_cache import RadixPrefixCache
from minigen.sequence import SampledToken, Sequence
from minigen.trace.events import Trace

NUM_RUNNING = 256
QUEUES = (10, 10_000)
PROMPT_TOKENS = 64
BLOCK_SIZE = 16
BLOCKS_PER_SEQUENCE = 64
REPEATS = 300


def crowd(num_waiting: int) -> ContinuousScheduler:
    """Return a scheduler whose running slots are all taken by decodes, with a queue behind them."""
    trace, numbers = Trace(), count()
    num_blocks = NUM_RUNNING * BLOCKS_PER_SEQUENCE
    allocator = BlockAllocator(num_blocks)
    cache = RadixPrefixCache(allocator, BLOCK_SIZE)
    manager = BlockManager(allocator, cache, BLOCK_SIZE, NUM_RUNNING, num_blocks, trace)
    scheduler = ContinuousScheduler(manager, NUM_RUNNING, NUM_RUNNING * PROMPT_TOKENS)
    for sequence_id in range(NUM_RUNNING + num_waiting):
        prompt_ids = tuple(next(numbers) for _ in range(PROMPT_TOKENS))
        scheduler.add(
            Sequence(sequence_id, prompt_ids, SamplingParams(), 0, 10 * REPEATS, frozenset())
        )
    step(scheduler)
    assert len(scheduler.running) == NUM_RUNNING
    assert scheduler.num_waiting == num_waiting
    return scheduler


def step(scheduler: ContinuousScheduler) -> None:
    """Schedule once, and commit fake tokens in place of a model."""
    chunks = scheduler.schedule()
    scheduler.commit(chunks, [SampledToken(7)] * len(chunks))


def main() -> None:
    """Measure, print, and write JSON if a file was given."""
    schedulers = {f"{num_waiting:,} waiting": crowd(num_waiting) for num_waiting in QUEUES}
    seconds = interleaved(
        {name: lambda each=each: step(each) for name, each in schedulers.items()}, REPEATS
    )
    medians = {name: statistics.median(times) * 1e3 for name, times in seconds.items()}
    for name, milliseconds in medians.items():
        print(f"{NUM_RUNNING} running, {name:<16} {milliseconds:6.3f} ms per step")
    short, long = medians.values()
    print(f"{'the longer queue costs':<29} {long / short:6.2f}x")
    path = json_option()
    if path is not None:
        settings = {"running": NUM_RUNNING, "repeats": REPEATS}
        write_results(path, {**settings, "milliseconds": medians, "ratio": long / short})


if __name__ == "__main__":
    main()
