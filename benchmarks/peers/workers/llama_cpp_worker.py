"""llama.cpp through its C interface, with continuous batching as in llama-server.

Its settings were the best of those tried on two cores of a Zen 4: with and without flash attention,
with 128, 512 and 2,048 tokens computed at once, with 16 and 32 sequences, with a cache per sequence
and with one for all. Greedy choice is numpy's argmax over the logits, which is faster than
llama.cpp's sampler chain.
"""

import ctypes
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import llama_cpp as llama
import numpy as np

from benchmarks.peers.loads import Request
from benchmarks.peers.workers.harness import serve

BATCH_TOKENS, TOKENS_AT_ONCE = 2048, 512  # n_batch and n_ubatch
LONGEST = 1152  # tokens of prompt and answer of a single request
LONGEST_TOGETHER = 640


@llama.llama_log_callback
def be_silent(_level: int, _text: bytes, _data: ctypes.c_void_p) -> None:
    """Drop llama.cpp's log messages."""


@dataclass
class Running:
    """A request with its own sequence: the next position, and the answer so far."""

    request: Request
    position: int = 0
    answer: list[int] = field(default_factory=list)


class LlamaCpp:
    """A model, one context for one stream and, when needed, one for many."""

    def __init__(self, job: dict[str, Any]):
        llama.llama_log_set(be_silent, ctypes.c_void_p(0))
        llama.llama_backend_init()
        path, params = job["model"].encode(), llama.llama_model_default_params()
        self.model = llama.llama_model_load_from_file(path, params)
        if not self.model:
            raise SystemExit("llama.cpp could not load the model")
        self.num_tokens = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.threads, self.at_once = job["threads"], job["at_once"]
        self.alone = self._context(1, LONGEST)
        self.many: Any = None
        self.batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)

    def versions(self) -> dict[str, str]:
        """Return the build features and the settings."""
        built = llama.llama_print_system_info().decode().strip(" |")
        return {"built with": built, "flash attention": "on", "n_ubatch": str(TOKENS_AT_ONCE)}

    def stream(self, prompt: list[int], num_tokens: int) -> Iterator[int]:
        """Yield token ids as they are computed."""
        llama.llama_memory_clear(llama.llama_get_memory(self.alone), False)
        token = self._begin(prompt)
        yield token
        for position in range(len(prompt), len(prompt) + num_tokens - 1):
            self.batch.n_tokens = 0
            self._add(token, position, 0, wants_logits=True)
            self._decode(self.alone)
            token = self._likeliest(self.alone, 0)
            yield token

    def _begin(self, prompt: list[int]) -> int:
        self.batch.n_tokens = 0
        for position, token in enumerate(prompt):
            self._add(token, position, 0, wants_logits=position == len(prompt) - 1)
        self._decode(self.alone)
        return self._likeliest(self.alone, len(prompt) - 1)

    def together(self, requests: list[Request]) -> list[list[int]]:
        """Answer with continuous batching: each step takes all running requests.

        As many new prompts as fit into the batch join them.
        """
        if self.many is None:
            self.many = self._context(self.at_once, LONGEST_TOGETHER)
        memory = llama.llama_get_memory(self.many)
        llama.llama_memory_clear(memory, False)
        everyone = [Running(request) for request in requests]
        waiting, free = deque(everyone), list(range(self.at_once))
        running: dict[int, Running] = {}
        while waiting or running:
            asked = self._fill(running, waiting, free)
            self._decode(self.many)
            for sequence_id, index in asked:
                mine = running[sequence_id]
                mine.answer.append(self._likeliest(self.many, index))
                if len(mine.answer) == mine.request["num_tokens"]:
                    llama.llama_memory_seq_rm(memory, sequence_id, -1, -1)
                    free.append(sequence_id)
                    del running[sequence_id]
        return [each.answer for each in everyone]

    def _fill(
        self, running: dict[int, Running], waiting: deque[Running], free: list[int]
    ) -> list[tuple[int, int]]:
        """Fill the batch; return sequences and the batch positions of their logits.

        Sequences go in the order of their ids, because llama.cpp computes only neighbours together.
        """
        num_tokens = len(running)
        while waiting and free:
            num_tokens += len(waiting[0].request["prompt"])
            if num_tokens > BATCH_TOKENS:
                break
            free.sort()
            running[free.pop(0)] = waiting.popleft()
        self.batch.n_tokens = 0
        asked = []
        for sequence_id, mine in sorted(running.items()):
            tokens = mine.answer[-1:] or mine.request["prompt"]
            for token in tokens:
                self._add(token, mine.position, sequence_id, wants_logits=False)
                mine.position += 1
            self.batch.logits[self.batch.n_tokens - 1] = True
            asked.append((sequence_id, self.batch.n_tokens - 1))
        return asked

    def _context(self, num_sequences: int, num_tokens: int) -> Any:
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max = num_sequences * num_tokens, num_sequences
        params.n_batch, params.n_ubatch = BATCH_TOKENS, TOKENS_AT_ONCE
        params.n_threads = params.n_threads_batch = self.threads
        params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.kv_unified = False  # a separate cache per sequence
        return llama.llama_init_from_model(self.model, params)

    def _add(self, token: int, position: int, sequence_id: int, wants_logits: bool) -> None:
        batch, index = self.batch, self.batch.n_tokens
        batch.token[index], batch.pos[index] = token, position
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence_id
        batch.logits[index] = wants_logits
        batch.n_tokens += 1

    def _decode(self, context: Any) -> None:
        if llama.llama_decode(context, self.batch) != 0:
            raise SystemExit("llama_decode failed")

    def _likeliest(self, context: Any, index: int) -> int:
        logits = llama.llama_get_logits_ith(context, index)
        return int(np.ctypeslib.as_array(logits, (self.num_tokens,)).argmax())


if __name__ == "__main__":
    serve(LlamaCpp)
