"""FlashAttention in Triton's interpreter, in a process of its own."""

import pytest

pytest.importorskip("triton", reason="Triton is for Linux alone")
from tests.gpu.processes import assert_passes_interpreted


def test_prefill_equals_its_twin_in_the_interpreter() -> None:
    assert_passes_interpreted("equal_prefill.py")
