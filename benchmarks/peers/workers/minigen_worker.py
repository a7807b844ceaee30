"""minigen, through `LLM` as users call it."""

from collections.abc import Iterator
from typing import Any

from benchmarks.peers.loads import Request
from benchmarks.peers.workers.harness import Refused, serve
from minigen import LLM, MinigenError, SamplingParams


class Minigen:
    """An `LLM` with the maximum number of sequences that the job gives."""

    def __init__(self, job: dict[str, Any]):
        try:
            self.llm = LLM.load(
                job["model"],
                weights=job["weights"],
                threads=job["threads"],
                max_num_seqs=job["at_once"],
                enable_prefix_caching=False,
            )
        except MinigenError as error:
            raise Refused(str(error)) from None

    def versions(self) -> dict[str, str]:
        """Return the choice for each part."""
        shown = ("weights", "runner", "linear", "attention", "threads")
        return {name: text for name, text in self.llm.describe().items() if name in shown}

    def stream(self, prompt: list[int], num_tokens: int) -> Iterator[int]:
        """Yield token ids as they are computed."""
        return (each.token_id for each in self.llm.stream_deltas([prompt], exactly(num_tokens)))

    def together(self, requests: list[Request]) -> list[list[int]]:
        """Answer all requests with continuous batching."""
        params = [exactly(each["num_tokens"]) for each in requests]
        outputs = self.llm.generate([each["prompt"] for each in requests], params, progress=False)
        return [output.token_ids for output in outputs]


def exactly(num_tokens: int) -> SamplingParams:
    """Return greedy params for exactly `num_tokens` tokens; the model's own end is ignored."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


if __name__ == "__main__":
    serve(Minigen)
