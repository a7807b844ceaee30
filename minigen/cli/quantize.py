"""`minigen quantize`: writes a model with fewer bits per weight, as GGUF or as safetensors."""

import sys
from pathlib import Path
from typing import Annotated

import typer

SCHEMES = (  # of `minigen.export.plan`, without its imports; a test compares them
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k"),
    *("q5_k", "q6_k", "iq4_nl", "mxfp4"),
    *("f16", "bf16", "int4", "int8", "rtn", "gptq", "awq", "w8a8", "fp8", "nf4", "mixed"),
)


def quantize(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="The model to quantize.")],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="A new .gguf file, or a new directory for all other names."
        ),
    ],
    scheme: Annotated[
        str,
        typer.Option(help=f"What weights become: {', '.join(SCHEMES)}."),
    ],
    bits: Annotated[
        int | None,
        typer.Option(help="Bits per weight, 2 to 8, of rtn, gptq and awq; 4 by default."),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Weights of a row that share a scale; -1 for whole rows. By default 32 in a "
            ".gguf file, a row for int8, and else the largest of 128, 64, 32 that divides all rows."
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help="Groups with a scale only, or with a zero point, too; awq has one by default.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="A text file on which gptq, awq, mixed, and if given w8a8 and the K kinds, watch "
            "the inputs of the matrices. Judge the result by another text."
        ),
    ] = None,
    calibration_tokens: Annotated[
        int | None,
        typer.Option(help="How much of the calibration text is used; 16384 if absent."),
    ] = None,
    target_bits: Annotated[
        float | None,
        typer.Option(help="Bits per weight that mixed may use, scales included; 4.5 by default."),
    ] = None,
    allow_requantize: Annotated[
        bool,
        typer.Option(
            "--allow-requantize",
            help="Quantize weights that are quantized already, which adds a second error.",
        ),
    ] = False,
) -> None:
    """Quantize a model: write it with fewer bits per weight.

    The q kinds, mxfp4, f16 and bf16 are those of llama.cpp and make a .gguf file. w8a8, fp8 and
    nf4 make a directory of safetensors for vLLM and transformers. int4, int8, rtn, gptq, awq and
    mixed make either; in a .gguf they have groups of 32 and 4, 5 or 8 bits.

    If unsure, take q8_0, which loses next to nothing, or q4_k, which takes half of its space.

    An interrupted run leaves OUT.partial, and the same command goes on with it.

    minigen quantize ./my-model my-model.gguf --scheme q4_k

    minigen quantize org/repo ./my-model-gptq --scheme gptq --bits 4 --calibration text.txt

    minigen quantize smollm2-135m small.gguf --scheme q4_0 --allow-requantize
    """
    from minigen import hub
    from minigen.export.conversion import quantize_model
    from minigen.export.plan import QuantizeOptions
    from minigen.progress import shown_progress

    options = QuantizeOptions(
        scheme=scheme,
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        calibration=calibration,
        calibration_tokens=calibration_tokens,
        target_bits=target_bits,
        allow_requantize=allow_requantize,
    )
    try:
        with shown_progress() as progress:
            path = hub.resolve(name, progress=progress)
            report = quantize_model(path, out, options, progress)
    except KeyboardInterrupt:
        partial = out.with_name(out.name + ".partial")
        if partial.exists():
            print(
                f"\nStopped. The finished matrices are in {partial}; the same command goes on "
                "with them.",
                file=sys.stderr,
            )
        raise
    for line in report.lines():
        print(line, file=sys.stderr)
    print(report.out)
