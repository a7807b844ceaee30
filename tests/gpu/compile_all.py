"""Compile every kernel for several chips and head widths, and print the resources as JSON.

`python -m tests.gpu.compile_all CHIP,... HEAD_DIM,...`, or the kernels of a rank's share with
`python -m tests.gpu.compile_all CHIP,... MODEL/RANKS,...`
"""

import json
import os
import sys
import tempfile
from dataclasses import asdict

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())

from benchmarks.gpu.engines import LLAMA_3_8B, QWEN3_0_6B, Shape
from minigen_course.ch31_triton.gpu_kernels import machine_code
from tests.gpu.launches import head_launches, share_launches, small_launches

SHAPES = {
    "llama-3-8b": LLAMA_3_8B,
    "qwen3-0.6b": QWEN3_0_6B,
    "smollm2-135m": Shape(49_152, 576, 30, 9, 3, 64, 1536, tied=True, head_norms=False),
}


def main(chips: list[str], wanted: list[str]) -> None:
    """Print one line of JSON for each kernel and chip."""
    for chip in chips:
        wide_tiles = chip in ("sm_90", "sm_100")  # as `has_wide_products` says of them
        launches = {} if "/" in wanted[0] else small_launches()
        for each in wanted:
            if "/" in each:
                model, num_ranks = each.split("/")
                own = share_launches(SHAPES[model], int(num_ranks), wide_tiles)
            else:
                own = head_launches(int(each), wide_tiles)
            launches |= {f"{name}, {each}": launch for name, launch in own.items()}
        for name, launch in launches.items():
            for code in machine_code(chip, launch):
                line = {"launch": name, **asdict(code)}
                line["texts"] = sorted(code.texts)
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2].split(","))
