"""Compares two machines: their arithmetic, what may explain a difference, speed, and the rest."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from minigen.doctor.report import Report

ORDER = (
    "different instruction sets sum in another order: the last digits of float32 sums, and sampled "
    "texts, may differ; greedy float32 texts of the default model should not"
)
CHOICE = "libraries choose their kernels by it; " + ORDER
RELEASE = "another release may choose other kernels, or sum in another order"
CODE = "it may generate other machine code for minigen's compiled kernels"
SHARES = (
    "torch splits long sums into one part per thread, so their last digits may differ (minigen's "
    "compiled kernels give the same bits for any number of threads)"
)
AUTO = (
    "weights='auto' chooses another weight format, so texts may differ; choose one on both "
    "machines, for example --weights float32"
)
OTHER_CODE = "another version of minigen may give other results: compare the same commit"
OTHER_WEIGHTS = "the weights differ: `minigen pull` replaces them with the published ones"

# The longest prefix of a key in this table gives the reason why a difference in it matters.
NUMERICS = {
    "processor.": CHOICE,
    "torch.": "another build of torch may choose other kernels, or sum in another order",
    "torch.cpu_capability": ORDER,
    "torch.float32_matmul_precision": "float32 products may be computed in fewer bits",
    "threads.": SHARES,
    "packages.torch": RELEASE,
    "packages.numpy": RELEASE,
    "packages.numba": CODE,
    "packages.llvmlite": CODE,
    "packages.triton": "it may generate other machine code for the kernels on a GPU",
    "packages.transformers": "the tests compare with its results, which may have changed",
    "packages.tokenizers": "the same text may become other tokens",
    "packages.sentencepiece": "the tests compare with its tokens, which may have changed",
    "packages.jinja2": "it renders chat templates",
    "packages.gguf": "minigen reads GGUF's names of types and tensors from it",
    "environment.OMP_NUM_THREADS": SHARES,
    "environment.MKL_": "it selects the kernels of MKL, which multiplies float32 matrices",
    "environment.MKL_NUM_THREADS": SHARES,
    "environment.ATEN_CPU_CAPABILITY": "it selects torch's kernels; " + ORDER,
    "environment.ONEDNN_": "it selects the kernels of oneDNN, which multiplies bfloat16 matrices",
    "environment.DNNL_": "it selects the kernels of oneDNN, which multiplies bfloat16 matrices",
    "environment.NUMBA_": "it sets the processor for which Numba compiles minigen's kernels",
    "environment.TRITON_": "it sets how Triton compiles kernels, or makes it interpret them",
    "environment.NVIDIA_": "it sets the precision in which a GPU multiplies float32 matrices",
    "environment.TORCH_": "it sets the precision in which a GPU multiplies float32 matrices",
    "environment.CUBLAS_": "it sets whether a GPU's matrix products are deterministic",
    "environment.CUDA_": "it sets which GPUs are visible",
    "kernels.": "weights='auto' uses a compiled format if there is one; formats round differently",
    "gpu": "a GPU sums in another order than a CPU or another GPU",
    "minigen.": OTHER_CODE,
    "model.sha256": OTHER_WEIGHTS,
    "model.status": OTHER_WEIGHTS,
    "model.auto": AUTO,
}
OTHERS = {
    "system.": "should not change results",
    "processor.cores": "it affects only speed if the number of threads is the same",
    "memory.": "it limits the size of models and KV caches",
    "packages.": "should not change results of the engine",
    "environment.": "should not change results",
    "environment.OMP_PROC_": "it pins threads to cores, which affects only speed",
    "environment.OMP_PLACES": "it pins threads to cores, which affects only speed",
    "environment.TRITON_CACHE_DIR": "it is the folder of compiled kernels",
    "text.": "it sets how bytes from the terminal become text, for prompts typed there",
    "model.": "should not change results",
}
UNCOMPARED = ("findings", "fingerprints", "schema_version", "speed.")


@dataclass(frozen=True)
class Difference:
    """A field in which two reports differ, with both values as text, and why it matters."""

    key: str
    left: str
    right: str
    why: str


@dataclass(frozen=True)
class Agreement:
    """Whether two machines compute the same bits in a weight format.

    `stages` lists the stages that differ, in order. `missing` lists the sides, left or right, that
    have no kernels for the format.
    """

    form: str
    stages: list[str]
    missing: list[str]


@dataclass(frozen=True)
class Ratio:
    """A speed of both machines, and its ratio (right divided by left)."""

    key: str
    left: float
    right: float

    @property
    def ratio(self) -> float:
        return self.right / self.left


@dataclass(frozen=True)
class Comparison:
    """All differences of two reports; `numerics` are those that can change results."""

    agreements: list[Agreement]
    numerics: list[Difference]
    speeds: list[Ratio]
    others: list[Difference]


def compare(left: Report, right: Report) -> Comparison:
    """Compare two reports."""
    facts = _flat(asdict(left)), _flat(asdict(right))
    numerics: list[Difference] = []
    others: list[Difference] = []
    for key in dict.fromkeys([*facts[0], *facts[1]]):
        values = facts[0].get(key), facts[1].get(key)
        if values[0] == values[1] or key.startswith(UNCOMPARED):
            continue
        is_numeric, why = reason(key)
        (numerics if is_numeric else others).append(Difference(key, *_as_text(*values), why))
    speeds = [
        Ratio(key, facts[0][key], facts[1][key])
        for key in facts[0]
        if key.startswith("speed.") and facts[0][key] > 0 and facts[1].get(key, 0) > 0
    ]
    return Comparison(list(_agreements(left, right)), numerics, speeds, others)


def reason(key: str) -> tuple[bool, str]:
    """Return whether a field can change results, and why a difference in it matters."""
    prefixes = [each for each in (*NUMERICS, *OTHERS) if key.startswith(each)]
    longest = max(prefixes, key=len)
    return longest in NUMERICS, NUMERICS.get(longest) or OTHERS[longest]


def _agreements(left: Report, right: Report) -> Iterator[Agreement]:
    for form in dict.fromkeys([*left.fingerprints, *right.fingerprints]):
        mine, other = left.fingerprints.get(form), right.fingerprints.get(form)
        if mine is None or other is None:
            sides = {"left": mine, "right": other}
            yield Agreement(form, [], [side for side, found in sides.items() if found is None])
        else:
            stages = dict.fromkeys([*mine, *other])
            yield Agreement(
                form, [each for each in stages if mine.get(each) != other.get(each)], []
            )


def _flat(facts: Any, key: str = "") -> dict[str, Any]:
    """Flatten nested objects into one, with names joined by dots."""
    if not isinstance(facts, dict):
        return {key: facts}
    found: dict[str, Any] = {}
    for name, value in facts.items():
        found |= _flat(value, f"{key}.{name}" if key else name)
    return found


def _as_text(left: object, right: object) -> tuple[str, str]:
    """Return two values as text; for two lists, the items that only one of them has."""
    if isinstance(left, list) and isinstance(right, list):
        only = ([each for each in a if each not in b] for a, b in ((left, right), (right, left)))
        mine, other = (", ".join(map(str, each)) for each in only)
        return f"only here: {mine}" if mine else "-", f"only here: {other}" if other else "-"
    return _text_of(left), _text_of(right)


def _text_of(value: object) -> str:
    return "-" if value is None else str(value)
