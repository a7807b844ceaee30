"""Write the default model's answers in float32: `python -m tests.golden.make`.

Run it only when the answers are meant to change, and read them before you commit them.
"""

import json
from pathlib import Path

from minigen import LLM, SamplingParams

ANSWERS = Path(__file__).parent / "smollm2-135m.json"
QUESTIONS = (
    "What is the capital of France?",
    "Explain what gravity is in one sentence.",
    "Name three primary colors.",
    "What is the opposite of hot?",
    "How many days are in a week?",
    "Write a sentence about a cat.",
    "Why do people need sleep?",
    "What language is spoken in Brazil?",
    "Give me a tip for learning to cook.",
    "What is water made of?",
)
PARAMS = SamplingParams(temperature=0, max_tokens=40)


def answer_all(llm: LLM) -> list[dict[str, object]]:
    """Return each question with the tokens and text of its answer."""
    prompts = [llm.chat_prompt([{"role": "user", "content": each}]) for each in QUESTIONS]
    return [
        {"question": question, "token_ids": output.token_ids, "text": output.text}
        for question, output in zip(QUESTIONS, llm.generate(prompts, PARAMS), strict=True)
    ]


if __name__ == "__main__":
    answers = answer_all(LLM.load(weights="float32"))
    lines = ",\n".join(json.dumps(each) for each in answers)
    ANSWERS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    for each in answers:
        print(f"{each['question']}\n    {each['text']}\n")
