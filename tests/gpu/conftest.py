"""Lets these checks run where only torch, Triton and pytest are installed."""

import os

import pytest
import torch

import benchmarks.gpu  # noqa: F401  # its folder of stand-ins is on the path then


def pytest_configure() -> None:
    """Report missing packages once, instead of in every test."""
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.exit("No CUDA device here: set TRITON_INTERPRET=1 for Triton's interpreter.", 1)
