"""`minigen chat`: a conversation in the terminal that streams and can be interrupted."""

import contextlib
import sys
import time
from dataclasses import dataclass, field

from rich.console import Console

from minigen.errors import CapacityError, ContextLengthError
from minigen.llm import LLM
from minigen.sampling.params import SamplingParams

HELP = """\
/clear          forget the conversation
/system TEXT    say how the model should behave, and begin anew
/retry          answer the last question again
/help           this list
/exit           leave (so does Ctrl-D); Ctrl-C interrupts an answer
End a line with \\ to go on in the next one."""


@dataclass
class Conversation:
    """What was said so far, as chat messages."""

    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def prompt(self) -> list[dict[str, str]]:
        """All messages, the system's first."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.messages

    def forget_oldest(self) -> bool:
        """Drop the oldest question and its answer; False if only the last question is left."""
        if len(self.messages) < 3:
            return False
        del self.messages[:2]
        return True


def converse(llm: LLM, params: SamplingParams, system: str | None) -> None:
    """Read questions and stream answers until the input ends."""
    console = Console(stderr=True, highlight=False)
    conversation = Conversation(system)
    llm.chat_prompt([{"role": "user", "content": "Hello"}])  # a model without a template ends here
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, PLC0415 - gives input() history and editing where it exists
    console.print("[dim]Ask something. /help lists commands, Ctrl-D leaves.[/dim]")
    while (line := _read(console)) is not None:
        if line.startswith("/"):
            if not _command(line, conversation, console, llm, params):
                return
        elif line.strip():
            conversation.messages.append({"role": "user", "content": line})
            _answer(llm, params, conversation, console)


def _read(console: Console) -> str | None:
    """A question, or None at the end of the input; a trailing backslash goes on."""
    prompt = "\n> " if sys.stdin.isatty() else ""
    lines: list[str] = []
    try:
        while True:
            line = input(prompt)
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(lines)
            prompt = "  " if prompt else ""
    except EOFError:
        return "\n".join(lines) if lines else None
    except KeyboardInterrupt:
        console.print()
        return ""


def _command(
    line: str, conversation: Conversation, console: Console, llm: LLM, params: SamplingParams
) -> bool:
    """Do what a /command says; False to leave."""
    name, _, rest = line.partition(" ")
    match name:
        case "/exit" | "/quit" | "/bye":
            return False
        case "/clear":
            conversation.messages.clear()
            console.print("[dim]Forgotten.[/dim]")
        case "/system":
            conversation.system = rest.strip() or None
            conversation.messages.clear()
            console.print("[dim]Noted; the conversation begins anew.[/dim]")
        case "/retry":
            if conversation.messages and conversation.messages[-1]["role"] == "assistant":
                conversation.messages.pop()
            if conversation.messages:
                _answer(llm, params, conversation, console)
        case "/help":
            console.print(HELP, markup=False)
        case _:
            console.print(f"There is no {name}; /help lists what there is.", markup=False)
    return True


def _answer(llm: LLM, params: SamplingParams, conversation: Conversation, console: Console) -> None:
    """Stream the next answer, and keep what came of it, interrupted or not."""
    prompt_ids = _fitting_prompt(llm, params, conversation, console)
    if prompt_ids is None:
        return
    text, num_tokens, started = "", 0, time.perf_counter()
    stream = llm.stream_deltas([prompt_ids], params)
    try:
        for delta in stream:
            num_tokens += 1
            text += delta.text
            sys.stdout.write(delta.text)
            sys.stdout.flush()
        note = ""
    except KeyboardInterrupt:
        note = "interrupted, "
    finally:
        stream.close()
    sys.stdout.write("\n")
    sys.stdout.flush()
    conversation.messages.append({"role": "assistant", "content": text})
    seconds = time.perf_counter() - started
    console.print(f"[dim]{note}{num_tokens} tokens, {num_tokens / seconds:.0f} tokens/s[/dim]")


def _fitting_prompt(
    llm: LLM, params: SamplingParams, conversation: Conversation, console: Console
) -> list[int] | None:
    """The conversation as token ids, without its oldest turns if they do not fit any more."""
    while True:
        prompt_ids = llm.chat_prompt(conversation.prompt())
        try:
            llm.process_requests([prompt_ids], params)
        except (ContextLengthError, CapacityError) as error:
            if not conversation.forget_oldest():
                conversation.messages.pop()
                console.print(str(error), markup=False, soft_wrap=True)
                return None
            console.print("[dim]There is no more room: the oldest turn is forgotten.[/dim]")
        else:
            return prompt_ids
