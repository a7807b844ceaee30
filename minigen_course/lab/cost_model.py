"""The cost of a model, from its configuration alone: parameters, memory, FLOPs, step time.

The configurations are those of the models' publishers (config.json on the Hugging Face hub). A GB
is 10^9 bytes. Source: Williams, Waterman and Patterson 2009, "Roofline".
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minigen.checkpoint.config_json import read_config
from minigen.checkpoint.model_config import ModelConfig
from minigen.model.transformer import expected_tensors
from minigen.sequence import ScheduledChunk
from minigen_course.figures.show import best_seconds

GB = 1e9

# Bits per weight, including its share of the scales.
BITS = {
    "float32": 32.0,
    "bfloat16": 16.0,
    "int8": 8.0,
    "Q4_0: 4 bits and a scale for 32": 4.5,
    "4 bits, scales forgotten": 4.0,
}


def _raw(sizes: tuple[int, int, int, int, int, int, bool], **more: Any) -> dict[str, Any]:
    """Return the content of a config.json."""
    names = (
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "intermediate_size", "tie_word_embeddings"),
    )
    common = {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}
    return common | dict(zip(names, sizes, strict=True)) | more


MODELS: dict[str, dict[str, Any]] = {
    # vocabulary, hidden, layers, query heads, KV heads, ffn, tied embeddings
    "SmolLM2-135M": _raw((49152, 576, 30, 9, 3, 1536, True)),
    "SmolLM2-1.7B": _raw((49152, 2048, 24, 32, 32, 8192, True)),
    "Qwen3-0.6B": _raw((151936, 1024, 28, 16, 8, 3072, True), model_type="qwen3", head_dim=128),
    "Llama-2-7B": _raw((32000, 4096, 32, 32, 32, 11008, False)),
    "Llama-3-8B": _raw((128256, 4096, 32, 32, 8, 14336, False)),
    "Llama-3-70B": _raw((128256, 8192, 80, 64, 8, 28672, False)),
}


def config_of(name_or_json: str) -> ModelConfig:
    """Return the configuration of a model in `MODELS`, or of the text of a config.json.

    Raises `ValueError` for any other text, and `ConfigError` for a model of another family.
    """
    if name_or_json in MODELS:
        return read_config(MODELS[name_or_json], name_or_json)
    try:
        raw = json.loads(name_or_json)
    except ValueError:
        known = ", ".join(MODELS)
        raise ValueError(f"Give one of {known}, or the text of a config.json.") from None
    return read_config(raw, "the config.json")


def num_parameters(config: ModelConfig) -> int:
    """Return the number of parameters; tied embeddings count once."""
    return sum(math.prod(shape) for shape in expected_tensors(config).values())


def kv_bytes_per_token(config: ModelConfig, kv_bits: float = 16) -> float:
    """Return the bytes of one token's keys and values in the KV cache of all layers."""
    return config.kv_bytes_per_token * kv_bits / 16


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of the weights, of the KV cache of all sequences, and of a step's working memory."""

    weights: float
    kv: float
    working: float

    @property
    def total(self) -> float:
        """The sum of all three."""
        return self.weights + self.kv + self.working


def memory_needed(
    config: ModelConfig, bits: float, sequences: int, context: int, working: float = GB
) -> MemoryBudget:
    """Return the memory for `sequences` of `context` tokens each, with a 16-bit KV cache."""
    weights = num_parameters(config) * bits / 8
    return MemoryBudget(weights, kv_bytes_per_token(config) * sequences * context, working)


