"""Check files of `minigen quantize` with llama.cpp: it opens them, and answers as minigen does.

`python benchmarks/quantized_agreement.py [--python PATH] [--json FILE]`, where a Python at PATH has
`llama-cpp-python` and `gguf`. This is a check, not a measurement.

For each scheme the default model is quantized to a GGUF. minigen, with float32 activations, answers
questions from the file; those whose likeliest tokens lead by a logit are sure. llama.cpp gets the
same token ids and should answer the sure ones alike. It rounds activations to 8 bits.

Then both quantize the same random matrix, and the relative errors are printed: rows whose size
differs, with a few large weights (`judged_matrix` of `tests/test_35_quantize.py`). The bytes of the
kinds that the `gguf` library quantizes should be equal.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from common import write_results
from llama_cpp_agreement import ask
from quantized_quality import split_texts
from sure import MARGIN, NUM_TOKENS, least_margin, num_kept

from minigen import LLM, SamplingParams, hub
from minigen.export.conversion import quantize_model
from minigen.export.gguf_blocks import KINDS, dequantize_rows, quantize_rows
from minigen.export.plan import SCHEMES, QuantizeOptions
from minigen.quantization.grid import relative_error
from tests.golden.make import QUESTIONS
from tests.test_35_quantize import judged_matrix

FILES = (
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
    "q2_k",
    "q3_k",
    "q4_k",
    "q5_k",
    "q6_k",
    "iq4_nl",
    "mxfp4",
    "gptq",
)
FILES = (*FILES, "awq", "mixed")
CALIBRATION_TOKENS = 4096

QUANTIZE = """
import ctypes, json, os, sys
import gguf, llama_cpp, numpy as np
folder = os.path.join(os.path.dirname(llama_cpp.__file__), "lib")
library = ctypes.CDLL(os.path.join(folder, "libggml-base.so"))
chunk = library.ggml_quantize_chunk
chunk.restype = ctypes.c_size_t
pointer, count = ctypes.c_void_p, ctypes.c_int64
chunk.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
path, kinds = sys.argv[1], sys.argv[2:]
weight = np.ascontiguousarray(np.load(path), np.float32)
for kind in kinds:
    number = gguf.GGMLQuantizationType[kind]
    size, block_bytes = gguf.GGML_QUANT_SIZES[number]
    data = np.zeros((len(weight), weight.shape[1] // size * block_bytes), np.uint8)
    chunk(int(number), weight.ctypes.data, data.ctypes.data, 0, *weight.shape, None)
    np.save(f"{path}.{kind}.npy", data)
"""


def answers_of(path: Path, python: str) -> dict[str, object]:
    """Return how many tokens of its sure answers llama.cpp gives as well, from one file."""
    llm = LLM.load(path, weights="float32")
    prompts = [llm.chat_prompt([{"role": "user", "content": each}]) for each in QUESTIONS]
    prompts += [llm.tokenizer.encode(each) for each in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=2, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    version, theirs = ask(python, path, prompts)
    sure = [
        (output.token_ids, answer)
        for output, answer in zip(outputs, theirs, strict=True)
        if least_margin(output.logprobs or []) >= MARGIN
    ]
    kept = [num_kept(answer, ours) for ours, answer in sure]
    every = [
        num_kept(answer, output.token_ids) for output, answer in zip(outputs, theirs, strict=True)
    ]
    return {
        "llama_cpp_python": version,
        "megabytes": round(path.stat().st_size / 1e6, 1),
        "sure answers": len(sure),
        "sure answers kept": kept.count(NUM_TOKENS),
        "all tokens": NUM_TOKENS * len(prompts),
        "all tokens kept": sum(every),
    }


def errors_beside(python: str, folder: Path) -> dict[str, dict[str, object]]:
    """Return the relative errors of llama.cpp's quantizer and of minigen's, by kind."""
    weight, kinds = judged_matrix(), [kind for kind in KINDS if kind not in ("F32", "F16", "BF16")]
    path = folder / "weight.npy"
    np.save(path, weight.numpy())
    subprocess.run([python, "-c", QUANTIZE, str(path), *kinds], check=True)
    found: dict[str, dict[str, object]] = {}
    for kind in kinds:
        theirs = torch.from_numpy(np.load(f"{path}.{kind}.npy"))
        ours = quantize_rows(weight, kind)
        found[kind] = {
            "llama.cpp": round(relative_error(weight, dequantize_rows(theirs, kind)), 6),
            "minigen": round(relative_error(weight, dequantize_rows(ours, kind)), 6),
            "equal bytes": torch.equal(ours, theirs),
        }
    return found


def main() -> None:
    """Write the files, ask both engines, compare, print, and write JSON if a file was given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=sys.executable, help="a Python with llama-cpp-python")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--schemes", nargs="*", default=FILES, help="the schemes to write")
    options = parser.parse_args()
    source = hub.resolve(hub.DEFAULT_MODEL)
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results["relative errors"] = errors_beside(options.python, folder)
        print(json.dumps(results, indent=1))
        (folder / "text.txt").write_text(split_texts()[0], encoding="utf-8")
        for scheme in options.schemes:
            more = {}
            if SCHEMES[scheme].calibration == "needed":
                more = {"calibration": folder / "text.txt"}
            out = folder / f"{scheme}.gguf"
            quantize_model(
                source,
                out,
                QuantizeOptions(
                    scheme,
                    allow_requantize=True,
                    calibration_tokens=CALIBRATION_TOKENS,
                    **more,
                ),
            )
            results[scheme] = answers_of(out, options.python)
            print(scheme, results[scheme], flush=True)
            out.unlink()
    if options.json is not None:
        write_results(options.json, results)


if __name__ == "__main__":
    main()
