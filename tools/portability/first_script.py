"""A user's first script: the first load compiles the kernels, and the compiled step answers.

It runs in an environment that holds minigen's own packages and no test's. What fails there alone
is seen by no test, because the packages of the tests are then missing. Exits with a sentence.
"""

import sys

from minigen import LLM, SamplingParams

PROMPT, WORD = "The capital of France is", "Paris"


def main() -> None:
    """Load the course's model, and check what computes and what it says."""
    llm = LLM.load("smollm2-135m")
    runner = llm.describe()["runner"]
    if "compiled" not in runner:
        sys.exit(f"The first load computes with {runner}, because the kernels were not compiled.")
    answer = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8)).text
    if WORD not in answer:
        sys.exit(f"{PROMPT!r} is continued by {answer!r}, without the word {WORD}.")


if __name__ == "__main__":
    main()
