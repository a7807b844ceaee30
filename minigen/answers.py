"""How an answer's tokens become text, step by step."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from minigen.outputs import Choice, Delta, Output
from minigen.sequence import SampledToken, Sequence
from minigen.text.stops import StopWatcher
from minigen.text.tokenizer import StreamDecoder


@dataclass
class Answer:
    """An answer in the making: its sequence, and how its tokens become text."""

    prompt: int
    sequence: Sequence
    stream: StreamDecoder
    stops: StopWatcher
    choice: Choice

    def push(self, token: SampledToken) -> Delta:
        """Take a token; returns the text that is certain by now."""
        params, reason = self.sequence.params, self.sequence.finish_reason
        self.choice.token_ids.append(token.token_id)
        if self.choice.logprobs is not None and token.logprobs is not None:
            self.choice.logprobs.append(token.logprobs)
        silent = reason == "stop" and not params.include_stop_str_in_output
        text = "" if silent else self.stream.push(token.token_id)
        if reason is not None:
            text += self.stream.finish()
        if len(self.choice.token_ids) > params.min_tokens:
            text = self.stops.push(text)
        if self.stops.stopped:
            reason = "stop"
        elif reason is not None:
            text += self.stops.finish()
        self.choice.text += text
        self.choice.finish_reason = reason
        return Delta(self.prompt, self.choice.index, text, token.token_id, reason)


def gather(answers: SequenceOf[Answer]) -> list[Output]:
    """The finished answers, put together by prompt."""
    outputs: dict[int, Output] = {}
    for answer in answers:
        told = answer.sequence.prompt_logprobs or None
        output = outputs.setdefault(answer.prompt, Output(answer.sequence.prompt_ids, [], told))
        output.choices.append(answer.choice)
    return list(outputs.values())