def most_sequences(
    config: ModelConfig, bits: float, memory: float, context: int, working: float = GB
) -> int:
    """Return how many sequences of `context` tokens fit into `memory` bytes, at least 0.

    Each weight has `bits` bits, and the KV cache 16 bits per number. `working` bytes are kept for
    what a step works in.
    """
    free = memory - working - num_parameters(config) * bits / 8
    return max(0, int(free // (kv_bytes_per_token(config) * context)))


def first_that_fit(
    config: ModelConfig, bits: float, memory: float, lengths: Sequence[int], working: float = GB
) -> int:
    """Return how many of the first requests fit into `memory` bytes together, at least 0.

    `lengths` has the tokens of each request, in the order of arrival. The first request that does
    not fit ends the count, even if a shorter one behind it would fit. Otherwise as in
    `most_sequences`.
    """
    free = memory - working - num_parameters(config) * bits / 8
    for count, length in enumerate(lengths):
        free -= kv_bytes_per_token(config) * length
        if free < 0:
            return count
    return len(lengths)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Llama-type model that determine its parameters, FLOPs and memory."""

    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool

    @classmethod
    def of(cls, config: ModelConfig) -> "ModelShape":
        """Return the shape that a configuration describes."""
        return cls(
            hidden=config.hidden,
            layers=config.num_layers,
            q_heads=config.q_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            ffn=config.ffn,
            vocab=config.vocab_size,
            tied=config.tied_embeddings,
        )

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(part.parameters for part in parameter_budget(self, 1))

    @property
    def multiplied(self) -> int:
        """Parameters that every token is multiplied with: all but norms and embedding lookup."""
        head = self.vocab * self.hidden
        linears = (part.parameters for part in parameter_budget(self, 1) if part.name in LINEARS)
        return head + sum(linears)

    def flops(self, context: int) -> int:
        """Return the FLOPs of one token that attends to `context` tokens, including itself."""
        return sum(part.flops for part in parameter_budget(self, context))

    def kv_numbers(self, context: int) -> int:
        """Return how many numbers the keys and values of `context` tokens have."""
        return 2 * self.layers * self.kv_heads * self.head_dim * context


@dataclass(frozen=True)
class Part:
    """A kind of tensor or work: its parameters, and its FLOPs for one token."""

    name: str
    parameters: int
    flops: int


LINEARS = ("attention's products", "feed-forward")

SHAPES = {name: ModelShape.of(config_of(name)) for name in MODELS}


def parameter_budget(shape: ModelShape, context: int) -> tuple[Part, ...]:
    """Return a model's parts, from embedding to head, for a token that attends to `context` tokens.

    FLOPs count the matrix products; norms, rotations and softmax would add a few thousandths. A
    head that shares the embedding's weights has no parameters of its own. Biases and per-head norms
    are left out.
    """
    width, kv_width = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    products = shape.layers * shape.hidden * (2 * width + 2 * kv_width)
    feed_forward = shape.layers * 3 * shape.hidden * shape.ffn
    table = shape.vocab * shape.hidden
    return (
        Part("embedding", table, 0),
        Part(LINEARS[0], products, 2 * products),
        Part("attention's context", 0, 2 * 2 * shape.layers * width * context),
        Part(LINEARS[1], feed_forward, 2 * feed_forward),
        Part("norms", (2 * shape.layers + 1) * shape.hidden, 0),
        Part("head", 0 if shape.tied else table, 2 * table),
    )


REPEATS = 20  # enough that other programs do not disturb all of them


@dataclass(frozen=True)
class Machine:
    """A processor's limits: memory bandwidth in bytes per second, and FLOPs per second.

    `memory` is its size in bytes, None if unknown.
    """

    name: str
    bandwidth: float
    flops: float
    memory: float | None = None

    @property
    def ridge(self) -> float:
        """The intensity (FLOPs per byte) at which memory and arithmetic take the same time."""
        return self.flops / self.bandwidth


MACHINES: dict[str, Machine] = {  # dense bfloat16, from the makers' data sheets
    each.name: each
    for each in (
        Machine("H100 SXM", 3350e9, 989e12, 80e9),
        Machine("H200", 4800e9, 989e12, 141e9),
        Machine("A100 SXM 80 GB", 2039e9, 312e12, 80e9),
        Machine("RTX 4090", 1008e9, 165e12, 24e9),
        Machine("L4", 300e9, 121e12, 24e9),
        Machine("AMD MI300X", 5300e9, 1307e12, 192e9),
        Machine("AMD RX 7900 XTX", 960e9, 123e12, 24e9),
    )
}

# Processor and GPU share one memory. Apple states the bandwidth; the FLOPs are 76 GPU cores x 128
# lanes x 2 x 1.4 GHz, in float32, because Apple states none.
UNIFIED: dict[str, Machine] = {"Apple M2 Ultra": Machine("Apple M2 Ultra", 800e9, 27.2e12, 192e9)}


@dataclass(frozen=True)
class Step:
    """The bytes that one forward pass reads, and the FLOPs that it computes."""

    weight_bytes: float
    kv_bytes: float
    flops: float

    @property
    def num_bytes(self) -> float:
        """All bytes that are read from memory."""
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """The arithmetic intensity: FLOPs per byte read."""
        return self.flops / self.num_bytes

    def seconds(self, machine: Machine, overhead: float = 0.0) -> float:
        """Return max(bytes / bandwidth, FLOPs / peak) + overhead in seconds (step-time model)."""
        return max(self.num_bytes / machine.bandwidth, self.flops / machine.flops) + overhead

    def share_of_compute(self, machine: Machine) -> float:
        """Return the share of the machine's arithmetic that the step uses, from 0 to 1."""
        return self.flops / machine.flops / self.seconds(machine)


def decode_step(
    shape: ModelShape, batch: int, context: int, weight_bits: float, kv_bits: float = 16
) -> Step:
    """Return the cost of one new token for each of `batch` sequences of `context` tokens."""
    return Step(
        weight_bytes=shape.multiplied * weight_bits / 8,
        kv_bytes=batch * shape.kv_numbers(context) * kv_bits / 8,
        flops=batch * shape.flops(context),
    )


def prefill_step(
    shape: ModelShape, num_tokens: int, weight_bits: float, kv_bits: float = 16
) -> Step:
    """Return the cost of a whole prompt in one step, with logits for its last token only."""
    head = 2 * shape.vocab * shape.hidden
    attention = sum(shape.flops(seen) - shape.flops(0) for seen in range(1, num_tokens + 1))
    return Step(
        weight_bytes=shape.multiplied * weight_bits / 8,
        kv_bytes=shape.kv_numbers(num_tokens) * kv_bits / 8,
        flops=num_tokens * (shape.flops(0) - head) + head + attention,
    )


@dataclass(frozen=True)
class StepTime:
    """The time of a step in seconds: max(read, tokens x token) + overhead, from chapter 17.

    `read` is the time to read the weights; `token` is the time of one token's arithmetic. The
    reading of keys and values is left out.
    """

    read: float
    token: float
    overhead: float = 0.0

    def __call__(self, num_tokens: int) -> float:
        """Return the seconds of a step of `num_tokens`."""
        return max(self.read, num_tokens * self.token) + self.overhead

    def seconds(self, chunks: Sequence[ScheduledChunk]) -> float:
        """Return the seconds of a step that computes these chunks."""
        return self(sum(chunk.num_tokens for chunk in chunks))


@dataclass(frozen=True)
class Card:
    """A model in bfloat16 on a machine; `overhead` is added per step, in seconds (chapter 17).

    Each number of the KV cache has `kv_bits` bits; scales of a cache in 8 bits are left out.
    """

    shape: ModelShape = SHAPES["Llama-3-8B"]
    machine: Machine = MACHINES["L4"]
    overhead: float = 2e-3
    kv_bits: float = 16

    def seconds(self, chunks: Sequence[ScheduledChunk]) -> float:
        """Return a step's seconds: the longer of its bytes and its FLOPs, plus the overhead.

        Simpler than `prefill_step`, and longer for prompts: each token of a chunk counts the output
        head and attends to the whole context, though a prompt needs the head for its last token
        only, and each token sees only those before it.
        """
        shape = self.shape
        a_token, kv_bytes = shape.flops(0), shape.kv_numbers(1) * self.kv_bits / 8
        a_pair = shape.flops(1) - a_token
        flops, context_tokens = 0, 0
        for chunk in chunks:
            context = chunk.sequence.num_computed + chunk.num_tokens
            flops += chunk.num_tokens * (a_token + context * a_pair)
            context_tokens += context
        step = Step(2 * shape.multiplied, context_tokens * kv_bytes, flops)
        return step.seconds(self.machine, self.overhead)


def measure_machine(
    bandwidth: float, dtype: torch.dtype = torch.float32, size: int = 1024
) -> Machine:
    """Return this machine with its measured `bandwidth`, in bytes per second, and its FLOP/s.

    The FLOP/s are those of a product of two square matrices of `size`: the best of twenty tries.
    """
    left, right = (torch.ones(size, size, dtype=dtype) for _ in range(2))
    flops = 2 * size**3 / best_seconds(lambda: left @ right, REPEATS)
    return Machine("this machine", bandwidth, flops)
