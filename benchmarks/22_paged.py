"""How much KV memory is idle, paged and reserved: `python benchmarks/22_paged.py`.

The default model answers the same requests twice, 8 at a time. Each request allows an answer of
1,024 tokens, but the answers end earlier, as is common in practice. After every step the slots that
running sequences own are compared with the tokens that they hold. Continuous batching allocates a
block when one is needed; static batching, in this benchmark, reserves the blocks for the longest
answer at the start. The prediction for paging: every fill of a sequence's last block is equally
likely, so (block_size - 1) / 2 slots per sequence are idle.
"""

import random
import statistics

from common import json_option, random_prompts, write_results

from minigen import LLM, SamplingParams
from minigen.sequence import Sequence
from minigen.trace.events import Event, EventKind

NUM_REQUESTS = 48
AT_ONCE = 8
BLOCK_SIZE = 16
ALLOWED = 1024
MEAN_LIVE = 250


def lengths() -> list[tuple[int, int]]:
    """Return (prompt, answer) tokens of each request; a sequence holds 250 tokens on average."""
    rng = random.Random(1)
    pairs = []
    for _ in range(NUM_REQUESTS):
        answer = rng.randrange(40, 120)
        pairs.append((rng.randrange(MEAN_LIVE - 100, MEAN_LIVE + 101) - answer // 2, answer))
    return pairs


def measure(scheduler: str) -> dict[str, float]:
    """Run all requests, and look at the memory after every step."""
    llm = LLM.load(
        max_num_seqs=AT_ONCE,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=False,
        scheduler=scheduler,
    )
    engine, manager = llm.engine, llm.engine.scheduler.manager  # type: ignore[attr-defined]
    wanted: dict[int, int] = {}
    for sequence_id, (prompt, answer) in enumerate(lengths()):
        (prompt_ids,) = random_prompts(1, prompt, seed=sequence_id)
        params = SamplingParams(temperature=0, max_tokens=ALLOWED, ignore_eos=True)
        engine.add(Sequence(sequence_id, tuple(prompt_ids), params, 0, ALLOWED, frozenset()))
        wanted[sequence_id] = answer
    owned, held, sequences = [], [], []

    def look(event: Event) -> None:
        if event.kind is EventKind.STEP and manager.rows:
            owned.append(sum(len(each.block_ids) * BLOCK_SIZE for each in manager.rows))
            held.append(sum(each.num_computed for each in manager.rows))
            sequences.append(len(manager.rows))

    llm.trace.subscribe(look)
    while engine.has_work():
        for sequence, _ in engine.step():
            if len(sequence.output_ids) == wanted[sequence.sequence_id]:
                engine.finish(sequence.sequence_id)
    idle = sum(owned) - sum(held)
    return {
        "steps": len(owned),
        "mean_live_tokens": sum(held) / sum(sequences),
        "idle_slots_per_sequence": idle / sum(sequences),
        "waste": idle / sum(owned),
        "mean_running": statistics.mean(sequences),
    }


def main() -> None:
    """Measure, print, and write JSON if a file was given."""
    found = {"paged": measure("continuous"), "reserved": measure("static")}
    predicted = (BLOCK_SIZE - 1) / 2
    for name, numbers in found.items():
        print(
            f"{name:<9} {numbers['waste']:6.1%} of the owned slots idle, "
            f"{numbers['idle_slots_per_sequence']:7.2f} per sequence of "
            f"{numbers['mean_live_tokens']:.0f} tokens"
        )
    ratio = found["paged"]["idle_slots_per_sequence"] / predicted
    print(f"paged against the predicted {predicted} slots per sequence: {ratio:.3f}")
    path = json_option()
    if path is not None:
        settings = {"requests": NUM_REQUESTS, "at_once": AT_ONCE, "block_size": BLOCK_SIZE}
        write_results(
            path,
            {
                "settings": {**settings, "allowed_output": ALLOWED},
                "predicted_idle_slots_per_sequence": predicted,
                "measured_against_predicted": ratio,
                **found,
            },
        )


if __name__ == "__main__":
    main()
