"""`LLM`: a model's name becomes an engine (`minigen.assembly.build`), prompts become answers."""

from collections.abc import Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, overload

from minigen import hub
from minigen.assembly.build import Assembly, assemble
from minigen.checkpoint.checkpoint import open_checkpoint
from minigen.checkpoint.model_config import ModelConfig
from minigen.config import EngineConfig
from minigen.engine.request_processor import Prompt, RequestProcessor, is_one_prompt
from minigen.engine.shared_steps import SharedSteps
from minigen.errors import ChatTemplateError, ParamsError, PromptError
from minigen.outputs import RequestOutput, RequestState, TokenDelta, gather
from minigen.sampling.params import SamplingParams
from minigen.tokenizer.chat_template import ChatTemplate
from minigen.tokenizer.tokenizer import Tokenizer
from minigen.trace.counters import WorkCounters
from minigen.trace.events import Recorder, Trace


class LLM:
    """A loaded model that continues prompts and answers chats."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        assembly: Assembly,
    ):
        self.config, self.tokenizer, self.chat_template = config, tokenizer, chat_template
        self.engine, self._choices = assembly.engine, assembly.choices
        self._requests = RequestProcessor(
            tokenizer,
            config.vocab_size,
            config.max_positions,
            frozenset(config.eos_token_ids) | frozenset(tokenizer.eos_token_ids),
            assembly.pool_tokens,
            assembly.max_num_seqs,
        )
        self._manager, self._num_blocks = assembly.manager, assembly.num_blocks
        self._kv_bytes, self.stored_bytes = assembly.kv_bytes, assembly.stored_bytes
        self._steps = SharedSteps(self.engine)
        self._close = assembly.close

    @classmethod
    def load(
        cls,
        name: str | Path = hub.DEFAULT_MODEL,
        *,
        weights: str = "auto",
        threads: int | None = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 2048,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_memory: int | str | None = None,
        kv_cache_dtype: str = "auto",
        enable_prefix_caching: bool = True,
        prefix_cache: Any = None,
        scheduler: Any = "continuous",
        allocator: Any = None,
        sampler: Any = None,
        attention_backend: Any = "auto",
        tensor_parallel_size: int = 1,
        device: str = "cpu",
        progress: hub.Progress | None = None,
    ) -> "LLM":
        """Load a model by short name, directory, GGUF file or Hugging Face id; pull it if need be.

        `weights` is the form that weights are held and multiplied in: "float32", "bfloat16", "int8"
        or "int4" (bytes and half bytes, with a scale for every 32), or "auto" for the fastest on
        this processor that loses nothing of what the file holds. `threads` is the thread count of
        torch and Numba (torch's own default if None). At most `max_num_seqs` run at once, and a
        step computes at most `max_num_batched_tokens`.
        Keys and values are kept in `num_blocks` blocks of `block_size` tokens, or in as many as
        fit into `kv_cache_memory` bytes (or "512M"; 1 GiB if neither is given); `kv_cache_dtype` is
        "bfloat16", "int8" (hardly more than half of that memory, a little less exact; in the
        compiled step only), or "auto" for what the runner computes in. `prefix_cache` shares those
        of equal beginnings. On the `device` "cuda" all is bfloat16, computed by Triton's kernels,
        and the cache takes what memory is free.

        The rest are sockets (`minigen.protocols`): a known name, a class, an instance, a function,
        or "file.py:Name"; a scheduler or prefix cache is no instance, since the engine makes it of
        other parts. `scheduler` is made with (manager, max_num_seqs, max_num_batched_tokens), and
        "continuous", "static" and "dynamic" are known; `allocator` with (num_blocks);
        `prefix_cache`, where it is not True or False, with (allocator, block_size); `sampler` is
        called with (logits, sequences); `attend` with (pool, batch, windows) at every step, for
        that step's attention ("torch", "triton", or "auto" for the device's own).

        `tensor_parallel_size` processes hold a share of the model each, with `threads` and `kv_cache_memory`
        dealt out among them. They are started here and end with this one, at `close` at the latest;
        under `torchrun` they are those that it started, and only rank 0 returns from here. Raises a
        `MinigenError` that says what to do.
        """
        options = EngineConfig(
            weights,
            threads,
            max_num_seqs,
            max_num_batched_tokens,
            block_size,
            num_blocks,
            kv_cache_memory,
            kv_cache_dtype,
            enable_prefix_caching,
            prefix_cache,
            scheduler,
            allocator,
            sampler,
            attention_backend,
            tensor_parallel_size,
            device,
        )
        checkpoint = open_checkpoint(hub.resolve(str(name), progress=progress))
        tokenizer = checkpoint.tokenizer()
        chat_template = checkpoint.chat_template()
        return cls(checkpoint.config, tokenizer, chat_template, assemble(checkpoint, options))

    def close(self) -> None:
        """End the processes that hold the other shares of a split model; then it answers no more.

        Others have nothing to close. May be called twice.
        """
        self._close()

    def describe(self) -> dict[str, str]:
        """Which implementation was chosen for each part, and why."""
        return dict(self._choices)

    @property
    def kv_usage(self) -> float:
        """The share of the KV cache's blocks that requests hold, 0 to 1; what is kept is free."""
        return 1 - self._manager.num_available / self._num_blocks

    @property
    def trace(self) -> Trace:
        """What the engine tells of itself; subscribe to it, or use `record`."""
        return self.engine.trace

    @contextmanager
    def record(self, capacity: int = 1_000_000) -> Generator[Recorder, None, None]:
        """Keep the last `capacity` events of what the engine does while the block runs."""
        recorder = Recorder(capacity)
        with self.trace.subscribed(recorder):
            yield recorder

    @contextmanager
    def count_work(self) -> Generator[WorkCounters, None, None]:
        """Count what the engine computes, finds, copies and reads while the block runs."""
        counters = WorkCounters(self._kv_bytes, self.config.sliding_windows)
        with self.trace.subscribed(counters):
            yield counters

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str, too
        self,
        prompts: Prompt,
        params: SamplingParams | None = ...,
        *,
        priority: int = ...,
        cache_salt: str | None = ...,
        progress: bool | None = ...,
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: SequenceOf[str] | SequenceOf[SequenceOf[int]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = ...,
        *,
        priority: int = ...,
        cache_salt: str | None = ...,
        progress: bool | None = ...,
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        progress: bool | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Continue one prompt (text or token ids), or each of a list of them.

        One prompt returns one `RequestOutput`, a list returns a list in the same order. `params` is for
        all prompts, or a list with one for each. Lower `priority` goes first; only requests of the
        same `cache_salt` share a prefix. `progress` shows a bar on stderr; by default for several
        prompts on a terminal or in a notebook. Raises `PromptError` or `ParamsError`.
        """
        one = is_one_prompt(prompts)
        asked: Any = [prompts] if one else prompts
        answers = self.process_requests(asked, params, priority, cache_salt)
        with _bar(len(answers), progress) as push:
            for delta in self._steps.run(answers):
                push(delta)
        outputs = gather(answers)
        return outputs[0] if one else outputs

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Iterator[str]:
        """Continue one prompt, and yield the answer's text as it comes; concatenated it is whole.

        Closing the iterator gives the rest of the answer up.
        """
        if not is_one_prompt(prompt):
            raise PromptError("stream takes one prompt; stream_deltas takes several.")
        answers = self.process_requests([prompt], params, priority, cache_salt)
        if len(answers) != 1:
            raise ParamsError("stream yields one answer; n above 1 needs stream_deltas.")
        return (delta.text for delta in self._steps.run(answers) if delta.text)

    def stream_deltas(
        self,
        prompts: SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Generator[TokenDelta, None, None]:
        """Continue several prompts at once, and yield every token of every answer as it comes."""
        return self._steps.run(self.process_requests(prompts, params, priority, cache_salt))

    def process_requests(
        self,
        prompts: SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[RequestState]:
        """Check requests, and make the answers, still empty, that whoever runs the engine fills.

        For an `EngineThread` of `engine`, which takes their sequences; may be called in any thread.
        Raises `PromptError` or `ParamsError`.
        """
        return self._requests.answers(prompts, params, priority, cache_salt)

    def chat(
        self, messages: SequenceOf[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> RequestOutput:
        """Answer a conversation: `[{"role": "user", "content": "..."}]`."""
        return self.generate(self.chat_prompt(messages), params)

    def chat_prompt(self, messages: SequenceOf[Mapping[str, Any]], **variables: Any) -> list[int]:
        """A conversation as the token ids that the model's chat template makes of it.

        `variables` go to the template. Raises `ChatTemplateError` for a model without one.
        """
        if self.chat_template is None:
            raise ChatTemplateError(
                "This model has no chat template: it continues text, so use generate."
            )
        text = self.chat_template.render(messages, **variables)
        return self.tokenizer.encode(text, add_special_tokens=False)


def _bar(
    num_answers: int, wanted: bool | None
) -> AbstractContextManager[Callable[[TokenDelta], object]]:
    """A progress bar if it is wanted, or if there is much to do; without, rich is not imported."""
    if wanted is False or (wanted is None and num_answers < 2):
        return nullcontext(lambda delta: None)
    from minigen.progress import answering

    return answering(num_answers, always=wanted is True)
