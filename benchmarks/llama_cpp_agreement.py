"""Does llama.cpp answer as minigen does, from the same file? A check, not a measurement.

`python benchmarks/llama_cpp_agreement.py [--python PATH] [--json FILE]`, where PATH is a
Python that has `llama-cpp-python`. Both get the same token ids and take the
likeliest token sixteen times. llama.cpp rounds activations to 8 bits where weights have 4, so near
a tie the two may part: where they do, minigen's margin between its two likeliest tokens is given.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from common import write_results

from minigen import LLM, SamplingParams, hub
from tests.golden.make import QUESTIONS

NUM_TOKENS = 16

ASK_LLAMA_CPP = """
import json, sys
from llama_cpp import Llama, __version__
path, prompts, count = json.load(sys.stdin)
llm = Llama(path, n_ctx=512, n_threads=2, verbose=False, logits_all=False)
answers = []
for prompt in prompts:
    llm.reset()
    tokens = llm.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0)
    answers.append([token for token, _ in zip(tokens, range(count))])
json.dump([__version__, answers], sys.stdout)
"""


def main() -> None:
    """Ask both, compare, print, and write JSON if asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=sys.executable, help="a Python with llama-cpp-python")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    options = parser.parse_args()
    path = hub.resolve(hub.DEFAULT_MODEL)
    llm = LLM.load(path, weights="float32")
    prompts = [llm.chat_prompt([{"role": "user", "content": each}]) for each in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=2, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    asked = subprocess.run(
        [options.python, "-c", ASK_LLAMA_CPP],
        input=json.dumps([str(path), prompts, NUM_TOKENS]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    version, answers = json.loads(asked.stdout)
    rows = []
    for question, output, theirs in zip(QUESTIONS, outputs, answers, strict=True):
        agreeing = next(
            (
                i
                for i, pair in enumerate(zip(output.token_ids, theirs, strict=False))
                if len({*pair}) > 1
            ),
            NUM_TOKENS,
        )
        row: dict[str, object] = {"question": question, "agreeing_tokens": agreeing}
        if agreeing < NUM_TOKENS:
            assert output.logprobs is not None
            best, second = sorted(
                (entry.logprob for entry in output.logprobs[agreeing].values()), reverse=True
            )[:2]
            row["margin_where_they_part"] = round(best - second, 3)
        rows.append(row)
        print(row)
    if options.json is not None:
        write_results(options.json, {"llama_cpp_python": version, "answers": rows})


if __name__ == "__main__":
    main()
