"""`LLM`: load a model by name (`minigen.assembly.build`), and generate text with it."""

from collections.abc import Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, overload

from minigen.assembly.build import Assembly, assemble
from minigen.assembly.processor_parts import make_processors
from minigen.checkpoint.checkpoint import ModelFiles, read_model
from minigen.checkpoint.model_config import ModelConfig
from minigen.config import DEFAULT_MODEL, EngineConfig
from minigen.engine.dispatcher import SharedSteps
from minigen.engine.request_processor import Prompt, RequestProcessor, is_one_prompt
from minigen.errors import ChatTemplateError, ParamsError, PromptError
from minigen.fields import declare
from minigen.outputs import RequestOutput, RequestState, TokenDelta, gather
from minigen.renamed import refuse_old_options
from minigen.sampling.params import SamplingParams
from minigen.tokenizer.tokenizer import Tokenizer
from minigen.trace.events import Recorder, Trace

if TYPE_CHECKING:
    from minigen.hub import Progress
    from minigen.tokenizer.chat_template import ChatTemplate
    from minigen.trace.counters import WorkCounters

P = ParamSpec("P")


class _Load(Protocol[P]):
    """The signature of `LLM.load`, to type checkers and editors: P are the engine's options."""

    def __call__(
        self,
        name: str | Path = ...,
        progress: "Progress | None" = ...,
        *args: P.args,
        **options: P.kwargs,
    ) -> "LLM": ...


def _takes(config: Callable[P, EngineConfig]) -> Callable[[Callable[..., "LLM"]], _Load[P]]:
    """Give a function the fields of `config` as its options; only `config` lists them."""
    return lambda load: declare(load, config)


