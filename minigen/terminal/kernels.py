"""`minigen compile`: machine code for this processor, made once."""

import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from minigen.errors import OptionError

FORMS = ("int4", "int8", "bfloat16")


def compile_forms(
    wanted: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FORM]...", help="int4, int8, bfloat16; all of them by default."),
    ] = None,
) -> None:
    """Compile the kernels for this processor: half a minute for each form of weights, once.

    Until then models run on torch alone, which is slower; a new version compiles them anew.

    minigen compile int4
    """
    for form in wanted or []:
        if form not in FORMS:
            raise OptionError(f"There are kernels for {', '.join(FORMS)}, not for {form!r}.")
    if find_spec("numba") is None:
        raise OptionError("Numba is not installed: pip install 'minigen[cpu]'.")
    from minigen.kernels.compiled import is_compiled

    for form in wanted or FORMS:
        if is_compiled(form):
            continue
        from minigen.kernels.compiling import compile_step

        print(f"compiling the kernels for weights={form}, once", file=sys.stderr, flush=True)
        compile_step(form)
