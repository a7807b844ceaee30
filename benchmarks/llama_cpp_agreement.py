"""Check that llama.cpp and minigen give the same answers from the same file.

`python benchmarks/llama_cpp_agreement.py [--python PATH] [--json FILE]`, where PATH is a Python
that has `llama-cpp-python`. This is a check, not a measurement. Both engines get the same token ids
and take the likeliest token sixteen times: once from the file as it is, and once with the same
numbers written out in float32. From the original file llama.cpp rounds activations to 8 bits, so
the two may differ near a tie; where they do, minigen's margin between its two likeliest tokens is
given.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import write_results
from gguf_float32 import write_float32

from minigen import LLM, SamplingParams, hub
from minigen.outputs import RequestOutput
from tests.golden.make import QUESTIONS

NUM_TOKENS = 16

ASK_LLAMA_CPP = """
import json, sys
from llama_cpp import Llama, __version__
path, prompts, count = json.load(sys.stdin)
llm = Llama(path, n_ctx=512, n_threads=2, verbose=False, type_k=0, type_v=0, flash_attn=False)
answers = []
for prompt in prompts:
    llm.reset()
    tokens = llm.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0)
    answers.append([token for token, _ in zip(tokens, range(count))])
json.dump([__version__, answers], sys.stdout)
"""


def ask(python: str, path: Path, prompts: list[list[int]]) -> tuple[str, list[list[int]]]:
    """Return llama.cpp's version, and its first tokens after each prompt."""
    asked = subprocess.run(
        [python, "-c", ASK_LLAMA_CPP],
        input=json.dumps([str(path), prompts, NUM_TOKENS]),
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
    )
    version, answers = json.loads(asked.stdout)
    return version, answers


def compare(outputs: list[RequestOutput], answers: list[list[int]]) -> list[dict[str, object]]:
    """Return how many tokens agree for each question, and the margin where they differ."""
    rows: list[dict[str, object]] = []
    for question, output, theirs in zip(QUESTIONS, outputs, answers, strict=True):
        pairs = zip(output.token_ids, theirs, strict=True)
        agreeing = next((i for i, (a, b) in enumerate(pairs) if a != b), NUM_TOKENS)
        row: dict[str, object] = {"question": question, "agreeing_tokens": agreeing}
        if agreeing < NUM_TOKENS:
            assert output.logprobs is not None
            likeliest = output.logprobs[agreeing].values()
            best, second = sorted((each.logprob for each in likeliest), reverse=True)[:2]
            row["margin_where_they_part"] = round(best - second, 3)
        rows.append(row)
    return rows


def main() -> None:
    """Ask both engines, compare, print, and write JSON if a file was given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=sys.executable, help="a Python with llama-cpp-python")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    options = parser.parse_args()
    path = hub.resolve(hub.DEFAULT_MODEL)
    llm = LLM.load(path, weights="float32")
    prompts = [llm.chat_prompt([{"role": "user", "content": each}]) for each in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=2, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    with tempfile.TemporaryDirectory() as folder:
        float32 = Path(folder) / "float32.gguf"
        write_float32(path, float32)
        version, exact = ask(options.python, float32, prompts)
        _, rounded = ask(options.python, path, prompts)
    results = {
        "the same numbers in float32": compare(outputs, exact),
        "the file as it is": compare(outputs, rounded),
    }
    for name, rows in results.items():
        whole = sum(row["agreeing_tokens"] == NUM_TOKENS for row in rows)
        print(f"{name}: {whole} of {len(rows)} answers agree in all {NUM_TOKENS} tokens")
        for row in rows:
            print("   ", row)
    if options.json is not None:
        write_results(options.json, {"llama_cpp_python": version, **results})


if __name__ == "__main__":
    main()
