"""The engines that are compared, each with one format of the model's weights."""

from dataclasses import dataclass

from benchmarks.peers import models
from benchmarks.peers.environments import OWN


@dataclass(frozen=True)
class Engine:
    """A name, the module that measures the engine, and what it reads.

    `environment` names the environment whose Python runs the engine. At most
    `at_once` requests run together, which is the best count found for each engine. `mixed` says
    whether the engine gets the 128 mixed requests, the longest load: engines with continuous
    batching do, but of llama.cpp only the format that is its fastest with many requests.
    """

    name: str
    worker: str
    model: str
    environment: str
    weights: str = "auto"
    at_once: int = 32
    mixed: bool = True


def minigen(weights: str) -> Engine:
    """minigen, from the model's file as it is."""
    worker = "benchmarks.peers.workers.minigen_worker"
    return Engine(f"minigen {weights}", worker, models.GGUF, OWN, weights=weights)


def peer(name: str, environment: str, model: str, at_once: int = 32, mixed: bool = True) -> Engine:
    """Another engine; the module of its worker is named after its environment."""
    worker = f"benchmarks.peers.workers.{environment}_worker"
    return Engine(name, worker, model, environment, at_once=at_once, mixed=mixed)


ENGINES = (
    minigen("auto"),
    minigen("bfloat16"),
    minigen("int8"),
    peer("llama.cpp bf16", "llama_cpp", models.BFLOAT16_GGUF, mixed=False),
    peer("llama.cpp Q8_0", "llama_cpp", models.Q8_0, mixed=False),
    peer("llama.cpp Q4_0", "llama_cpp", models.Q4_0),
    peer("llama.cpp Q4_1", "llama_cpp", models.GGUF, mixed=False),
    peer("onnxruntime-genai int4", "onnxruntime_genai", models.ONNX_INT4, mixed=False),
    peer("vLLM bf16", "vllm_cpu", models.DIRECTORY, at_once=128),
    peer("vLLM W8A8", "vllm_cpu", models.INT8_DIRECTORY, at_once=128),
    peer("OpenVINO GenAI Q8_0", "openvino_genai", models.Q8_0),
    peer("transformers bf16", "transformers", models.DIRECTORY, mixed=False),
)


PRETENDING = {OWN, "llama_cpp"}  # the environments of engines that can pretend a processor


def chosen(names: str | None, pretended: str | None = None) -> list[Engine]:
    """Return the engines whose names start with one of the comma-separated prefixes; None: all.

    If a processor is pretended, only engines that can do so are returned.
    """
    begins = ("",) if names is None else tuple(name.strip() for name in names.split(","))
    return [
        engine
        for engine in ENGINES
        if engine.name.startswith(begins)
        and (pretended is None or engine.environment in PRETENDING)
    ]
