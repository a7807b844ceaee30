"""Exercise most_sequences of chapter 00 (warm-up, 5 points, about 10 minutes).

Return how many sequences of `context` tokens fit into `memory` bytes at once, with a KV cache
of 16 bits per number. Each weight has `bits` bits, and `working` bytes are kept for what a step
works in. A sequence that fits only partly does not count, and the count is never negative.
`num_parameters` and `kv_bytes_per_token` in `minigen_course.lab.cost_model` compute the sizes
from the configuration.

Check it:     minigen check exercises/00_map/most_sequences.py
With a hint:  minigen check exercises/00_map/most_sequences.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen_course.lab.cost_model import config_of
    from minigen_course.figures.explore import picture
    from minigen_course.ch00_map.figures import memory_budget

    with using(0, most_sequences=mine):
        drawn = memory_budget(config_of("Llama-3-8B"), 16, 24, sequences=8, context=4096)
    picture(drawn, "The budget of Llama-3-8B; the curve is your function's.")

Harder: Requests rarely have equal lengths: the exercise `first_that_fit` takes a list of
lengths, and is checked, too.
"""

# exercise: minigen_course.lab.cost_model.most_sequences
from minigen.checkpoint.model_config import ModelConfig
from minigen_course.lab.cost_model import GB


def most_sequences(
    config: ModelConfig, bits: float, memory: float, context: int, working: float = GB
) -> int:
    """Return how many sequences of `context` tokens fit into `memory` bytes, at least 0.

    Each weight has `bits` bits, and the KV cache 16 bits per number. `working` bytes are kept for
    what a step works in.
    """
    raise NotImplementedError  # your turn
