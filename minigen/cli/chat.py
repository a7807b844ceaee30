"""`minigen chat`: a conversation in the terminal; answers stream and can be interrupted."""

import contextlib
import sys
import time
from dataclasses import dataclass, field

from rich.console import Console

from minigen.errors import CapacityError, ContextLengthError, PromptError
from minigen.llm import LLM
from minigen.sampling.params import SamplingParams

HELP = """\
/clear          clear the conversation
/system TEXT    set the system message, and clear the conversation
/retry          answer the last question again
/help           show this list
/exit           exit (so does Ctrl-D); Ctrl-C interrupts an answer
End a line with \\ to continue on the next line."""


@dataclass
class Conversation:
    """The conversation so far, as chat messages."""

    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def prompt(self) -> list[dict[str, str]]:
        """Return all messages, the system message first."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.messages

    def forget_oldest(self) -> bool:
        """Drop the oldest question and answer; return False if only the last question is left."""
        if len(self.messages) < 3:
            return False
        del self.messages[:2]
        return True


def converse(llm: LLM, params: SamplingParams, system: str | None) -> None:
    """Read questions and stream answers until the input ends."""
    console = Console(stderr=True, highlight=False)
    conversation = Conversation(system)
    llm.chat_prompt([{"role": "user", "content": "Hello"}])  # raises here without a chat template
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, PLC0415 - gives input() history and editing where it exists
    console.print("[dim]Ask something. /help lists commands, Ctrl-D exits.[/dim]")
    while (line := _read(console)) is not None:
        if line.startswith("/"):
            if not _command(line, conversation, console, llm, params):
                return
        elif line.strip():
            conversation.messages.append({"role": "user", "content": line})
            _answer(llm, params, conversation, console)


def _read(console: Console) -> str | None:
    """Read a question; None at the end of the input. A trailing backslash continues the line.

    Raises `PromptError` for bytes that are not text.
    """
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
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise PromptError(
            f"stdin is not valid {error.encoding}: the byte 0x{byte:02x} is an {error.reason}."
        ) from None
    except KeyboardInterrupt:
        console.print()
        return ""


def _command(
    line: str, conversation: Conversation, console: Console, llm: LLM, params: SamplingParams
) -> bool:
    """Run a /command; return False to exit."""
    name, _, rest = line.partition(" ")
    match name:
        case "/exit" | "/quit" | "/bye":
            return False
        case "/clear":
            conversation.messages.clear()
            console.print("[dim]The conversation is cleared.[/dim]")
        case "/system":
            conversation.system = rest.strip() or None
            conversation.messages.clear()
            console.print("[dim]The system message is set; the conversation is cleared.[/dim]")
        case "/retry":
            if conversation.messages and conversation.messages[-1]["role"] == "assistant":
                conversation.messages.pop()
            if conversation.messages:
                _answer(llm, params, conversation, console)
        case "/help":
            console.print(HELP, markup=False)
        case _:
            console.print(f"There is no command {name}; /help lists the commands.", markup=False)
    return True


def _answer(llm: LLM, params: SamplingParams, conversation: Conversation, console: Console) -> None:
    """Stream the next answer, and add it to the conversation, complete or interrupted."""
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
    """Return the conversation as token ids, without its oldest turns if it is too long."""
    while True:
        prompt_ids = llm.chat_prompt(conversation.prompt())
        try:
            llm.process_requests([prompt_ids], params)
        except (ContextLengthError, CapacityError) as error:
            if not conversation.forget_oldest():
                conversation.messages.pop()
                console.print(str(error), markup=False, soft_wrap=True)
                return None
            console.print("[dim]The conversation is too long: the oldest turn is dropped.[/dim]")
        else:
            return prompt_ids
