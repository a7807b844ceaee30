"""FlashAttention: the loop over tiles, its memory, and the kernel in Triton's interpreter."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from minigen import LLM, SamplingParams
from minigen.errors import OptionError
from minigen.model.attention import attention, attention_naive, causal_mask
from minigen_course.ch32_flash_attention.flash import (
    Partial,
    attend_tile,
    flash_attention,
    merge,
    nothing_seen,
)
from minigen_course.ch32_flash_attention.kernels import flash_kernel, unmasked_kernel
from minigen_course.ch32_flash_attention.lesson import (
    flash_by,
    numbers_moved,
    record_flash,
    start_unmasked,
)
from minigen_course.grading.plug_in import attend_by, attending, using
from minigen_course.lab.memory_watch import count_memory
from minigen_course.lab.triton_interpreter import bytes_moved, record
from tests.gpu.processes import assert_passes_interpreted, run_python
from tests.tiny import TINY_VOCAB, save_model, save_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
PROMPTS = ["a", "a prompt of thirty bytes and one.", "of seventeen such"]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is for Linux alone")


def inputs(num_new: int, context: int, head_dim: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_new + context)
    shapes = ((num_new, 4, head_dim), (context, 2, head_dim), (context, 2, head_dim))
    return [torch.randn(*shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("window", [None, 1, 5, 70])
@pytest.mark.parametrize("tile", [1, 4, 64])
@pytest.mark.parametrize(("num_new", "context"), [(1, 1), (1, 13), (9, 9), (13, 40), (70, 70)])
def test_a_loop_over_tiles_is_attention(
    num_new: int, context: int, tile: int, window: int | None
) -> None:
    given = inputs(num_new, context)
    ours = flash_attention(*given, window, tile)
    torch.testing.assert_close(ours, attention_naive(*given, window), atol=1e-5, rtol=1e-5)


def test_parts_may_be_merged_in_any_order() -> None:
    q, k, v = inputs(3, 9)
    seen = causal_mask(3, 9)
    one, two, three = (
        attend_tile(q, k[at : at + 3], v[at : at + 3], seen[:, at : at + 3]) for at in (0, 3, 6)
    )
    ways = [
        merge(merge(one, two), three),
        merge(one, merge(two, three)),
        merge(three, merge(one, two)),
    ]
    for each in ways:
        whole = merge(nothing_seen(q), each)
        torch.testing.assert_close(whole.mixed / whole.total[..., None], attention_naive(q, k, v))


def test_merging_two_empty_parts_gives_an_empty_part() -> None:
    none = nothing_seen(torch.ones(2, 3, 4))
    both = merge(none, none)
    assert both.maximum.eq(-torch.inf).all()
    assert not both.total.any()
    assert not both.mixed.any()


def test_memory_grows_with_the_tokens_and_not_with_their_square() -> None:
    def peak(way, tokens: int) -> int:
        return count_memory(partial(way, *inputs(tokens, tokens))).peak

    assert peak(attention_naive, 512) > 3.5 * peak(attention_naive, 256)
    for way in (flash_attention, attention):
        assert peak(way, 512) < 2.2 * peak(way, 256)
    scores = 4 * 512 * 512 * 4
    assert peak(attention_naive, 512) >= 2 * scores
    assert peak(flash_attention, 512) < scores / 2


def test_memory_is_counted_while_it_is_held_and_views_are_free() -> None:
    given = torch.ones(1000)

    def run() -> None:
        doubled = given * 2  # 4,000 bytes, and 4,000 read
        doubled = doubled.view(10, 100).T + 1  # both exist for a moment
        doubled.add_(1)  # in place
        del doubled
        torch.cat([given, given])

    memory = count_memory(run)
    assert memory.peak == 8000
    assert memory.largest == 8000
    assert memory.moved == 8000 + 8000 + 8000 + 16000


def test_existing_tensors_do_not_count_as_new_memory() -> None:
    given = torch.ones(1000)
    assert count_memory(lambda: given.add_(1)).peak == 0
    assert count_memory(lambda: given[:10]).moved == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_a_function_of_attention_runs_in_the_engine(tiny_directory: Path, enabled: bool) -> None:
    lengths = []

    def mine(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
        lengths.append((len(q), len(k)))
        return flash_attention(q, k, v, window, tile=8)

    options = {"weights": "float32", "max_num_batched_tokens": 20, "enable_prefix_caching": enabled}
    expected = LLM.load(tiny_directory, **options).generate(PROMPTS, GREEDY)
    llm = LLM.load(tiny_directory, attention_backend=attend_by(mine), **options)
    assert llm.describe()["attention"] == "mine"
    ours = llm.generate(PROMPTS, GREEDY)
    assert [each.token_ids for each in ours] == [each.token_ids for each in expected]
    assert all(1 < num_new <= context for num_new, context in lengths)
    assert any(num_new < context for num_new, context in lengths), "some prompts run in chunks"


def test_a_loaded_engine_attends_by_another_function_for_a_while(tiny_directory: Path) -> None:
    calls = []

    def mine(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
        calls.append(len(q))
        return flash_attention(q, k, v, window)

    llm = LLM.load(tiny_directory, weights="float32", enable_prefix_caching=False)
    expected = [each.token_ids for each in llm.generate(PROMPTS, GREEDY)]
    with attending(llm, attend_by(mine)):
        assert [each.token_ids for each in llm.generate(PROMPTS, GREEDY)] == expected
    num_calls = len(calls)
    assert num_calls > 0
    with pytest.raises(ZeroDivisionError), attending(llm, attend_by(mine)):
        raise ZeroDivisionError
    assert [each.token_ids for each in llm.generate(PROMPTS, GREEDY)] == expected
    assert len(calls) == num_calls, "the engine has its own attention again"


def test_functions_that_are_not_attention_and_unfit_engines_are_refused(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM.load(tiny_directory, weights="float32")
    with pytest.raises(OptionError, match="must be called with"), attending(llm, lambda: None):
        pass
    monkeypatch.setattr(llm.engine, "runner", object())
    with pytest.raises(OptionError, match="cannot be exchanged"), attending(llm, attend_by(len)):
        pass


def test_a_learners_merge_is_called_for_every_tile(
    tiny_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def mine(one: Partial, other: Partial) -> Partial:
        return merge(one, other)

    llm = LLM.load(tiny_directory, weights="float32", attention_backend=attend_by(flash_attention))
    with using(32, merge=mine):
        llm.generate("of seventeen such", SamplingParams(temperature=0, max_tokens=2))
    layers = llm.config.num_layers
    assert capsys.readouterr().out == f"mine, in place of merge, was called {layers} times\n"


@needs_triton
@pytest.mark.parametrize(("block_m", "block_n"), [(16, 16), (32, 16), (16, 32)])
def test_the_plain_kernel_moves_the_bytes_of_the_formula(block_m: int, block_n: int) -> None:
    q, k, v = inputs(40, 55)
    mixed = torch.full_like(q, torch.nan)
    accesses = record_flash(flash_kernel, q, k, v, mixed, block_m, block_n)
    torch.testing.assert_close(mixed, attention_naive(q, k, v), atol=1e-5, rtol=1e-5)
    moved = sum(each.num_bytes for each in accesses)
    assert moved == 4 * 4 * numbers_moved(40, 55, 16, block_m)


def test_a_causal_head_moves_half_the_square_by_the_tile() -> None:
    for tokens, head_dim, block in ((96, 16, 32), (96, 16, 16), (2048, 128, 64)):
        short = tokens**2 * head_dim // block + 3 * tokens * head_dim
        assert numbers_moved(tokens, tokens, head_dim, block) == short


@needs_triton
@pytest.mark.parametrize("block", [16, 32])
def test_the_kernel_without_a_mask_loads_all_keys_for_each_tile_of_queries(block: int) -> None:
    q, k, v = (torch.randn(64, 16, generator=torch.Generator().manual_seed(at)) for at in range(3))
    mixed = torch.full_like(q, torch.nan)
    given = {"q": q, "k": k, "v": v, "mixed": mixed}
    accesses = record(lambda: start_unmasked(unmasked_kernel, q, k, v, mixed, block), **given)
    expected = (q @ k.T / 4).softmax(-1) @ v
    torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=1e-5)
    assert bytes_moved(accesses) == 4 * (2 * 64 * 16 + 2 * (64 // block) * 64 * 16)


@needs_triton
def test_the_kernel_without_a_mask_compiles_for_a_gpu() -> None:
    from minigen_course.ch31_triton.gpu_kernels import machine_code

    on_gpu = [torch.empty(512, 64, device="meta") for _ in range(4)]
    (code,) = machine_code("sm_80", partial(start_unmasked, unmasked_kernel, *on_gpu, 32))
    assert code.spilled == 0


@needs_triton
def test_the_plain_kernel_runs_in_the_engine(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", vocab_size=TINY_VOCAB, num_hidden_layers=2)
    save_tokenizer(tmp_path)
    expected = LLM.load(tmp_path, weights="float32").generate(PROMPTS, GREEDY)
    attend = attend_by(flash_by(flash_kernel))
    ours = LLM.load(tmp_path, weights="float32", attention_backend=attend).generate(PROMPTS, GREEDY)
    assert [each.token_ids for each in ours] == [each.token_ids for each in expected]


@needs_triton
def test_the_plain_kernel_refuses_a_window() -> None:
    with pytest.raises(ValueError, match="this layer has a window of 5"):
        flash_by(flash_kernel)(*inputs(4, 4), 5)


@needs_triton
def test_prefill_equals_its_twin_in_the_interpreter() -> None:
    assert_passes_interpreted("equal_prefill.py")


def test_without_triton_its_checks_name_the_remedy() -> None:
    blocked = (
        "import importlib.util, sys; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'triton' else find(name)\n"
        "sys.modules['triton'] = None\n"
        "from minigen_course.grading.exercise import exercises\n"
        "from minigen_course.grading.judge import verdict_on\n"
        "kernel, loop = (exercises('32')[each] for each in ('flash_kernel', 'flash_attention'))\n"
        "print(*(verdict_on(each.checks, each.solution) for each in (kernel, loop)), sep='\\n')\n"
    )
    message, passed = run_python("-c", blocked).splitlines()
    assert "needs Triton" in message
    assert passed.startswith("(True")


@needs_triton
def test_a_tile_that_spills_with_four_warps_fits_with_eight() -> None:
    from minigen_course.ch31_triton.gpu_kernels import machine_code

    on_gpu = [torch.empty(512, n, 128, dtype=torch.bfloat16, device="meta") for n in (32, 8, 8)]
    spilled = {}
    for num_warps in (4, 8):
        launch = partial(flash_by(flash_kernel, 128, 64, num_warps), *on_gpu)
        (code,) = machine_code("sm_80", launch)
        spilled[num_warps] = code.spilled
    assert spilled[4] > 0
    assert spilled[8] == 0


def test_a_kernel_that_only_the_interpreter_accepts_is_replaced_with_a_reason() -> None:
    """In a process of its own, because a kernel may be compiled only where none is interpreted."""
    output = run_python("-c", _NOT_COMPILING)
    reason, kept, replaced = output.splitlines()
    assert reason.startswith("Your kernel does not compile, so the course's is taken: ")
    assert (kept, replaced) == ("True", "True")


_NOT_COMPILING = """
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from minigen_course.ch32_flash_attention import kernels
from minigen_course.ch32_flash_attention.lesson import compiling

text = Path(kernels.__file__).read_text(encoding="utf-8")
full = 'tl.zeros((BLOCK_M,), tl.float32)'
assert full in text
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "scalars.py"
    path.write_text(text.replace(full, "0.0"), encoding="utf-8")
    spec = spec_from_file_location("scalars", path)
    scalars = module_from_spec(spec)
    spec.loader.exec_module(scalars)
    found = compiling(scalars.flash_kernel)
print(compiling(kernels.flash_kernel) is kernels.flash_kernel)
print(found is kernels.flash_kernel)
"""
