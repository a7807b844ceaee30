"""The engine with kernels gives the logits and the tokens of the engine without them."""

import re
from pathlib import Path

import pytest
import torch

from minigen import LLM, SamplingParams
from minigen.engine.model_runner import batch_of
from minigen.kernels.triton.attention import DevicePool
from minigen.kernels.triton.kernel_model import kernel_model
from minigen.kernels.triton.runner import DecodeInputs, GpuRunner, choose_on_device
from minigen.kernels.triton.sampling import choose_torch
from minigen.sequence import ScheduledChunk, Sequence
from tests.tiny import TINY_VOCAB, save_model, save_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
PROMPTS = ["a", "a prompt of thirty bytes and one.", "of seventeen such"]


def saved(variant: str, directory: Path) -> Path:
    save_model(directory, variant, vocab_size=TINY_VOCAB, num_hidden_layers=2)
    save_tokenizer(directory)
    return directory


def load(directory: Path, **options: object) -> LLM:
    return LLM.load(directory, weights="float32", max_num_batched_tokens=40, **options)


def test_attention_in_triton_gives_the_tokens_of_torch(tmp_path: Path) -> None:
    directory = saved("qwen2-window", tmp_path)  # its first layer has no window
    expected = load(directory).generate(PROMPTS, GREEDY)
    with_kernels = load(directory, attention_backend="triton")
    assert with_kernels.config.sliding_windows == (None, 7)
    assert with_kernels.describe()["attention"] == "attend_triton"
    ours = with_kernels.generate(PROMPTS, GREEDY)
    assert [each.token_ids for each in ours] == [each.token_ids for each in expected]


def test_a_form_is_kept_with_attention_in_triton(tmp_path: Path) -> None:
    directory = saved("llama", tmp_path)
    params = SamplingParams(
        temperature=0, max_tokens=6, structured_outputs={"regex": "[ab]{2}[cd]{2}"}
    )
    expected = load(directory).generate(PROMPTS[1], params)
    ours = load(directory, attention_backend="triton").generate(PROMPTS[1], params)
    assert (ours.text, ours.finish_reason) == (expected.text, "stop")
    assert re.fullmatch("[ab]{2}[cd]{2}", ours.text)


class Nearly:
    """Proposes two right tokens and a wrong one."""

    def __init__(self, answer: list[int]):
        self.answer = answer

    def propose(self, sequences, counts):
        first = [len(each.output_ids) for each in sequences]
        return [
            [*self.answer[i : i + 2], 1][:count] for i, count in zip(first, counts, strict=True)
        ]

    def end(self, sequence) -> None:
        pass


def test_drafts_are_verified_with_attention_in_triton(tmp_path: Path) -> None:
    directory = saved("qwen2-window", tmp_path)
    params = SamplingParams(temperature=1, seed=3, max_tokens=8, ignore_eos=True)
    expected = load(directory).generate(PROMPTS[2], params)
    llm = load(
        directory,
        attention_backend="triton",
        proposer=Nearly(expected.token_ids),
        speculative_config={"num_speculative_tokens": 3, "adaptive": False},
    )
    assert llm.generate(PROMPTS[2], params).token_ids == expected.token_ids
    counts = llm.engine.speculator.counts
    assert 0 < counts.accepted < counts.drafted


@pytest.mark.parametrize("variant", ["qwen3", "mistral-window"])
def test_the_runner_of_kernels_gives_the_logits_of_the_plain_one(
    variant: str, tmp_path: Path
) -> None:
    directory = saved(variant, tmp_path)
    llm, expected = load(directory), load(directory)
    plain, config = llm.engine.runner, llm.config
    model = kernel_model(plain.model, config.max_positions, torch.device("cpu"))
    sizes = (config.kv_heads, 16, config.head_dim)
    pool = DevicePool(config.num_layers, 40, *sizes, torch.float32, torch.device("cpu"))
    runner = GpuRunner(model, pool, plain.manager, config.sliding_windows, 40, ())
    inputs = DecodeInputs(4, plain.manager.tables.shape[1], torch.device("cpu"))
    fixed = inputs.batch(4)
    seen: list[torch.Tensor] = []

    def both(chunks: list[ScheduledChunk]) -> torch.Tensor:
        copies = plain.manager.pop_pending_copies()
        plain.manager.pop_pending_copies = lambda: copies  # both runners create them
        theirs = PLAIN(chunks)
        seen.append(runner.logits(chunks) - theirs)
        if all(chunk.num_tokens == 1 for chunk in chunks):  # padded like a captured step
            inputs.fill(4, batch_of(runner.packer.pack(chunks), len(chunks)))
            seen.append(runner.steps.run(fixed)[: len(chunks)] - theirs)
        del plain.manager.pop_pending_copies
        return theirs

    PLAIN = plain.logits
    plain.logits = both
    outputs = llm.generate(PROMPTS, GREEDY)
    assert len(seen) >= GREEDY.max_tokens + 2, "some steps were only decodes"
    assert max(float(each.abs().max()) for each in seen) < 1e-4
    plain_tokens = [each.token_ids for each in expected.generate(PROMPTS, GREEDY)]
    assert [each.token_ids for each in outputs] == plain_tokens


def test_plain_draws_are_the_devices_and_others_torchs(tiny_sequences: list) -> None:
    logits = torch.randn(len(tiny_sequences), 50, generator=torch.Generator().manual_seed(1))
    found = choose_on_device(logits, tiny_sequences)
    assert found[0] == int(logits[0].argmax())
    assert all(0 <= token < 50 for token in found)
    assert found == choose_on_device(logits, tiny_sequences), "the same seeds draw the same"


def test_a_rows_draw_does_not_depend_on_other_rows() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    wanted = [{}, {"top_k": 3}, {"temperature": 0, "logit_bias": {7: 100}}]
    for seed in range(20):
        rows = [
            Sequence(i, (1,), SamplingParams(**{"temperature": 1.0} | each), seed, 8, frozenset())
            for i, each in enumerate(wanted)
        ]
        alone = [choose_on_device(logits[i : i + 1], [rows[i]])[0] for i in range(3)]
        assert choose_on_device(logits, rows) == alone
        assert choose_on_device(logits.flip(0), rows[::-1]) == alone[::-1]
        assert alone[2] == 7


def test_a_whole_number_is_a_temperature_like_another(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []

    def choose(logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor):
        given.append(temperatures)
        return choose_torch(logits, temperatures, seeds)

    monkeypatch.setattr("minigen.kernels.triton.runner.choose_triton", choose)
    row = Sequence(1, (1,), SamplingParams(temperature=1), 5, 8, frozenset())
    choose_on_device(torch.randn(1, 50), [row])
    assert [(each.dtype, each.tolist()) for each in given] == [(torch.float32, [1.0])]


def test_a_tiny_temperature_draws_the_most_likely_token() -> None:
    row = Sequence(1, (1,), SamplingParams(temperature=1e-38), 5, 8, frozenset())
    for logits in ([1.0, 5.0, 1000.0, 10.0], [-1000.0, -20.0, -10.0, -30.0]):
        assert choose_on_device(torch.tensor([logits]), [row]) == [2]


@pytest.fixture(params=[{"temperature": 1.0}, {"temperature": 0.7, "top_k": 3}])
def tiny_sequences(request: pytest.FixtureRequest) -> list:
    wanted = [SamplingParams(temperature=0), SamplingParams(**request.param)]
    return [Sequence(i, (1,), params, 5, 8, frozenset()) for i, params in enumerate(wanted)]
