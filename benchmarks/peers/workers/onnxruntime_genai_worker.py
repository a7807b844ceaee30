"""onnxruntime-genai: one generator per batch; batches are static.

Its own engine of requests needs a paged cache, which the builder's CPU models do not have.
Therefore requests run in batches of prompts with similar lengths, and a batch runs until its
longest answer ends.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime_genai as og

from benchmarks.peers.loads import Request
from benchmarks.peers.workers.harness import serve
from benchmarks.peers.workers.static import in_batches

PAD = 0  # no prompt contains it


class OnnxruntimeGenai:
    """A model on the CPU with a fixed number of threads."""

    def __init__(self, job: dict[str, Any]):
        self.at_once = job["at_once"]
        config, threads = og.Config(job["model"]), job["threads"]
        options = {"session_options": {"intra_op_num_threads": threads}}
        config.overlay(json.dumps({"model": {"pad_token_id": PAD, "decoder": options}}))
        self.model = og.Model(config)

    def versions(self) -> dict[str, str]:
        """Return how batches are made."""
        return {"batches": f"static, at most {self.at_once}"}

    def stream(self, prompt: list[int], num_tokens: int) -> Iterator[int]:
        """Yield token ids as they are computed."""
        for tokens in self._steps([prompt], num_tokens):
            yield tokens[0]

    def together(self, requests: list[Request]) -> list[list[int]]:
        """Answer in static batches."""
        return in_batches(requests, self.at_once, self._batch)

    def _batch(self, requests: list[Request]) -> list[list[int]]:
        longest = max(each["num_tokens"] for each in requests)
        rows = zip(*self._steps([each["prompt"] for each in requests], longest), strict=True)
        return [list(row[: each["num_tokens"]]) for row, each in zip(rows, requests, strict=True)]

    def _steps(self, prompts: list[list[int]], num_tokens: int) -> Iterator[list[int]]:
        """Yield the next token of every prompt, step by step, past the model's end."""
        longest = max(map(len, prompts))
        rows = [prompt + [PAD] * (longest - len(prompt)) for prompt in prompts]
        params = og.GeneratorParams(self.model)
        length = longest + num_tokens
        params.set_search_options(
            batch_size=len(rows), max_length=length, min_length=length, do_sample=False
        )
        generator = og.Generator(self.model, params)
        generator.append_tokens(np.array(rows, np.int32))
        for _ in range(num_tokens):
            generator.generate_next_token()
            yield generator.get_next_tokens().tolist()


if __name__ == "__main__":
    serve(OnnxruntimeGenai)
