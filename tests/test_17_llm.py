"""`LLM`: prompts in, answers out, alone or together, streamed or whole; no state is left behind."""

from pathlib import Path
from typing import Any

import pytest

from minigen import LLM, SamplingParams
from minigen.errors import (
    ChatTemplateError,
    ContextLengthError,
    OptionError,
    ParamsError,
    PromptError,
)
from tests.tiny import TINY_VOCAB, save_model, save_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=12)
SEEDED = SamplingParams(seed=11, max_tokens=12)


def is_idle(llm: LLM) -> bool:
    """Return whether no sequence waits, runs, or holds memory."""
    manager = llm.engine.scheduler.manager  # type: ignore[attr-defined]
    everything = manager.allocator.num_blocks
    return not llm.engine.has_work() and not manager.rows and manager.num_available == everything


def test_one_prompt_returns_one_output_and_a_list_a_list_in_order(tiny_llm: LLM) -> None:
    one = tiny_llm.generate("abc", GREEDY)
    both = tiny_llm.generate(["abc", "hello there"], GREEDY)
    assert one.text == both[0].text
    assert [output.num_prompt_tokens for output in both] == [4, 12]
    assert tiny_llm.generate([], GREEDY) == []
    assert tiny_llm.generate([1, 50, 60], GREEDY).prompt_token_ids == (1, 50, 60)
    assert tiny_llm.generate([[1, 50], "x"], GREEDY)[0].prompt_token_ids == (1, 50)


def test_text_gets_the_beginning_token_and_ids_do_not(tiny_llm: LLM) -> None:
    ids = tiny_llm.tokenizer.encode("abc", add_special_tokens=False)
    assert tiny_llm.generate("abc", GREEDY).prompt_token_ids == (1, *ids)
    assert tiny_llm.generate(ids, GREEDY).prompt_token_ids == tuple(ids)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_an_answer_is_the_same_alone_in_a_batch_and_in_turn(
    tiny_directory: Path, params: SamplingParams
) -> None:
    prompts = ["a", "some longer prompt", "xyz" * 9, "q", "1 2 3", "the end"]
    together = LLM.load(tiny_directory, weights="float32", max_num_seqs=6)
    in_turn = LLM.load(tiny_directory, weights="float32", max_num_seqs=1)
    narrow = LLM.load(tiny_directory, weights="float32", max_num_seqs=6, max_num_batched_tokens=20)
    alone = [in_turn.generate(prompt, params).token_ids for prompt in prompts]
    for llm in (together, in_turn, narrow):
        assert [output.token_ids for output in llm.generate(prompts, params)] == alone
        assert is_idle(llm)


