"""Cases of chapter 00's exercises, drawn by a seed."""

from random import Random
from typing import Any

from minigen_course.grading.varied import Varied
from minigen_course.lab.cost_model import GB, config_of, kv_bytes_per_token, num_parameters

MB = 1e6

NAMES = ("SmolLM2-1.7B", "Qwen3-0.6B", "Llama-2-7B", "Llama-3-8B", "Llama-3-70B")


def _machine(random: Random) -> tuple[dict[str, Any], float, float]:
    """Return a model with its bits and working memory, what is kept for them, and KV bytes."""
    given: dict[str, Any] = {
        "model": random.choice(NAMES),
        "bits": random.choice((4.5, 5, 8, 16)),
        "working_mb": random.choice((None, 300, 600, 2000)),
    }
    config, working = config_of(given["model"]), given["working_mb"]
    kept = num_parameters(config) * given["bits"] / 8 + (GB if working is None else working * MB)
    return given, kept, kv_bytes_per_token(config)


def _most_sequences(random: Random) -> dict[str, Any]:
    given, kept, of_a_token = _machine(random)
    context = 1000 * random.randint(1, 8)
    memories = [kept * random.uniform(0.5, 0.9)]
    for most in (3, 30):
        sequences = random.randint(most // 3, most) + random.uniform(0.6, 0.9)
        memories.append(kept + sequences * of_a_token * context)
    random.shuffle(memories)
    return given | {"context": context, "memories_mb": [round(each / MB) for each in memories]}


def _counted(
    part: Any,
    model: str,
    bits: float,
    working_mb: int | None,
    context: int,
    memories_mb: list[int],
) -> Any:
    """Count the sequences that fit into each of these memories; an MB is 10^6 bytes.

    The configuration is `config_of(model)`; `working_mb = None` means that `working` is left out.
    """
    working = () if working_mb is None else (working_mb * MB,)
    return [part(config_of(model), bits, each * MB, context, *working) for each in memories_mb]


def _first_that_fit(random: Random) -> dict[str, Any]:
    given, kept, of_a_token = _machine(random)
    lengths = [100 * random.randint(3, 15) for _ in range(random.randint(1, 3))]
    free = sum(lengths) + 100 * random.randint(5, 20) + 50
    too_long = free - sum(lengths) + 50 + 100 * random.randint(1, 20)
    short = [100 * random.randint(1, 4) for _ in range(random.randint(1, 3))]
    lengths = [*lengths, too_long, *short]
    memory = kept + of_a_token * (free if random.random() < 0.8 else sum(lengths) + 250)
    return given | {"memory_mb": round(memory / MB), "lengths": lengths}


def _admitted(
    part: Any,
    model: str,
    bits: float,
    working_mb: int | None,
    memory_mb: int,
    lengths: list[int],
) -> Any:
    """Count the requests that fit, and look whether the list is as it was; an MB is 10^6 bytes.

    The configuration is `config_of(model)`; `working_mb = None` means that `working` is left out.
    """
    working, given = () if working_mb is None else (working_mb * MB,), list(lengths)
    found = part(config_of(model), bits, memory_mb * MB, given, *working)
    return {"count": found, "list unchanged": given == lengths}


VARIED = {
    "most_sequences": Varied(
        "model, bits, context, working memory, and three memories, one of them too small",
        _most_sequences,
        _counted,
    ),
    "first_that_fit": Varied(
        "model, bits, working memory, memory, lengths", _first_that_fit, _admitted
    ),
}
