"""Log probabilities of the prompt's tokens equal those of transformers, however it is chunked."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from minigen import LLM, SamplingParams
from minigen.sequence import LOGPROBS_PER_STEP
from minigen.trace.events import EventKind

LONG = "a prompt that takes more than one step, since each of its tokens takes a row"
PROMPTS = ["ab", LONG, "some text that lies between", LONG + " of logits"]
SCORED = SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=2, ignore_eos=True)
PLAIN = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)

ENGINES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "chunks of three": {"max_num_seqs": 2, "max_num_batched_tokens": 3},
    "static": {"scheduler": "static"},
    "no prefix cache": {"enable_prefix_caching": False},
    "preempted": {"num_blocks": 29, "block_size": 4, "max_num_seqs": 4},
}


@pytest.fixture(scope="module")
def reference(tiny_directory: Path) -> Any:
    """Load transformers' own model of the same weights."""
    return AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32).eval()


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES.keys())
def test_a_prompts_logprobs_are_those_of_transformers(
    tiny_directory: Path, reference: Any, options: dict[str, Any]
) -> None:
    llm = LLM.load(tiny_directory, weights="float32", **options)
    params = [SCORED, SCORED, PLAIN, SCORED]
    with llm.record() as recorder:
        for _ in range(2):  # the second time all prefixes are in the cache
            outputs = llm.generate(PROMPTS, params)
            assert outputs[2].prompt_logprobs is None
            for output in (outputs[0], outputs[1], outputs[3]):
                check(output, reference)
    preempted = sum(event.kind is EventKind.PREEMPTED for event in recorder.events)
    assert (preempted > 0) == ("num_blocks" in options)
    plain = llm.generate(PROMPTS, PLAIN)
    assert [each.token_ids for each in plain] == [each.token_ids for each in outputs]


def check(output: Any, reference: Any) -> None:
    """Compare all of a prompt's logprobs with a single forward pass of the reference."""
    ids = torch.tensor([output.prompt_token_ids])
    with torch.inference_mode():
        expected = reference(ids).logits[0].log_softmax(-1)
    first, *scored = output.prompt_logprobs
    assert first is None
    assert len(scored) == len(output.prompt_token_ids) - 1
    for row, (token_id, entry) in enumerate(zip(output.prompt_token_ids[1:], scored, strict=True)):
        assert next(iter(entry)) == token_id
        assert entry[token_id].rank == 1 + int((expected[row] > expected[row, token_id]).sum())
        for each, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(expected[row, each]), abs=1e-4)
        assert {logprob.rank for logprob in entry.values()} >= {1, 2}


def test_the_first_of_n_answers_has_the_prompts_logprobs(tiny_llm: LLM, reference: Any) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=4, prompt_logprobs=1)
    output = tiny_llm.generate(LONG, params)
    assert len(output.choices) == 3
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_a_step_computes_few_tokens_of_such_a_prompt_and_all_of_another(tiny_llm: LLM) -> None:
    def longest_chunk(prompt: str, params: SamplingParams) -> int:
        with tiny_llm.record() as recorder:
            tiny_llm.generate(prompt, params)
        scheduled = (each for each in recorder.events if each.kind is EventKind.SCHEDULED)
        return max(event.counts["tokens"] for event in scheduled)

    assert longest_chunk(LONG, SCORED) == LOGPROBS_PER_STEP
    assert longest_chunk("z" + LONG, PLAIN) > 2 * LOGPROBS_PER_STEP
