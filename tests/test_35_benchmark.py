"""What the benchmark measures with: the checkpoint's own loss, no divergence from itself."""

from pathlib import Path

import pytest
import torch
from quantized_quality import Judge, Lazy, compare, interval, split_texts

from minigen.checkpoint.checkpoint import Checkpoint
from minigen.checkpoint.config_json import read_config_of
from minigen.checkpoint.safetensors import read_safetensors
from tests.tiny import save_model

DOWN = "model.layers.1.mlp.down_proj.weight"


def windows() -> list[torch.Tensor]:
    return list(torch.randint(0, 211, (3, 30), generator=torch.Generator().manual_seed(0)))


def load(directory: Path) -> Checkpoint:
    return Checkpoint(directory, read_config_of(directory), read_safetensors(directory), None)


@pytest.mark.parametrize("variant", ["llama", "llama-tied"])
def test_the_loss_is_that_of_transformers(variant: str, tmp_path: Path) -> None:
    theirs = save_model(tmp_path, variant)
    judge = Judge(load(tmp_path), windows())
    own = judge.judge(judge.reference)
    with torch.no_grad():
        for window, nll in zip(windows(), own.nll, strict=True):
            loss = theirs(window.unsqueeze(0), labels=window.unsqueeze(0)).loss
            assert nll == pytest.approx(float(loss), rel=1e-4)
    assert max(map(abs, own.divergence)) < 1e-6
    assert own.agreement == [1.0] * 3


def test_a_run_may_start_at_the_first_layer_that_differs(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    checkpoint = load(tmp_path)
    judge = Judge(checkpoint, windows())
    replaced = Lazy({DOWN: lambda: checkpoint.tensors[DOWN].dequantize() * 0.5})
    whole, part = judge.measure(replaced), judge.measure(replaced, first=1)
    assert whole == part
    assert min(whole.divergence) > 1e-3
    assert judge.measure({}).nll == judge.judge(judge.reference).nll


def test_the_divergence_is_that_of_torch(tmp_path: Path) -> None:
    theirs = save_model(tmp_path, "llama")
    judge = Judge(load(tmp_path), windows())
    changed = theirs.state_dict()[DOWN] * 0.5
    found = judge.measure({DOWN: changed})
    with torch.no_grad():
        before = [theirs(each.unsqueeze(0)).logits[0, :-1].log_softmax(-1) for each in windows()]
        theirs.load_state_dict({**theirs.state_dict(), DOWN: changed})
        after = [theirs(each.unsqueeze(0)).logits[0, :-1].log_softmax(-1) for each in windows()]
    for p, q, divergence, same in zip(
        before, after, found.divergence, found.agreement, strict=True
    ):
        expected = torch.nn.functional.kl_div(q, p, reduction="batchmean", log_target=True)
        assert divergence == pytest.approx(float(expected), rel=1e-3)
        assert same == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()))


def test_calibration_does_not_see_what_is_measured() -> None:
    calibration, held_out = (set(text.split("\n\n")) for text in split_texts())
    shared = {each.strip() for each in calibration} & {each.strip() for each in held_out}
    assert shared <= {""}
    assert min(len(calibration), len(held_out)) > 500


def test_intervals_and_verdicts() -> None:
    low, high = interval([1.0, 2.0, 3.0, 4.0], resamples=500)
    assert 1 <= low < 2.5 < high <= 4
    ones = [1.0, 1.1, 0.9, 1.0]
    assert compare(ones, [0.5, 0.6, 0.3, 0.5])["verdict"] == "larger"
    assert compare([0.5, 0.6, 0.3, 0.5], ones)["verdict"] == "smaller"
    assert compare(ones, [1.1, 1.0, 1.0, 0.9])["verdict"] == "undecided"
