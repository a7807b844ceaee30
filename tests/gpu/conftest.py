"""Lets these checks run where only torch, Triton and pytest are installed."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import benchmarks.gpu  # noqa: F401  # its folder of stand-ins is on the path then


def pytest_configure() -> None:
    """Report missing packages once, instead of in every test."""
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.exit("No CUDA device here: set TRITON_INTERPRET=1 for Triton's interpreter.", 1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        _patch_language_once_per_launch()


def _patch_language_once_per_launch() -> None:
    """Let the interpreter patch Triton's language at a launch, not at each call within it.

    A call of another function in a kernel patches the language of its module again, which took a
    quarter of these checks' time. Its module sees `tl` or `tl.core`, so a launch patches both.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, places = interpreter._patch_lang, {"tl": tl, "core": tl.core}

    def call(function: Any, *args: Any, **constants: Any) -> Any:
        try:
            return function.rewrite()(*args, **constants)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = lambda _: patch(SimpleNamespace(__globals__=places))
    interpreter.InterpretedFunction.__call__ = call
