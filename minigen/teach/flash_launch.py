"""Launchers of kernels with the signature of `minigen.kernels.gpu.flash.flash_kernel`."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from minigen.teach.accesses import Access
from minigen.teach.interpreted import launch, record

Kernel = Callable[..., object]
Attention = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]
BLOCK = 16  # the least that tl.dot takes


def flash_by(kernel: Kernel, block_m: int = BLOCK, block_n: int = BLOCK) -> Attention:
    """Attention as in chapter 14 by a kernel of `flash_kernel`'s signature, but for windows."""

    def flash(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        if window is not None:
            raise ValueError(f"This kernel knows no window; this layer has one of {window}.")
        mixed = torch.empty_like(q)
        start_flash(kernel, q, k, v, mixed, block_m, block_n)
        return mixed

    return flash


def record_flash(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixed: Tensor,
    block_m: int = BLOCK,
    block_n: int = BLOCK,
) -> list[Access]:
    """What the kernel's programs load and store while they write `mixed`, in the interpreter.

    Raises `IndexError` for an access outside of the four tensors, before it is made, and
    `OptionError` where there is no Triton.
    """
    return record(
        lambda: start_flash(kernel, q, k, v, mixed, block_m, block_n), q=q, k=k, v=v, mixed=mixed
    )


def start_flash(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, mixed: Tensor, block_m: int, block_n: int
) -> None:
    """Start a program for every `block_m` queries and every head."""
    (num_new, q_heads, head_dim), (context, kv_heads, _) = q.shape, k.shape
    launch(
        kernel,
        (-(-num_new // block_m), q_heads),
        *(q.contiguous(), k.contiguous(), v.contiguous(), mixed),
        num_new,
        context,
        1 / math.sqrt(head_dim),
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
    )
