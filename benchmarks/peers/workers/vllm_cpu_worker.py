"""vLLM on a CPU, through its engine's own steps, so that tokens are seen as they are computed.

It uses one process: with the engine in a separate process vLLM would compete with itself for two
cores. Its start takes long because it compiles the model; it caches the compiled code for the next
start.
"""

import os

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

from collections.abc import Iterator
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from benchmarks.peers.loads import Request
from benchmarks.peers.workers.harness import serve


class VLLM:
    """An engine whose requests are numbered."""

    def __init__(self, job: dict[str, Any]):
        arguments = EngineArgs(
            model=job["model"],
            dtype=job["dtype"],
            max_model_len=2048,
            max_num_seqs=job["at_once"],
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self.engine = LLMEngine.from_engine_args(arguments)
        self.num_requests = 0

    def versions(self) -> dict[str, str]:
        """Return its settings."""
        return {"mode": "compiled", "prefix cache": "off", "cache": "1 GiB"}

    def stream(self, prompt: list[int], num_tokens: int) -> Iterator[int]:
        """Yield token ids as they are computed."""
        self._add({"prompt": prompt, "num_tokens": num_tokens})
        for _, token_ids in self._steps():
            yield from token_ids

    def together(self, requests: list[Request]) -> list[list[int]]:
        """Answer all requests with continuous batching."""
        answers: dict[str, list[int]] = {self._add(each): [] for each in requests}
        for request_id, token_ids in self._steps():
            answers[request_id] += token_ids
        return list(answers.values())

    def _add(self, request: Request) -> str:
        self.num_requests += 1
        name, count = str(self.num_requests), request["num_tokens"]
        params = SamplingParams(
            temperature=0,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.engine.add_request(name, {"prompt_token_ids": request["prompt"]}, params)
        return name

    def _steps(self) -> Iterator[tuple[str, list[int]]]:
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                yield output.request_id, list(output.outputs[0].token_ids)


if __name__ == "__main__":
    serve(VLLM)
