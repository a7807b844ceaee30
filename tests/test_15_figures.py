"""The logit lens shows the model's predictions; a model's budget adds up to its published size."""

import pytest
import torch
from matplotlib.figure import Figure

from minigen import hub
from minigen_course.ch15_transformer.figures import (
    SHOWN,
    Lens,
    added_by_layer,
    amount,
    attention_share,
    budget_bars,
    forward_flow,
    lens_grid,
    look,
)
from minigen_course.ch15_transformer.reference import token_flops
from minigen_course.grading.plug_in import using
from minigen_course.lab.cost_model import SHAPES, ModelShape, config_of, parameter_budget
from minigen_course.lab.inspect_model import load_model, next_logits, recorded_states


def a_lens(num_states: int = 5, num_tokens: int = 3) -> Lens:
    chances = torch.rand(num_states, num_tokens, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(num_states * num_tokens).reshape(num_states, num_tokens)
    followed = chances.unsqueeze(-1) / torch.arange(1, 6)
    return Lens(
        ids[0], ids, chances, 10 * chances, ids[-1].unsqueeze(-1) + torch.arange(5), followed
    )


def words_in(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize(
    ("shown", "expected"), [(SHOWN[0], "<12>|{:.0%}"), (SHOWN[1], "{:.0%}"), (SHOWN[2], "bits")]
)
def test_every_cell_of_the_grid_shows_the_requested_value(shown: str, expected: str) -> None:
    lens = a_lens()
    drawn = lens_grid(lens, "<{}>".format, shown=shown, every=2)
    words = "|".join(words_in(drawn))
    assert words.count("%" if shown != SHOWN[2] else "bits") == 3 * 3  # layers 0, 2 and 4
    assert expected.format(float(lens.probability[4, 0])) in words


def test_the_chosen_position_is_followed_through_all_layers() -> None:
    lens = a_lens()
    followed = lens_grid(lens, "<{}>".format, position=2).axes[1]
    assert [list(line.get_xdata()) for line in followed.lines] == [
        pytest.approx(lens.final_probability[:, 1, rank].tolist()) for rank in range(5)
    ]


def test_invalid_input_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="has 3 tokens: there is no position 4"):
        lens_grid(a_lens(), str, position=4)
    with pytest.raises(ValueError, match="shown is one of"):
        lens_grid(a_lens(), str, shown="everything")
    with pytest.raises(ValueError, match="context is from 1"):
        budget_bars(SHAPES["Llama-2-7B"], 0)


@pytest.mark.model
def test_the_last_row_of_the_lens_is_the_models_prediction() -> None:
    llm = load_model(weights="float32")
    text = "The capital of France is"
    lens, logits = look(llm, text), next_logits(llm, text)
    assert int(lens.likeliest[-1, -1]) == int(logits.argmax()) == int(lens.final[-1, 0])
    expected = pytest.approx(float(logits.softmax(-1).max()), rel=1e-5)  # other shapes, other sums
    assert float(lens.probability[-1, -1]) == expected
    states = recorded_states(llm, llm.tokenizer.encode(text))
    assert len(states) == llm.config.num_layers + 1
    with pytest.raises(ValueError, match="at least one word"):
        look(llm, "")
    with pytest.raises(ValueError, match="tokens; at most 12"):
        look(llm, "one two three " * 10)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("SmolLM2-135M", 134_515_008),
        ("SmolLM2-1.7B", 1_711_376_384),
        ("Llama-2-7B", 6_738_415_616),
        ("Llama-3-8B", 8_030_261_248),
        ("Llama-3-70B", 70_553_706_496),
    ],
)
def test_the_parts_add_up_to_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert SHAPES[name].parameters == parameters


@pytest.mark.model
def test_the_default_models_shape_is_read_from_its_configuration() -> None:
    llm = load_model(hub.DEFAULT_MODEL)
    assert ModelShape.of(llm.config) == SHAPES["SmolLM2-135M"]


def test_a_tokens_work_is_two_operations_for_each_parameter_and_grows_with_the_context() -> None:
    shape = SHAPES["Llama-3-8B"]
    assert shape.flops(0) == 2 * shape.multiplied
    assert shape.flops(1001) - shape.flops(1000) == 4 * 32 * 4096
    assert shape.kv_numbers(1) * 2 == 131_072  # bytes in 16 bits


def test_bars_are_as_long_as_the_parts() -> None:
    shape = SHAPES["SmolLM2-135M"]
    left, right = budget_bars(shape, 100).axes
    parts = parameter_budget(shape, 100)
    assert [bar.get_width() for bar in left.patches] == [each.parameters for each in parts]
    assert [bar.get_width() for bar in right.patches] == [each.flops for each in parts]


def test_amounts_are_short() -> None:
    assert [amount(each) for each in (134_515_008, 999_600, 12, 2.69e8)] == [
        *("135 M", "1 M", "12 ", "269 M")
    ]


def test_the_flow_names_every_shape_of_the_model() -> None:
    words = words_in(forward_flow(config_of("SmolLM2-135M"), 6))
    for shape in ([6], [6, 576], [6, 9, 64], [6, 3, 64], [6, 1536], [6, 49152]):
        assert str(shape) in words
    assert words.count("[6, 3, 64]") == 2, "keys and values"
    assert "30\nlayers" in words
    assert "[2, 64, 128]" in words_in(forward_flow(config_of("Llama-3-70B"), 2))


def test_tied_embeddings_are_named_and_a_lookup_costs_nothing() -> None:
    left, right = budget_bars(SHAPES["SmolLM2-135M"], 6).axes
    labels = [[text.get_text().strip() for text in axes.texts] for axes in (left, right)]
    assert labels[0][-1] == "tied: the embedding is reused"
    assert labels[1][0] == "none: a row is looked up"
    untied = budget_bars(SHAPES["Llama-3-8B"], 6).axes[0]
    assert untied.texts[-1].get_text().strip() == "525 M (6.5%)"


def test_a_layers_addition_and_its_loss_are_drawn() -> None:
    states = torch.tensor([3.0, 4.0]).expand(4, 3, 2) * torch.arange(1.0, 5)[:, None, None]
    left, right = added_by_layer(states, [90.0, 7.0, 8.0], whole=6.0).axes
    stream, added = (list(line.get_ydata()) for line in left.lines)
    assert stream == pytest.approx([5, 10, 15])
    assert added == pytest.approx([5, 5, 5])
    assert list(right.lines[-1].get_ydata()) == [90, 7, 8]


def test_attentions_share_is_computed_by_the_exercise_in_use() -> None:
    solid, dashed, *_ = attention_share(["Llama-3-8B"]).axes[0].lines
    place = list(solid.get_xdata()).index(8192)
    assert solid.get_ydata()[place] == pytest.approx(0.222, abs=1e-3)  # type: ignore[index]
    assert dashed.get_ydata()[place] == pytest.approx(0.362, abs=1e-3)  # type: ignore[index]

    def twice(config: object, context: int) -> int:
        return 2 * token_flops(config, context)  # type: ignore[arg-type]

    with using(15, token_flops=twice):
        _, dashed, *_ = attention_share(["Llama-3-8B"]).axes[0].lines
    assert dashed.get_ydata()[0] == pytest.approx(0.179 / 2, abs=1e-3)  # type: ignore[index]
