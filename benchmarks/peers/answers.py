"""Questions that the model is sure about, to check that an engine computes the right model.

Near ties say nothing about an engine, because low precision can turn them either way. So only
answers whose first token leads the second by at least one logit (minigen, float32) are used, with
the tokens after it up to the first smaller lead.
"""

import json
from pathlib import Path
from typing import Any

from minigen import LLM, SamplingParams
from minigen.outputs import RequestOutput
from tests.golden.make import QUESTIONS

COUNT, MARGIN, LONGEST = 10, 1.0, 4
MORE_QUESTIONS = (
    "What color is the sky on a clear day?",
    "What is two plus two?",
    "Who wrote Romeo and Juliet?",
    "What is the largest ocean on Earth?",
    "How many legs does a spider have?",
    "What is the capital of Italy?",
    "What do bees make?",
    "In which direction does the sun rise?",
    "What is the chemical symbol of gold?",
    "How many months are in a year?",
    "What is the freezing point of water?",
    "Which planet is known as the Red Planet?",
    "Tell me a short story about a dragon.",
    "What is the opposite of up?",
    "Translate 'good morning' into French.",
    "List three kinds of fruit.",
)


def sure_answers(path: Path, model: Path) -> list[dict[str, Any]]:
    """Return ten prompts and the tokens that a correct engine answers, stored in file `path`."""
    if not path.exists():
        llm = LLM.load(model, weights="float32")
        questions = [*QUESTIONS, *MORE_QUESTIONS]
        prompts = [llm.chat_prompt([{"role": "user", "content": each}]) for each in questions]
        params = SamplingParams(temperature=0, max_tokens=LONGEST, logprobs=2, ignore_eos=True)
        outputs = llm.generate(prompts, params, progress=False)
        sure = [
            {"prompt": prompt, "tokens": tokens}
            for prompt, output in zip(prompts, outputs, strict=True)
            if (tokens := sure_tokens(output))
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(sure[:COUNT]), encoding="utf-8")
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def sure_tokens(output: RequestOutput) -> list[int]:
    """Return an answer's tokens up to the first whose lead is less than `MARGIN`."""
    assert output.logprobs is not None
    for index, likeliest in enumerate(output.logprobs):
        best, second = sorted((each.logprob for each in likeliest.values()), reverse=True)[:2]
        if best - second < MARGIN:
            return output.token_ids[:index]
    return output.token_ids


def share_agreeing(given: list[list[int]], sure: list[dict[str, Any]]) -> float:
    """Return the share of an engine's answers that are the sure ones.

    The answers are those given one by one, followed by those given together.
    """
    expected = [each["tokens"] for each in sure] * 2
    pairs = zip(given, expected, strict=True)
    return sum(mine == theirs for mine, theirs in pairs) / len(expected)
