"""A fake engine that answers at once, or fails as its job's `weights` ask; not a test itself."""

from collections.abc import Iterator
from typing import Any

from benchmarks.peers.loads import Request
from benchmarks.peers.workers.harness import Refused, serve


class FakeEngine:
    """Answers every prompt with its last token, repeated."""

    def __init__(self, job: dict[str, Any]):
        self.short = job["weights"] == "short"
        if job["weights"] == "crash":
            raise ValueError("the fake engine broke")
        if job["weights"] == "refuse":
            raise Refused("There are no such weights.")
        print("noise on stdout, as libraries make it")

    def versions(self) -> dict[str, str]:
        return {"mode": "fake"}

    def stream(self, prompt: list[int], num_tokens: int) -> Iterator[int]:
        yield from [prompt[-1]] * num_tokens

    def together(self, requests: list[Request]) -> list[list[int]]:
        lengths = [each["num_tokens"] - self.short for each in requests]
        answers = zip(requests, lengths, strict=True)
        return [list(self.stream(each["prompt"], length)) for each, length in answers]


if __name__ == "__main__":
    serve(FakeEngine)
