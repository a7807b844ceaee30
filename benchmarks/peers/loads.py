"""The loads of every engine, as plain data: seeded, and the same for all engines in a round.

A load has a way of being measured (`workers/harness.py`), requests that warm an engine up, and
samples; a sample is a list of requests. No two prompts share a prefix, so no prefix cache helps;
all answers are greedy and continue past the model's end. Standard library only.
"""

import random
from typing import Any

Request = dict[str, Any]  # "prompt": token ids; "num_tokens": length of the answer
Load = dict[str, Any]

DECODE, PREFILL_512, PREFILL_1024, TOGETHER, MIXED = (
    "decode",
    "prefill 512",
    "prefill 1024",
    "32 requests",
    "128 mixed requests",
)
START, MEMORY_ALONE, MEMORY_ALL = "start", "memory of one stream", "memory of all loads"
UNITS = {
    DECODE: "tokens/s",
    PREFILL_512: "tokens/s",
    PREFILL_1024: "tokens/s",
    TOGETHER: "tokens/s",
    MIXED: "tokens/s",
    START: "s",
    MEMORY_ALONE: "MB",
    MEMORY_ALL: "MB",
}
LESS_IS_BETTER = {START, MEMORY_ALONE, MEMORY_ALL}
ORDINARY = range(1000, 40_000)  # token ids of ordinary tokens


def loads(seed: int, scale: float = 1.0) -> list[Load]:
    """Return the loads of one round; a `scale` below 1 shortens all, to try things out.

    A prefill of a slow engine takes two seconds, and 128 mixed requests take 80, so there are few
    samples and many rounds.
    """
    rng = random.Random(seed)

    def size(number: int) -> int:
        return max(2, round(number * scale))

    def alike(count: int, prompt: int, answer: int) -> list[Request]:
        return [request(rng, size(prompt), size(answer)) for _ in range(count)]

    def first_tokens(count: int, num_tokens: int) -> list[Request]:
        return [request(rng, size(num_tokens), 1) for _ in range(count)]

    def mixed() -> list[Request]:
        return [
            request(rng, size(rng.randint(16, 512)), size(rng.randint(16, 128)))
            for _ in range(size(128))
        ]

    decode = [alike(1, 64, 128) for _ in range(3)]
    prefill_512 = [first_tokens(2, 512) for _ in range(2)]
    prefill_1024 = [first_tokens(1, 1024) for _ in range(2)]
    together = [alike(size(32), 64, 64) for _ in range(2)]
    return [
        load(DECODE, "decode", alike(1, 64, 16), decode),
        load(PREFILL_512, "prefill", first_tokens(1, 512), prefill_512),
        load(PREFILL_1024, "prefill", first_tokens(1, 1024), prefill_1024),
        load(TOGETHER, "together", alike(size(32), 64, 8), together),
        load(MIXED, "together", [], [mixed()]),
    ]


def load(name: str, way: str, warm_up: list[Request], samples: list[list[Request]]) -> Load:
    """Return a named load; its `warm_up` requests, if any, run before its samples, uncounted."""
    return {"name": name, "way": way, "warm_up": warm_up, "samples": samples}


def request(rng: random.Random, num_prompt_tokens: int, num_tokens: int) -> Request:
    """Return a prompt of ordinary tokens, and the length of its answer."""
    prompt = [rng.choice(ORDINARY) for _ in range(num_prompt_tokens)]
    return {"prompt": prompt, "num_tokens": num_tokens}
