"""Chapter 33's plain kernels: the engine runs on them, and they match the package's kernels."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from minigen import LLM, SamplingParams
from minigen.errors import OptionError
from minigen_course.ch33_paged_attention.exercises import contexts, joined
from minigen_course.ch33_paged_attention.kernels import (
    decode_kernel,
    decoding,
    gather_kernel,
    gathering,
    grouped_kernel,
    join_kernel,
    joining,
    launch_decode,
    launch_join,
    no_parts,
    tiled_kernel,
)
from minigen_course.ch33_paged_attention.lesson import moved_by_tensor
from minigen_course.ch33_paged_attention.rungs import grouping, launch_tiled, tiling
from minigen_course.grading.check import judge
from minigen_course.grading.exercise import exercises
from minigen_course.grading.stub import stub
from minigen_course.lab import triton_interpreter
from minigen_course.lab.triton_interpreter import launch, tl
from tests.answers.ch33_paged_attention import changed
from tests.tiny import TINY_VOCAB, save_model, save_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPTS = ["a", "a prompt of thirty bytes and one.", "of seventeen such"]
triton = pytest.importorskip("triton", reason="Triton is for Linux alone")


@pytest.mark.parametrize(
    "attend",
    [
        gathering(gather_kernel),
        grouping(grouped_kernel),
        tiling(tiled_kernel),
        joining(join_kernel),
        decoding(decode_kernel, splits=3),
    ],
    ids=["gathering", "grouping", "tiling", "joining", "decoding"],
)
def test_the_engine_gives_the_same_tokens_with_the_plain_kernels(
    attend: Any, tiny_directory: Path, tiny_llm: LLM
) -> None:
    expected = tiny_llm.generate(PROMPTS, GREEDY)
    ours = LLM.load(tiny_directory, weights="float32", num_blocks=16, attention_backend=attend)
    plain_tokens = [each.token_ids for each in ours.generate(PROMPTS, GREEDY)]
    assert plain_tokens == [each.token_ids for each in expected]


def test_a_model_with_windows_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "mistral-window", vocab_size=TINY_VOCAB, num_hidden_layers=1)
    save_tokenizer(tmp_path)
    with pytest.raises(OptionError, match="not support sliding windows"):
        LLM.load(tmp_path, weights="float32", attention_backend=decoding(decode_kernel))


@pytest.mark.parametrize("splits", [1, 3])
def test_both_passes_are_the_packages_decode(splits: int) -> None:
    from minigen.kernels.triton.decode_attention import paged_decode_triton
    from minigen_course.lab.triton_interpreter import interpreted

    made = contexts([37, 5, 64], block_size=8, kv_heads=2, head_dim=20)
    memory = (made.keys, made.values)
    tables = made.tables.where(made.tables < len(made.keys), 0)
    q, parts = torch.randn(3, 6, 20), no_parts(3 * 6, splits, 20)
    launch_decode(decode_kernel, q, *memory, tables, made.lengths, parts)
    mixed = torch.empty(18, 20)
    launch_join(join_kernel, parts, mixed)
    with interpreted():
        theirs = paged_decode_triton(q, *memory, tables, made.lengths, splits=splits)
    torch.testing.assert_close(mixed.unflatten(0, (3, 6)), theirs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(joined(parts).float(), mixed, atol=1e-5, rtol=1e-4)
    unsplit = torch.empty_like(q)
    launch_tiled(tiled_kernel, q, *memory, tables, made.lengths, unsplit)
    torch.testing.assert_close(unsplit, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("splits", [1, 3])
def test_the_packages_kernel_loads_each_key_and_value_once(splits: int) -> None:
    from minigen.kernels.triton.decode_attention import paged_decode_triton
    from minigen_course.lab.programs import record_programs

    made = contexts([37, 5, 64], block_size=8, kv_heads=2, head_dim=20)
    tensors = dict(zip(made._fields[:4], made[:4], strict=True))
    q = torch.randn(3, 6, 20)
    found = record_programs(
        lambda: paged_decode_triton(q, *made[:4], splits=splits), q=q, **tensors
    )
    moved = moved_by_tensor(found)
    assert moved["keys"] == moved["values"] == 4 * (37 + 5 + 64) * 2 * 20
    assert moved["q"] == q.nbytes * splits


def test_the_plain_kernels_compile_for_real_gpus() -> None:
    from minigen_course.ch31_triton.gpu_kernels import machine_code

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    ids, float32 = torch.int64, torch.float32
    half, parts = empty(64, 16, 8, 64), no_parts(1, 1, 1)
    parts = type(parts)(*(each.to("meta") for each in parts))

    def both() -> None:
        triton.jit(gather_kernel)[(4,)](
            half, empty(4, dtype=ids), empty(64, 8, 64), 64, 8192, 512,
            WIDTH=512, BLOCK_SIZE=16, BLOCK_N=16, BLOCK_W=512,
        )  # fmt: skip
        triton.jit(decode_kernel)[(8, 4, 2)](
            empty(4, 32, 64, dtype=float32), half.float(), half.float(), empty(4, 64, dtype=ids),
            empty(4, dtype=ids), *parts, 8192, 512, 64, 64, 0.18,
            KV_HEADS=8, GROUP=4, HEAD_DIM=64, BLOCK_SIZE=16, SPLITS=2,
            BLOCK_G=16, BLOCK_D=64, BLOCK_N=16,
        )  # fmt: skip
        triton.jit(grouped_kernel)[(8,)](
            empty(32, 64, dtype=float32), half[0].float(), half[1].float(), empty(32, 64), 16, 0.18,
            KV_HEADS=8, GROUP=4, HEAD_DIM=64, BLOCK_G=16, BLOCK_D=64, BLOCK_N=16,
        )  # fmt: skip
        triton.jit(tiled_kernel)[(8, 4)](
            empty(4, 32, 64, dtype=float32), half.float(), half.float(), empty(4, 64, dtype=ids),
            empty(4, dtype=ids), empty(4, 32, 64), 8192, 512, 64, 64, 0.18,
            KV_HEADS=8, GROUP=4, HEAD_DIM=64, BLOCK_SIZE=16, BLOCK_G=16, BLOCK_D=64, BLOCK_N=16,
        )  # fmt: skip
        triton.jit(join_kernel)[(128,)](
            *parts, empty(128, 64), HEAD_DIM=64, SPLITS=2, BLOCK_S=2, BLOCK_D=64
        )

    codes = machine_code("sm_90", both)
    names = ["gather_kernel", "decode_kernel", "grouped_kernel", "tiled_kernel", "join_kernel"]
    assert [code.kernel for code in codes] == names
    assert all(code.spilled == 0 for code in codes)


def test_an_answer_from_a_notebook_is_checked_in_a_separate_process() -> None:
    exercise = exercises("33")["join_kernel"]
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(stub("minigen_course.ch33_paged_attention.kernels.join_kernel"), names)
    result = judge("33", exercise.name, names["join_kernel"])
    assert "still empty" in result.message
    mine = changed(join_kernel, ("other=0.0", "other=0.00"))
    mine.__module__ = "__main__"
    assert str(judge("33", exercise.name, mine)) == "✓ join_kernel: all 7 checks passed."


def test_an_exception_in_a_kernel_is_raised() -> None:
    def stumbles(x_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        raise LookupError("here")

    with pytest.raises(LookupError, match="here"):
        launch(stumbles, (1,), torch.zeros(1), BLOCK=4)


def test_without_triton_it_can_be_imported_and_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_interpreter, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match="pip install"):
        launch(gather_kernel, (1,))
    result_of = exercises("33")["gather_kernel"].checks[0]
    with pytest.raises(AssertionError, match="This needs Triton"):
        result_of(gather_kernel)
    blocked = (
        "import sys; sys.modules['triton'] = None; sys.modules['triton.language'] = None\n"
        "from minigen_course.ch33_paged_attention import exercises, figures, lesson\n"
        "from minigen_course.grading.stub import stub\n"
        "exec(stub('minigen_course.ch33_paged_attention.kernels.decode_kernel'))"
    )
    subprocess.run([sys.executable, "-c", blocked], check=True)
