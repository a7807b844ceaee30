"""transformers' `generate`, with static batches."""

import queue
import threading
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from benchmarks.peers.loads import Request
from benchmarks.peers.workers.harness import serve
from benchmarks.peers.workers.static import in_batches

PAD = 0


class Tokens(BaseStreamer):
    """Passes tokens on from the thread that generates; the prompt comes first."""

    def __init__(self) -> None:
        self.queue: queue.Queue[torch.Tensor] = queue.Queue()

    def put(self, value: torch.Tensor) -> None:
        """Take generated tokens."""
        self.queue.put(value)

    def end(self) -> None:
        """Do nothing."""


class Transformers:
    """A model in a type of torch, with torch's own attention."""

    def __init__(self, job: dict[str, Any]):
        torch.set_num_threads(job["threads"])
        self.at_once = job["at_once"]
        self.model = AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=getattr(torch, job["dtype"]), attn_implementation="sdpa"
        )

    def versions(self) -> dict[str, str]:
        """Return how batches are made."""
        return {"batches": f"static, at most {self.at_once}", "attention": "sdpa"}

    def stream(self, prompt: list[int], num_tokens: int) -> Iterator[int]:
        """Yield token ids as they are computed."""
        tokens = Tokens()
        arguments = ([prompt], num_tokens, tokens)
        thread = threading.Thread(target=self._generate, args=arguments)
        thread.start()
        tokens.queue.get()
        for _ in range(num_tokens):
            yield int(tokens.queue.get())
        thread.join()

    def together(self, requests: list[Request]) -> list[list[int]]:
        """Answer in static batches."""
        return in_batches(requests, self.at_once, self._batch)

    def _batch(self, requests: list[Request]) -> list[list[int]]:
        longest = max(each["num_tokens"] for each in requests)
        rows = self._generate([each["prompt"] for each in requests], longest)
        return [row[: each["num_tokens"]] for row, each in zip(rows, requests, strict=True)]

    def _generate(
        self, prompts: list[list[int]], num_tokens: int, streamer: BaseStreamer | None = None
    ) -> list[list[int]]:
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        rows = [[PAD] * count + prompt for count, prompt in zip(padding, prompts, strict=True)]
        mask = [[0] * count + [1] * (longest - count) for count in padding]
        found = self.model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=PAD,
            do_sample=False,
            streamer=streamer,
        )
        answers: list[list[int]] = found[:, longest:].tolist()
        return answers


if __name__ == "__main__":
    serve(Transformers)