def test_n_answers_differ_and_are_repeated_by_the_seed(tiny_llm: LLM) -> None:
    params = SamplingParams(seed=5, n=3, max_tokens=10)
    first, second = tiny_llm.generate(["abc", "abc"], params)
    texts = [choice.token_ids for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len({tuple(ids) for ids in texts}) == 3
    assert texts == [choice.token_ids for choice in second.choices]
    assert first.num_output_tokens == sum(map(len, texts))
    unseeded = {tuple(tiny_llm.generate("abc").token_ids) for _ in range(3)}
    assert len(unseeded) == 3


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_streamed_pieces_make_up_the_whole_text(tiny_llm: LLM, params: SamplingParams) -> None:
    whole = tiny_llm.generate("abc", params)
    assert "".join(tiny_llm.stream("abc", params)) == whole.text
    deltas = list(tiny_llm.stream_deltas(["abc", "xyz"], params))
    assert "".join(delta.text for delta in deltas if delta.prompt == 0) == whole.text
    assert [delta.finish_reason for delta in deltas if delta.prompt == 0][:-1] == [None] * (
        len(whole.token_ids) - 1
    )


def test_two_streams_of_one_model_may_take_turns(tiny_llm: LLM) -> None:
    left = tiny_llm.stream_deltas(["left"], GREEDY)
    right = tiny_llm.stream_deltas(["right"], GREEDY)
    taken: dict[str, list[int]] = {"left": [], "right": []}
    taken["left"].append(next(left).token_id)
    for _ in range(11):
        taken["right"].append(next(right).token_id)
        taken["left"].append(next(left).token_id)
    taken["right"].append(next(right).token_id)
    for name, ids in taken.items():
        assert ids == tiny_llm.generate(name, GREEDY).token_ids


def test_a_closed_stream_gives_its_memory_back(tiny_llm: LLM) -> None:
    stream = tiny_llm.stream_deltas(["abc", "def"], SamplingParams(max_tokens=50))
    next(stream)
    assert not is_idle(tiny_llm)
    stream.close()
    assert is_idle(tiny_llm)


def test_a_runner_that_fails_leaves_nothing_behind(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tiny_llm.engine, "sampler", lambda logits, sequences: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tiny_llm.generate(["a", "b"], GREEDY)
    assert is_idle(tiny_llm)
    assert tiny_llm.generate("a", GREEDY).finish_reason == "length"


def test_an_answer_ends_at_a_stop_token_a_stop_string_a_limit_or_the_context(
    tiny_llm: LLM,
) -> None:
    free = tiny_llm.generate("abc", GREEDY)
    assert free.finish_reason == "length"
    assert len(free.token_ids) == 12
    third = free.token_ids[2]
    first_third = free.token_ids.index(third)
    by_token = tiny_llm.generate(
        "abc", SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[third])
    )
    assert by_token.token_ids == free.token_ids[: first_third + 1]
    assert by_token.finish_reason == "stop"
    assert free.text.startswith(by_token.text)
    stop = free.text[3:5]
    by_text = tiny_llm.generate("abc", SamplingParams(temperature=0, max_tokens=12, stop=stop))
    assert by_text.text == free.text[: free.text.find(stop)]
    assert by_text.finish_reason == "stop"
    prompt = [9] * 120
    to_the_end = tiny_llm.generate(prompt, SamplingParams(temperature=0, max_tokens=None))
    assert len(prompt) + len(to_the_end.token_ids) == tiny_llm.config.max_positions
    assert to_the_end.finish_reason == "length"
    assert is_idle(tiny_llm)


def test_the_models_own_end_token_stops_an_answer_unless_ignored(tiny_llm: LLM) -> None:
    to_the_end = {2: 100.0}  # a bias that makes </s> certain
    ended = tiny_llm.generate("abc", SamplingParams(max_tokens=5, logit_bias=to_the_end))
    assert (ended.token_ids, ended.text, ended.finish_reason) == ([2], "", "stop")
    ignoring = SamplingParams(max_tokens=5, logit_bias=to_the_end, ignore_eos=True)
    assert tiny_llm.generate("abc", ignoring).token_ids == [2] * 5
    at_least = SamplingParams(max_tokens=9, min_tokens=4, logit_bias=to_the_end)
    kept = tiny_llm.generate("abc", at_least).token_ids
    assert len(kept) == 5
    assert kept.index(2) == 4


def test_logprobs_come_with_every_token_and_only_when_asked(tiny_llm: LLM) -> None:
    assert tiny_llm.generate("abc", GREEDY).logprobs is None
    output = tiny_llm.generate("abc", SamplingParams(temperature=0, max_tokens=4, logprobs=3))
    assert output.logprobs is not None
    assert len(output.logprobs) == 4
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert len(entry) == 3
        assert entry[token_id].rank == 1


def test_a_chat_goes_through_the_template(tiny_llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    prompt_ids = tiny_llm.chat_prompt(messages)
    decoded = tiny_llm.tokenizer.decode(prompt_ids, skip_special_tokens=False)
    assert decoded == "<|user|>hi</s><|assistant|>"
    assert tiny_llm.chat(messages, GREEDY).prompt_token_ids == tuple(prompt_ids)


def test_a_model_without_a_template_continues_text_but_does_not_chat(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", vocab_size=TINY_VOCAB)
    save_tokenizer(tmp_path, chat_template=None)
    llm = LLM.load(tmp_path)
    assert len(llm.generate("x", GREEDY).token_ids) == 12
    with pytest.raises(ChatTemplateError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([[]], "prompt is empty"),
        (["fine", []], "prompt 1 is empty"),
        ([1, TINY_VOCAB], f"token id {TINY_VOCAB}"),
        ([1, -1], "token id -1"),
        ([[1.5]], "whole numbers"),
        ([[True]], "whole numbers"),
        ([["a"]], "whole numbers"),
        (None, "NoneType"),
        (b"abc", "bytes"),
        (["a", None], "NoneType"),
        (["a", b"x"], "bytes"),
        ({"a": 1}, "dict"),
        (7, "int"),
        ("\ud800", "U+D800|surrogate|UTF-8"),
    ],
)
def test_an_invalid_prompt_is_refused(tiny_llm: LLM, prompt: Any, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        tiny_llm.generate(prompt, GREEDY)
    assert is_idle(tiny_llm)


def test_a_prompt_as_long_as_the_context_is_refused_with_the_numbers(tiny_llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match=r"128 tokens.*holds 128"):
        tiny_llm.generate([5] * 128, GREEDY)
    assert len(tiny_llm.generate([5] * 127, GREEDY).token_ids) == 1


def test_settings_that_do_not_fit_the_model_or_the_call_are_refused(tiny_llm: LLM) -> None:
    for params in (
        SamplingParams(logit_bias={TINY_VOCAB: 1.0}),
        SamplingParams(stop_token_ids=[TINY_VOCAB]),
    ):
        with pytest.raises(ParamsError, match=str(TINY_VOCAB)):
            tiny_llm.generate("x", params)
    with pytest.raises(ParamsError, match="2 in all"):
        tiny_llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(ParamsError, match="stream_deltas"):
        tiny_llm.stream("a", SamplingParams(n=2))
    with pytest.raises(PromptError, match="stream_deltas"):
        tiny_llm.stream(["a", "b"])  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [{"temperature": 0}, 0.7, ["greedy"], [GREEDY, {"seed": 1}]])
def test_settings_that_are_not_sampling_params_are_refused_by_their_type(
    tiny_llm: LLM, params: Any
) -> None:
    for ask in (tiny_llm.generate, tiny_llm.stream):
        with pytest.raises(ParamsError, match="params must be a SamplingParams"):
            ask("x", params)
    assert is_idle(tiny_llm)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": "int3"}, "float32, bfloat16"),
        ({"threads": 0}, "threads"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_read(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        LLM.load("no-such-model", **options)


def test_auto_weights_follow_the_processor(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for features, form in ((frozenset({"avx512_bf16"}), "bfloat16"), (frozenset(), "float32")):
        monkeypatch.setattr("minigen.hardware.cpu_features", lambda features=features: features)
        llm = LLM.load(tiny_directory)
        assert llm.describe()["weights"].startswith(form)
        assert len(llm.generate("abc", GREEDY).token_ids) == 12
