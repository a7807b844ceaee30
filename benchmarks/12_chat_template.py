"""The cost of the chat template's own process: `python benchmarks/12_chat_template.py`.

The default model's template formats a question and a long conversation, in this process and in its
own process, by turns. The difference is compared with the time that the engine takes to the first
token of the answer.
"""

import statistics
import time

from common import interleaved, json_option, write_results

from minigen import LLM, SamplingParams, hub
from minigen.checkpoint.gguf import read_gguf
from minigen.tokenizer.chat_template import ChatTemplate
from minigen.tokenizer.template_sandbox import environment

TURNS = {"a question": 1, "twenty turns": 39}
REPEATS = 300
FIRST_TOKENS = 5


def main() -> None:
    """Measure, print, and write JSON if a file was given."""
    path = hub.resolve(hub.DEFAULT_MODEL)
    metadata = read_gguf(path).metadata
    inside = environment().from_string(metadata["tokenizer.chat_template"])
    apart = ChatTemplate.from_gguf(metadata)
    llm = LLM.load(path)
    assert apart is not None
    started = time.perf_counter()
    apart.render(messages(1))
    start_seconds = time.perf_counter() - started
    found = {}
    for name, num_messages in TURNS.items():
        given = messages(num_messages)
        assert apart.render(given) == inside.render(messages=given, add_generation_prompt=True)
        ways = {
            "in this process": lambda given=given: inside.render(
                messages=given, add_generation_prompt=True
            ),
            "in its own": lambda given=given: apart.render(given),
        }
        medians = {
            way: statistics.median(seconds) * 1e6
            for way, seconds in interleaved(ways, REPEATS).items()
        }
        first_token = statistics.median(
            interleaved({"": lambda given=given: first(llm, given)}, FIRST_TOKENS)[""]
        )
        share = (medians["in its own"] - medians["in this process"]) / (first_token * 1e6)
        found[name] = {"messages": num_messages, "microseconds": medians, "of_first_token": share}
        print(f"{name}: {medians}, {share:.3%} of the time to the first token")
    print(f"the first, with the start of the process: {start_seconds:.2f} s")
    if (path := json_option()) is not None:
        write_results(path, {"renderings": found, "first_rendering_seconds": start_seconds})


def messages(count: int) -> list[dict[str, str]]:
    """Return a conversation of this many messages, of about thirty words each."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": "Why is the sky blue? " * 6} for i in range(count)]


def first(llm: LLM, given: list[dict[str, str]]) -> None:
    """Compute the first token of an answer, with nothing in the prefix cache."""
    llm.generate(
        llm.chat_prompt(given), SamplingParams(max_tokens=1, temperature=0), cache_salt=salt()
    )


def salt() -> str:
    """Return a salt that no other prompt shares, so that no block is shared."""
    return str(time.perf_counter_ns())


if __name__ == "__main__":
    main()
