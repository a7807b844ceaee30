"""`LLM`: a model's name becomes an engine (`minigen.assembly`), prompts become answers."""

from collections.abc import Generator, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, overload

from minigen import hub
from minigen.answers import Answer, gather
from minigen.assembly import Assembly, EngineOptions, assemble
from minigen.checkpoint import open_checkpoint
from minigen.config import ModelConfig
from minigen.errors import (
    ChatTemplateError,
    ParamsError,
    PromptError,
)
from minigen.outputs import Delta, Output
from minigen.params import SamplingParams
from minigen.requests import Prompt, RequestReader, is_one_prompt
from minigen.sequence import Sequence
from minigen.text.chat import ChatTemplate
from minigen.text.tokenizer import Tokenizer


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
        self._requests = RequestReader(
            tokenizer,
            config.vocab_size,
            config.max_positions,
            frozenset(config.eos_token_ids) | frozenset(tokenizer.eos_token_ids),
            assembly.pool_tokens,
            assembly.max_sequences,
        )
        self._growing: dict[Sequence, Answer] = {}

    @classmethod
    def load(
        cls,
        name: str | Path = hub.DEFAULT_MODEL,
        *,
        weights: str = "auto",
        threads: int | None = None,
        max_sequences: int = 16,
        max_batch_tokens: int = 2048,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_memory: int | None = None,
        prefix_cache: bool = True,
        progress: hub.Progress | None = None,
    ) -> "LLM":
        """Load a model by short name, directory, GGUF file or Hugging Face id; pull it if need be.

        `weights` is the type that products are done in: "float32", "bfloat16", or "auto" for the
        faster of the two on this processor. `threads` is torch's thread count (its own default if
        None). At most `max_sequences` run at once, and a step computes at most `max_batch_tokens`.
        Keys and values are kept in `num_blocks` blocks of `block_size` tokens, or in as many as
        fit into `kv_memory` bytes (1 GiB if neither is given); `prefix_cache` shares those of equal
        beginnings. Raises a `MinigenError` that says what to do.
        """
        options = EngineOptions(
            weights,
            threads,
            max_sequences,
            max_batch_tokens,
            block_size,
            num_blocks,
            kv_memory,
            prefix_cache,
        )
        checkpoint = open_checkpoint(hub.resolve(str(name), progress=progress))
        tokenizer = checkpoint.tokenizer()
        chat_template = checkpoint.chat_template()
        return cls(checkpoint.config, tokenizer, chat_template, assemble(checkpoint, options))

    def describe(self) -> dict[str, str]:
        """Which implementation was chosen for each part, and why."""
        return dict(self._choices)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str, too
        self, prompts: Prompt, params: SamplingParams | None = ...
    ) -> Output: ...

    @overload
    def generate(
        self,
        prompts: SequenceOf[str] | SequenceOf[SequenceOf[int]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = ...,
    ) -> list[Output]: ...

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> Output | list[Output]:
        """Continue one prompt (text or token ids), or each of a list of them.

        One prompt returns one `Output`, a list returns a list in the same order. `params` is for
        all prompts, or a list with one for each. Raises `PromptError` or `ParamsError`.
        """
        one = is_one_prompt(prompts)
        answers = self._requests.answers([prompts] if one else prompts, params)  # type: ignore[list-item,arg-type]
        for _ in self._run(answers):
            pass
        outputs = gather(answers)
        return outputs[0] if one else outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Continue one prompt, and yield the answer's text as it comes; concatenated it is whole.

        Closing the iterator gives the rest of the answer up.
        """
        if not is_one_prompt(prompt):
            raise PromptError("stream takes one prompt; stream_deltas takes several.")
        if params is not None and params.n != 1:
            raise ParamsError("stream yields one answer; n above 1 needs stream_deltas.")
        return (delta.text for delta in self.stream_deltas([prompt], params) if delta.text)

    def stream_deltas(
        self,
        prompts: SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> Generator[Delta, None, None]:
        """Continue several prompts at once, and yield every token of every answer as it comes."""
        return self._run(self._requests.answers(prompts, params))

    def chat(
        self, messages: SequenceOf[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> Output:
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

    def _run(self, answers: SequenceOf[Answer]) -> Generator[Delta, None, None]:
        """Step the engine until the answers are whole; those left when closed are given up.

        A step moves every answer on, also those of other callers: each keeps what came for it.
        """
        siblings = {each for answer in answers for each in answer.sequence.siblings}
        for answer in answers:
            self._growing[answer.sequence] = answer
            if answer.sequence not in siblings:
                self.engine.add(answer.sequence)
        try:
            while True:
                for answer in answers:
                    while answer.deltas:
                        yield answer.deltas.popleft()
                if all(answer.choice.finish_reason is not None for answer in answers):
                    return
                self._step()
        finally:
            for answer in answers:
                self.engine.abort(answer.sequence)
                self._growing.pop(answer.sequence, None)

    def _step(self) -> None:
        for sequence, token in self.engine.step():
            answer = self._growing[sequence]
            answer.deltas.append(answer.push(token))
            if answer.stops.stopped:
                self.engine.abort(sequence)
