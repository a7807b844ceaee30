"""`python -m minigen.kernels.jit.compile_process FORM KV_DTYPE`: compiles the kernels of a step.

`minigen.kernels.jit.compile_once` starts it. It ends with the process that started it, whose end
closes this one's stdin. A third argument, `whole`, compiles as any other process would.
"""

import os
import subprocess
import sys
import traceback
from threading import Thread

from minigen.kernels.cpu.compile import compile_step
from minigen.kernels.jit.outermost import only_outermost_code


def main() -> None:
    """Compile the kernels of a step for the forms of weights and of KV cache in `sys.argv`."""
    Thread(target=_end_with_starter, daemon=True).start()
    form, kv_dtype, *whole = sys.argv[1:]
    if whole:
        compile_step(form, kv_dtype)
    elif not _compile_outermost(form, kv_dtype):
        status = _compile_whole(form, kv_dtype)
        sys.exit(status)


def _compile_outermost(form: str, kv_dtype: str) -> bool:
    """Compile without the machine code of inner functions, and return whether that succeeded.

    Another version of Numba may lack what this relies on.
    """
    try:
        with only_outermost_code():
            compile_step(form, kv_dtype)
    except Exception:
        traceback.print_exc()
        return False
    return True


def _compile_whole(form: str, kv_dtype: str) -> int:
    """Compile in a new process, and return its status: twice the time, but without tricks.

    It inherits stdin, and so ends with the process that started this one.
    """
    command = [sys.executable, "-P", "-m", "minigen.kernels.jit.compile_process"]
    return subprocess.call([*command, form, kv_dtype, "whole"])


def _end_with_starter() -> None:
    sys.stdin.buffer.read()  # no data is ever written, so it returns when the other end closes
    os._exit(1)


if __name__ == "__main__":
    main()
