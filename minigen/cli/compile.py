"""`minigen compile`: compiles machine code for this processor, once."""

import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from minigen.errors import OptionError

FORMS = ("int4", "int8", "bfloat16")
KV_DTYPES = ("bfloat16", "int8")


def compile_forms(
    wanted: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FORM]...", help="Weight formats: int4, int8, bfloat16; all by default."
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Data type of keys and values: bfloat16 or int8.")
    ] = "bfloat16",
) -> None:
    """Compile the CPU kernels for this processor, once: half a minute per weight format.

    Until then models run on torch alone, which is slower. A new version of minigen needs this
    command again.

    minigen compile int4

    minigen compile --kv-cache-dtype int8
    """
    if kv_cache_dtype not in KV_DTYPES:
        raise OptionError(
            f"There are kernels for a KV cache in {' or '.join(KV_DTYPES)}, "
            f"but not in {kv_cache_dtype!r}."
        )
    for form in wanted or []:
        if form not in FORMS:
            raise OptionError(f"There are kernels for {', '.join(FORMS)}, but not for {form!r}.")
    if find_spec("numba") is None:
        raise OptionError("Numba is not installed: pip install 'minigen[cpu]'.")
    from minigen.kernels.cpu.runner import is_compiled

    for form in wanted or FORMS:
        if is_compiled(form, kv_cache_dtype):
            continue
        from minigen.kernels.cpu.compile import compile_step

        cache = "" if kv_cache_dtype == "bfloat16" else f" and kv_cache_dtype={kv_cache_dtype}"
        print(f"compiling the kernels for weights={form}{cache}, once", file=sys.stderr, flush=True)
        compile_step(form, kv_cache_dtype)
