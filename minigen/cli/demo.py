"""`minigen demo`: answers several questions in one batch, with a live display."""

import time
from dataclasses import dataclass, field, replace

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from minigen.llm import LLM
from minigen.outputs import TokenDelta
from minigen.sampling.params import SamplingParams

QUESTIONS = (
    "What is the capital of France?",
    "Explain gravity to a child in two sentences.",
    "Write a haiku about the sea.",
    "Name three uses of copper.",
    "Why is the sky blue?",
    "What should I cook with rice and eggs?",
)


@dataclass
class Board:
    """The content of the screen: each answer so far, and the numbers of the run."""

    questions: tuple[str, ...]
    answers: list[str] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    num_tokens: int = 0
    started: float = field(default_factory=time.perf_counter)
    first_token_after: float | None = None

    def __post_init__(self) -> None:
        self.answers = [""] * len(self.questions)

    def push(self, delta: TokenDelta) -> None:
        """Add the text that one step generated for one answer."""
        self.num_tokens += 1
        if self.first_token_after is None:
            self.first_token_after = time.perf_counter() - self.started
        self.answers[delta.prompt] += delta.text
        if delta.finish_reason is not None:
            self.finished.add(delta.prompt)

    def numbers(self) -> str:
        """Return tokens per second, time to the first token, and the number of running answers."""
        seconds = max(time.perf_counter() - self.started, 1e-6)
        first = "..." if self.first_token_after is None else f"{self.first_token_after:.2f} s"
        growing = len(self.questions) - len(self.finished)
        rate = f"{self.num_tokens} tokens in {seconds:.1f} s = {self.num_tokens / seconds:.0f}/s"
        running = f"{growing} of {len(self.questions)} running"
        return f"{rate}  ·  first token after {first}  ·  {running}"

    def picture(self, height: int) -> Group:
        """Return the board for rich, each answer cut to its share of `height` in lines."""
        lines_each = max(2, (height - 4) // len(self.questions) - 3)
        table = Table.grid(padding=(0, 1), expand=True)
        for index, (question, answer) in enumerate(zip(self.questions, self.answers, strict=True)):
            done = index in self.finished
            body = Text(answer.strip() or " ", overflow="fold")
            tail = body.wrap(Console(), max(20, Console().width - 6))[-lines_each:]
            table.add_row(
                Panel(
                    Text("\n").join(tail),
                    title=f"[bold]{escape(question)}[/bold]",
                    title_align="left",
                    border_style="green" if done else "yellow",
                )
            )
        return Group(table, Text(self.numbers(), style="bold"))


def run_demo(llm: LLM, params: SamplingParams, questions: tuple[str, ...] = QUESTIONS) -> None:
    """Answer all questions greedily at once; show them live on a terminal, else at the end."""
    console = Console()
    prompts = [llm.chat_prompt([{"role": "user", "content": each}]) for each in questions]
    params = replace(params, temperature=0)
    board = Board(questions)
    console.print(llm.describe()["model"], style="dim", markup=False)
    console.print(
        f"{len(questions)} questions share one model, {llm.describe()['weights']}",
        style="dim",
        markup=False,
    )
    if not console.is_terminal:
        for delta in llm.stream_deltas(prompts, params):
            board.push(delta)
        _print_plainly(board, console)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        shown = 0.0
        for delta in llm.stream_deltas(prompts, params):
            board.push(delta)
            if time.perf_counter() - shown > 0.05:
                live.update(board.picture(console.height), refresh=True)
                shown = time.perf_counter()
        live.update(board.picture(console.height), refresh=True)


def _print_plainly(board: Board, console: Console) -> None:
    for question, answer in zip(board.questions, board.answers, strict=True):
        console.print(f"\n{question}", style="bold", markup=False)
        console.print(answer.strip(), markup=False, highlight=False)
    console.print(f"\n[bold]{board.numbers()}[/bold]", highlight=False)