class LLM:
    """A loaded model that completes prompts and answers chats."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        chat_template: "ChatTemplate | None",
        assembly: Assembly,
        options: EngineConfig,
    ):
        self.config, self.tokenizer, self.chat_template = config, tokenizer, chat_template
        self.engine, self._choices = assembly.engine, assembly.choices
        end_ids = frozenset(config.eos_token_ids) | frozenset(tokenizer.eos_token_ids)
        self._requests = RequestProcessor(
            tokenizer,
            config.vocab_size,
            config.max_positions,
            end_ids,
            assembly.pool_tokens,
            assembly.max_num_seqs,
            make_processors(options, tokenizer, config.vocab_size, end_ids),
        )
        self.options, self.manager = options, assembly.manager
        self._num_blocks, self._kv_bytes = assembly.num_blocks, assembly.kv_bytes
        self.stored_bytes, self.num_parameters = assembly.stored_bytes, assembly.num_parameters
        self._steps = SharedSteps(self.engine)
        self._close = assembly.close

    @classmethod
    @_takes(EngineConfig)
    def load(
        cls,
        name: str | Path = DEFAULT_MODEL,
        *,
        progress: "Progress | None" = None,
        **options: Any,
    ) -> "LLM":
        """Load a model by short name, directory, GGUF file or Hugging Face id; pull it if needed.

        `org/repo@revision` takes the model of a branch, a tag or a commit of the hub's `org/repo`.
        `progress` is called as a download grows, and with lines of text when the CPU kernels are
        compiled: once, before the first model in a weight format runs (`compile_kernels`).

        The options are the fields of `EngineConfig`. Some are sockets (`minigen.protocols`): they
        take a known name, a class, an instance, a function, or "file.py:Name"; `scheduler` and
        `prefix_cache` take no instance, because the engine builds them from its other parts.

        With `tensor_parallel_size` above 1, as many processes hold one shard of the model each, and
        with `pipeline_parallel_size` above 1, each of as many stages does so with its layers;
        `threads` and `kv_cache_memory` are divided among them. With `context_parallel_size` each
        holds all weights instead, and a part of the tokens. The processes are started here and end
        with this one, or at `close`. Under `torchrun`, the ranks are the processes that it started,
        and only rank 0 returns from this function, which can load one model. Raises a
        `MinigenError` that says what to do.
        """
        from minigen import hub

        refuse_old_options(options)
        config = EngineConfig(**options)
        files = read_model(hub.resolve(str(name), progress=progress))
        return cls.of_files(files, config, progress)

    @classmethod
    def of_files(
        cls, files: ModelFiles, options: EngineConfig, progress: "Progress | None" = None
    ) -> "LLM":
        """Load a model whose files `minigen.checkpoint.checkpoint.read_model` has read.

        Models of one `files` share its tokenizer and, in the same form, the memory of the weights.
        """
        assembly = assemble(files.checkpoint, options, progress)
        try:
            return cls(
                files.checkpoint.config, files.tokenizer, files.chat_template, assembly, options
            )
        except BaseException:
            assembly.close()
            raise

    def close(self) -> None:
        """End the worker processes of a sharded model, which then generates no more text.

        A model in one process has nothing to close. May be called twice.
        """
        self._close()

    def describe(self) -> dict[str, str]:
        """Return which implementation was chosen for each part, and why."""
        return dict(self._choices)

    @property
    def kv_usage(self) -> float:
        """The fraction of the KV cache's blocks that requests hold; cached prefixes are free."""
        return 1 - self.manager.num_available / self._num_blocks

    @property
    def trace(self) -> Trace:
        """The engine's trace: subscribe to its events, or use `record`."""
        return self.engine.trace

    @contextmanager
    def record(self, capacity: int = 1_000_000) -> Generator[Recorder, None, None]:
        """Record the engine's events while the block runs; keeps the last `capacity`."""
        recorder = Recorder(capacity)
        with self.trace.subscribed(recorder):
            yield recorder

    @contextmanager
    def count_work(self) -> Generator["WorkCounters", None, None]:
        """Count the tokens, blocks and bytes that the engine works on while the block runs."""
        from minigen.trace.counters import WorkCounters
        from minigen.trace.timeline import Timeline

        counters = WorkCounters(self._kv_bytes, self.config.sliding_windows)
        with self.trace.subscribed(Timeline(counters)):
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
        """Complete one prompt (text or token ids), or every prompt of a list.

        One prompt returns one `RequestOutput`; a list returns a list in the same order. `params`
        applies to all prompts, or is a list with one entry per prompt. Requests of lower `priority`
        run first, and only requests with the same `cache_salt` share a prefix. `progress` shows a
        bar on stderr (by default for several prompts, on a terminal or in a notebook). Raises
        `PromptError` or `ParamsError`.
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
        """Complete one prompt, and yield the pieces of its text as they are generated.

        Closing the iterator aborts the request.
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
        """Complete several prompts at once, and yield every token of every completion."""
        return self._steps.run(self.process_requests(prompts, params, priority, cache_salt))

    def process_requests(
        self,
        prompts: SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        predicted_ids: SequenceOf[int] = (),
    ) -> list[RequestState]:
        """Check requests and return their states, which an `EngineThread`'s dispatcher accepts.

        `predicted_ids` are what the answers are expected to be: they come faster where they are.
        Safe to call in any thread. Raises `PromptError` or `ParamsError`.
        """
        return self._requests.process(prompts, params, priority, cache_salt, predicted_ids)

    def chat(
        self, messages: SequenceOf[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> RequestOutput:
        """Answer a conversation: `[{"role": "user", "content": "..."}]`."""
        return self.generate(self.chat_prompt(messages), params)

    def chat_prompt(self, messages: SequenceOf[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Render a conversation with the model's chat template, and return its token ids.

        `variables` are passed to the template. Raises `ChatTemplateError` if the model has none.
        """
        if self.chat_template is None:
            raise ChatTemplateError(
                "This model has no chat template: it only continues text, so use generate."
            )
        text = self.chat_template.render(messages, **variables)
        return self.tokenizer.encode(text, add_special_tokens=False)


def _bar(
    num_answers: int, wanted: bool | None
) -> AbstractContextManager[Callable[[TokenDelta], object]]:
    """Return a progress bar if wanted or if there are several answers; rich is imported lazily."""
    if wanted is False or (wanted is None and num_answers < 2):
        return nullcontext(lambda delta: None)
    from minigen.progress import answering

    return answering(num_answers, always=wanted is True)
