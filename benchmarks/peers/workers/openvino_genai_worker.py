"""OpenVINO GenAI, which reads GGUF itself, through its pipeline with continuous batching."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.loads import Request
from benchmarks.peers.workers.harness import serve


class OpenVINO:
    """A pipeline that is stepped explicitly, so that tokens are seen as they are computed."""

    def __init__(self, job: dict[str, Any]):
        config = openvino_genai.SchedulerConfig()
        config.cache_size = 1  # GB
        config.max_num_seqs, config.max_num_batched_tokens = job["at_once"], 2048
        config.enable_prefix_caching = False
        settings = {"INFERENCE_NUM_THREADS": job["threads"]}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            job["model"], config, "CPU", settings
        )
        self.num_requests = 0

    def versions(self) -> dict[str, str]:
        """Return OpenVINO's own version, and its settings."""
        return {"openvino": openvino.__version__, "prefix cache": "off"}

    def stream(self, prompt: list[int], num_tokens: int) -> Iterator[int]:
        """Yield token ids as they are computed."""
        handle = self._add({"prompt": prompt, "num_tokens": num_tokens})
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            yield from self._read(handle)

    def together(self, requests: list[Request]) -> list[list[int]]:
        """Answer all requests with continuous batching."""
        handles = [self._add(each) for each in requests]
        answers: list[list[int]] = [[] for _ in handles]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            for handle, answer in zip(handles, answers, strict=True):
                answer += self._read(handle)
        return answers

    def _add(self, request: Request) -> Any:
        config = openvino_genai.GenerationConfig()
        config.do_sample, config.ignore_eos = False, True
        config.max_new_tokens = config.min_new_tokens = request["num_tokens"]
        self.num_requests += 1
        tokens = openvino.Tensor(np.array([request["prompt"]], np.int64))
        return self.pipeline.add_request(self.num_requests, tokens, config)

    def _read(self, handle: Any) -> list[int]:
        tokens: list[int] = []
        while handle.can_read():
            for output in handle.read().values():
                tokens += output.generated_ids
        return tokens


if __name__ == "__main__":
    serve(OpenVINO)
