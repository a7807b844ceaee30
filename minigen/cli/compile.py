"""`minigen compile`: compiles machine code for this processor, once."""

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
    """Compile the CPU kernels for this processor now: about 20 seconds per weight format.

    Otherwise the first model in a weight format compiles them when it is loaded, once for this
    processor and this version of minigen. Kernels that are there already are left alone.

    A cache folder that a class or an image shares is best filled by this command.

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
    from minigen.assembly.cpu_kernels import compile_kernels
    from minigen.hub import Lines

    for form in wanted or FORMS:
        if (reason := compile_kernels(form, kv_cache_dtype, Lines())) is not None:
            raise OptionError(f"The step for weights={form} is not compiled: {reason}.")
