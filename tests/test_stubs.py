"""Stubs are the package without its answers; `using` puts a part into the running engine."""

import inspect
from pathlib import Path

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from minigen import LLM, SamplingParams
from minigen.kv_cache.block_allocator import BlockAllocator
from minigen.sampling import sampler
from minigen_course.grading.plug_in import using
from minigen_course.grading.stub import is_stub, mirror, stub
from minigen_course.lab.load import load_test


def test_a_stub_keeps_signature_and_docstring_and_imports_what_it_needs() -> None:
    names: dict[str, object] = {}
    exec(stub("minigen.sampling.sampler.apply_penalties"), names)
    empty = names["apply_penalties"]
    shown = [str(inspect.signature(each)) for each in (empty, sampler.apply_penalties)]  # type: ignore[arg-type]
    assert shown[0] == shown[1]
    assert empty.__doc__ == sampler.apply_penalties.__doc__
    assert "torch.where" not in stub("minigen.sampling.sampler.apply_penalties")


def test_a_class_keeps_its_public_methods_all_empty() -> None:
    text = stub("minigen.kv_cache.block_allocator.BlockAllocator")
    names: dict[str, type] = {}
    exec(text, names)
    own = {name for name in vars(BlockAllocator) if not name.startswith("_")}
    assert own <= set(vars(names["BlockAllocator"]))
    assert text.count("raise NotImplementedError") == len(own) + 1
    with pytest.raises(NotImplementedError):
        names["BlockAllocator"](4)


def test_a_stub_counts_as_a_stub_until_something_is_written() -> None:
    names: dict[str, type] = {}
    for dotted in (
        "minigen.kv_cache.block_allocator.BlockAllocator",
        "minigen_course.ch32_flash_attention.flash.merge",
        "minigen_course.lab.load.load_test",  # a coroutine
    ):
        exec(stub(dotted), names)
    mine = names["BlockAllocator"]
    assert is_stub(names["merge"])
    assert is_stub(names["load_test"])
    assert is_stub(mine)
    mine.allocate = BlockAllocator.allocate  # type: ignore[attr-defined]
    assert not is_stub(mine)
    assert not any(map(is_stub, (BlockAllocator, sampler.keep_top_p, load_test, None, 3, int)))


def test_a_mirror_is_the_source() -> None:
    text = mirror("minigen.sampling.sampler.keep_min_p")
    source = inspect.getsource(sampler.keep_min_p).rstrip()
    assert text == f"# = minigen.sampling.sampler.keep_min_p\n{source}"


def test_the_engine_runs_with_a_learners_part_and_gets_its_own_back(
    tiny_llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    def keep_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill(torch.arange(logits.shape[-1]) != 7, -torch.inf)

    own = sampler.keep_top_p
    params = SamplingParams(temperature=1, top_p=0.5, max_tokens=3, ignore_eos=True)
    with using(16, keep_top_p=keep_top_p):
        assert list(tiny_llm.generate("a", params).token_ids) == [7, 7, 7]
    assert sampler.keep_top_p is own
    assert capsys.readouterr().out == "your keep_top_p was called 3 times\n"
    with pytest.raises(RuntimeError, match="mine"), using(16, keep_top_p=keep_top_p):
        raise RuntimeError("mine")
    assert sampler.keep_top_p is own
    with pytest.raises(ValueError, match="has no softmax"), using(16, softmax=keep_top_p):
        pass


def test_the_extension_checks_shapes_of_functions_defined_in_a_cell(tmp_path: Path) -> None:
    shell = InteractiveShell.instance(ipython_dir=str(tmp_path))
    try:
        shell.run_line_magic("load_ext", "minigen_course")
        shell.run_cell(
            "import torch\nfrom jaxtyping import Float\nfrom torch import Tensor\n"
            "def mine(x: Float[Tensor, 'a b']) -> Float[Tensor, ' b']:\n    return x[0]\n"
        )
        right = shell.run_cell("mine(torch.ones(2, 3))", silent=True)
        wrong = shell.run_cell("mine(torch.ones(3))", silent=True)
    finally:
        InteractiveShell.clear_instance()
    assert right.success
    assert not wrong.success
    assert "mine" in str(wrong.error_in_exec)
