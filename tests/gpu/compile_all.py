"""Compile every kernel for several chips and head widths, and print the resources as JSON.

`python -m tests.gpu.compile_all CHIP,... HEAD_DIM,...`
"""

import json
import os
import sys
import tempfile
from dataclasses import asdict

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())

from minigen_course.ch31_triton.gpu_kernels import machine_code
from tests.gpu.launches import head_launches, small_launches


def main(chips: list[str], head_dims: list[int]) -> None:
    """Print one line of JSON for each kernel and chip."""
    for chip in chips:
        launches = small_launches()
        for head_dim in head_dims:
            own = head_launches(head_dim, wide_tiles=chip == "sm_90")
            launches |= {f"{name}, {head_dim}": each for name, each in own.items()}
        for name, launch in launches.items():
            for code in machine_code(chip, launch):
                line = {"launch": name, **asdict(code)}
                line["texts"] = sorted(code.texts)
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1].split(","), [int(each) for each in sys.argv[2].split(",")])
