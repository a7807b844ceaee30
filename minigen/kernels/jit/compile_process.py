"""`python -m minigen.kernels.jit.compile_process FORM KV_DTYPE`: compiles the kernels of a step.

`minigen.kernels.jit.compile_once` starts it. It ends with the process that started it, whose end
closes this one's stdin. A third argument, `whole`, compiles as any other process would.
"""

import gc
import os
import subprocess
import sys
import traceback
from threading import Thread

from minigen.child_process import wait_for_starter
from minigen.kernels.cpu.compile import compile_step
from minigen.kernels.jit.outermost import only_outermost_code


def main() -> None:
    """Compile the kernels of a step for the forms of weights and of KV cache in `sys.argv`."""
    Thread(target=_end_with_starter, daemon=True).start()
    # Numba makes millions of objects that live to the end: looking for garbage takes a tenth.
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    form, kv_dtype, *whole = sys.argv[1:]
    if whole:
        compile_step(form, kv_dtype)
    else:
        sys.exit(compile_kernels(form, kv_dtype))


def compile_kernels(form: str, kv_dtype: str) -> int:
    """Compile a step without the machine code of inner functions, and return this process's status.

    Another version of Numba may lack what this relies on; then the whole is compiled.
    """
    try:
        with only_outermost_code():
            compile_step(form, kv_dtype)
    except Exception:
        traceback.print_exc()
        return _compile_whole(form, kv_dtype)
    return 0


def _compile_whole(form: str, kv_dtype: str) -> int:
    """Compile in a new process without tricks, in twice the time, and return its status.

    It inherits stdin, and so ends with the process that started this one.
    """
    command = [sys.executable, "-P", "-m", "minigen.kernels.jit.compile_process"]
    return subprocess.call([*command, form, kv_dtype, "whole"])


def _end_with_starter() -> None:
    wait_for_starter()
    os._exit(1)


if __name__ == "__main__":
    main()
