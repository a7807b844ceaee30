"""How two machines differ: their arithmetic, what may explain it, their speed, and the rest."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from minigen.doctor.report import Report

ORDER = (
    "other instruction sets sum in another order: the last digits of float32 sums and sampled "
    "texts may differ; greedy float32 texts of the default model should not"
)
CHOICE = "libraries choose their kernels by it; " + ORDER
RELEASE = "another release may choose other kernels, or sum in another order"
CODE = "other machine code for minigen's compiled kernels"
SHARES = (
    "long sums are cut into as many parts as there are threads: their last digits may differ, in "
    "torch alone (minigen's compiled kernels give the same bits)"
)
AUTO = (
    "weights='auto' takes another form of weights, so texts may differ; name one: --weights float32"
)
OTHER_CODE = "another minigen may compute otherwise: compare the same commit"
OTHER_WEIGHTS = "other weights: `minigen pull` makes them the published ones"

# The longest beginning of a key that stands here says why a difference in it counts.
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
    "packages.triton": "other machine code for the kernels on a GPU",
    "packages.transformers": "the tests compare with its results, which may have changed",
    "packages.tokenizers": "the same text may become other tokens",
    "packages.sentencepiece": "the tests compare with its tokens, which may have changed",
    "packages.jinja2": "chat templates are written out with it",
    "packages.gguf": "minigen reads GGUF's names of types and tensors from it",
    "environment.OMP_NUM_THREADS": SHARES,
    "environment.MKL_": "it tells MKL, which multiplies float32, what to use",
    "environment.MKL_NUM_THREADS": SHARES,
    "environment.ATEN_CPU_CAPABILITY": "it tells torch what to use; " + ORDER,
    "environment.ONEDNN_": "it tells oneDNN, which multiplies bfloat16, what to use",
    "environment.DNNL_": "it tells oneDNN, which multiplies bfloat16, what to use",
    "environment.NUMBA_": "it tells Numba what to compile minigen's kernels to",
    "environment.TRITON_": "it tells Triton how to compile, or to interpret, kernels",
    "environment.NVIDIA_": "it says in how many bits a GPU multiplies float32",
    "environment.TORCH_": "it says in how many bits a GPU multiplies float32",
    "environment.CUBLAS_": "it says whether a GPU's products come out the same every time",
    "environment.CUDA_": "it says which GPUs there are",
    "kernels.": "weights='auto' takes what is compiled, and another form has other digits",
    "gpu": "a GPU sums in another order than a CPU, and than another GPU",
    "minigen.": OTHER_CODE,
    "model.sha256": OTHER_WEIGHTS,
    "model.status": OTHER_WEIGHTS,
    "model.auto": AUTO,
}
OTHERS = {
    "system.": "should not change results",
    "processor.cores": "speed alone, where the threads are the same",
    "memory.": "how much fits: larger KV caches, other default sizes",
    "packages.": "should not change results of the engine",
    "environment.": "should not change results",
    "environment.OMP_PROC_": "where threads run: speed alone",
    "environment.OMP_PLACES": "where threads run: speed alone",
    "environment.TRITON_CACHE_DIR": "where compiled kernels are kept",
    "text.": "how a terminal's bytes become text, when a prompt comes from there",
    "model.": "should not change results",
}
UNCOMPARED = ("findings", "fingerprints", "schema_version", "speed.")


@dataclass(frozen=True)
class Difference:
    """A field in which two reports differ, each one's value in words, and why it counts."""

    key: str
    left: str
    right: str
    why: str


@dataclass(frozen=True)
class Agreement:
    """Whether two machines compute the same bits in a form; `stages` differ, first ones first.

    `missing` names the sides, left or right, that have no kernels for the form.
    """

    form: str
    stages: list[str]
    missing: list[str]


@dataclass(frozen=True)
class Ratio:
    """A speed of both machines, and the right one's by the left one's."""

    key: str
    left: float
    right: float

    @property
    def ratio(self) -> float:
        return self.right / self.left


@dataclass(frozen=True)
class Comparison:
    """All differences of two reports, numerics first."""

    agreements: list[Agreement]
    numerics: list[Difference]
    speeds: list[Ratio]
    others: list[Difference]


def compare(left: Report, right: Report) -> Comparison:
    """Set two reports beside each other."""
    facts = _flat(asdict(left)), _flat(asdict(right))
    numerics: list[Difference] = []
    others: list[Difference] = []
    for key in dict.fromkeys([*facts[0], *facts[1]]):
        values = facts[0].get(key), facts[1].get(key)
        if values[0] == values[1] or key.startswith(UNCOMPARED):
            continue
        is_numeric, why = reason(key)
        (numerics if is_numeric else others).append(Difference(key, *_in_words(*values), why))
    speeds = [
        Ratio(key, facts[0][key], facts[1][key])
        for key in facts[0]
        if key.startswith("speed.") and facts[0][key] > 0 and facts[1].get(key, 0) > 0
    ]
    return Comparison(list(_agreements(left, right)), numerics, speeds, others)


def reason(key: str) -> tuple[bool, str]:
    """Whether a field bears on numbers, and why a difference in it counts."""
    beginnings = [each for each in (*NUMERICS, *OTHERS) if key.startswith(each)]
    longest = max(beginnings, key=len)
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
    """Nested objects as one, with a dot between the names on the way."""
    if not isinstance(facts, dict):
        return {key: facts}
    found: dict[str, Any] = {}
    for name, value in facts.items():
        found |= _flat(value, f"{key}.{name}" if key else name)
    return found


def _in_words(left: object, right: object) -> tuple[str, str]:
    """Two values in words; of two lists, what each has and the other has not."""
    if isinstance(left, list) and isinstance(right, list):
        only = ([each for each in a if each not in b] for a, b in ((left, right), (right, left)))
        mine, other = (", ".join(map(str, each)) for each in only)
        return f"only here: {mine}" if mine else "-", f"only here: {other}" if other else "-"
    return _word(left), _word(right)


def _word(value: object) -> str:
    return "-" if value is None else str(value)
