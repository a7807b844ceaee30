"""Any bytes in a model's files are either read, or refused with a MinigenError.

There is never another exception, never more memory than the file has bytes for, never a long wait.
The mutations aim at the header: bytes changed, inserted, removed and copied, numbers replaced by
extreme ones, and metadata values replaced by values of other types.
"""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGUFValueType
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from minigen.checkpoint.checkpoint import open_checkpoint
from minigen.checkpoint.config_json import read_config
from minigen.checkpoint.gguf import read_gguf
from minigen.checkpoint.safetensors import StoredTensor
from minigen.errors import MinigenError
from tests.gguf_files import LAYOUTS, GGUFBytes, Part, Value, raw_gguf, text, uint32

Kind = GGUFValueType
SOUND = "sound"

# --- files to start from: a whole model of 220 numbers, in both formats -------------------------

SHAPES = {
    "token_embd.weight": (5, 4),
    "output.weight": (5, 4),
    "output_norm.weight": (4,),
    "blk.0.attn_norm.weight": (4,),
    "blk.0.ffn_norm.weight": (4,),
    "blk.0.attn_q.weight": (4, 4),
    "blk.0.attn_q.bias": (4,),
    "blk.0.attn_k.weight": (2, 4),
    "blk.0.attn_k.bias": (2,),
    "blk.0.attn_v.weight": (2, 4),
    "blk.0.attn_v.bias": (2,),
    "blk.0.attn_output.weight": (4, 4),
    "blk.0.attn_output.bias": (4,),
    "blk.0.ffn_gate.weight": (6, 4),
    "blk.0.ffn_up.weight": (6, 4),
    "blk.0.ffn_down.weight": (4, 6),
}

METADATA: dict[str, Value] = {
    "general.architecture": text("llama"),
    "general.alignment": uint32(32),
    "llama.block_count": uint32(1),
    "llama.context_length": uint32(64),
    "llama.embedding_length": uint32(4),
    "llama.feed_forward_length": uint32(6),
    "llama.attention.head_count": uint32(2),
    "llama.attention.head_count_kv": uint32(1),
    "llama.attention.key_length": uint32(2),
    "llama.attention.value_length": uint32(2),
    "llama.attention.layer_norm_rms_epsilon": Value(Kind.FLOAT32, 1e-5),
    "llama.attention.sliding_window": uint32(7),
    "llama.rope.dimension_count": uint32(2),
    "llama.rope.freq_base": Value(Kind.FLOAT32, 1e4),
    "llama.rope.scaling.type": text("linear"),
    "llama.rope.scaling.factor": Value(Kind.FLOAT32, 2.0),
    "llama.rope.scaling.attn_factor": Value(Kind.FLOAT32, 1.0),
    "llama.vocab_size": uint32(5),
    "tokenizer.ggml.tokens": Value(Kind.STRING, ["a", "b", "c", "d", "é"], is_array=True),
    "tokenizer.ggml.token_type": Value(Kind.INT32, [1, 1, 1, 3, 3], is_array=True),
    "tokenizer.ggml.bos_token_id": uint32(3),
    "tokenizer.ggml.eos_token_id": uint32(4),
    "tokenizer.ggml.eot_token_id": uint32(3),
}

CONFIG: dict[str, Any] = {
    "model_type": "mistral",
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "rms_norm_eps": 1e-5,
    "sliding_window": 7,
    "use_sliding_window": True,
    "max_window_layers": 0,
    "layer_types": ["sliding_attention"],
    "rope_theta": 1e4,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0},
    "vocab_size": 5,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "bos_token_id": 3,
    "eos_token_id": [4, 3],
    "hidden_act": "silu",
}
OTHER_KEYS = (
    "rope_scaling mlp_bias partial_rotary_factor quantization_config rope_interleaved".split()
)


def numbers_of(shape: tuple[int, ...]) -> bytes:
    return np.arange(np.prod(shape), dtype="<f4").tobytes()


def gguf_model(metadata: dict[str, Value] = METADATA) -> GGUFBytes:
    parts = [Part(name, shape[::-1], numbers_of(shape)) for name, shape in SHAPES.items()]
    return raw_gguf(list(metadata.items()), parts)


def safetensors_header() -> str:
    """Return the same tensors under transformers' names, as they are read from the GGUF."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in zip(model_names(), SHAPES.values(), strict=True):
        stop = start + len(numbers_of(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}
        start = stop
    return json.dumps(header)


def model_names() -> list[str]:
    layer = "model.layers.0."
    attention = [
        f"{layer}self_attn.{name}_proj.{kind}" for name in "qkvo" for kind in ("weight", "bias")
    ]
    return [
        *("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"),
        *(f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight"),
        *attention,
        *(f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    ]


GGUF = gguf_model()
GGUF_HEADER = bytes(GGUF.data).index(b"blk.0.ffn_down.weight") + 60
HEADER = safetensors_header()
TENSOR_BYTES = b"".join(numbers_of(shape) for shape in SHAPES.values())


def safetensors_file(header: str | bytes, length: int | None = None) -> bytes:
    raw = header.encode() if isinstance(header, str) else header
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + TENSOR_BYTES


def write_directory(path: Path, config: dict[str, Any] = CONFIG) -> None:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (path / "model.safetensors").write_bytes(safetensors_file(HEADER))


# --- mutations ---------------------------------------------------------------------------------

EXTREMES = [0, 1, 2, 3, 127, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40]
EXTREMES += [2**53, 2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 8, 2**64 - 1]
TOKENS = ["-1", "0", "1e3", "1e400", "NaN", "null", "true", '""', "[]", "{}", "-0.5", '"4"']
TOKENS += [f'"{dtype}"' for dtype in ("F16", "BF16", "I32", "F64", "F8_E4M3", "Q4_1")]
TOKENS += [str(2**power + off) for power in (31, 32, 53, 62, 63, 64) for off in (-1, 0)]


def replaced(data: bytes, at: int, width: int, value: int) -> bytes:
    raw = (value % 2 ** (8 * width)).to_bytes(width, "little")
    return data[:at] + raw + data[at + width :]


def edits_of(span: int) -> SearchStrategy[list[tuple[Any, ...]]]:
    """Return up to four changes within the first `span` bytes."""
    place = st.integers(0, span - 1)
    return st.lists(
        st.one_of(
            st.tuples(st.just("flip"), place, st.integers(1, 255)),
            st.tuples(st.just("insert"), place, st.binary(min_size=1, max_size=9)),
            st.tuples(st.just("remove"), place, st.integers(1, 40)),
            st.tuples(st.just("copy"), place, place, st.integers(1, 80)),
            st.tuples(st.just("cut"), place),
        ),
        min_size=1,
        max_size=4,
    )


def edited(data: bytes, edits: list[tuple[Any, ...]]) -> bytes:
    for what, at, *rest in edits:
        if what == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ rest[0]]) + data[at + 1 :]
        elif what == "insert":
            data = data[:at] + rest[0] + data[at:]
        elif what == "remove":
            data = data[:at] + data[at + rest[0] :]
        elif what == "copy":
            data = data[: rest[0]] + data[at : at + rest[1]] + data[rest[0] + rest[1] :]
        elif what == "cut":
            data = data[: len(data) - at]
    return data


# Numbers that determine how the following bytes are read, replaced by extreme ones.
gguf_numbers = st.lists(
    st.tuples(st.sampled_from(GGUF.numbers), st.sampled_from(EXTREMES)), min_size=1, max_size=2
)


def with_numbers(changes: list[tuple[tuple[int, int], int]]) -> bytes:
    data = bytes(GGUF.data)
    for (at, width), value in changes:
        data = replaced(data, at, width, value)
    return data


mutated_ggufs = st.one_of(
    edits_of(GGUF_HEADER).map(lambda edits: edited(bytes(GGUF.data), edits)),
    gguf_numbers.map(with_numbers),
    st.tuples(gguf_numbers, edits_of(GGUF_HEADER)).map(
        lambda both: edited(with_numbers(both[0]), both[1])
    ),
)

NUMBER_SPANS = [match.span() for match in re.finditer(r"\d+|\"F32\"|\[[^]]*\]", HEADER)]


def with_tokens(changes: list[tuple[tuple[int, int], str]]) -> bytes:
    """Replace each token in turn, from the end, so that positions stay right."""
    header = HEADER
    for (start, stop), token in sorted(changes, reverse=True):
        header = header[:start] + token + header[stop:]
    return safetensors_file(header)


mutated_safetensors = st.one_of(
    st.lists(
        st.tuples(st.sampled_from(NUMBER_SPANS), st.sampled_from(TOKENS)),
        min_size=1,
        max_size=2,
        unique_by=lambda change: change[0],
    ).map(with_tokens),
    edits_of(len(HEADER)).map(lambda edits: safetensors_file(edited(HEADER.encode(), edits))),
    edits_of(len(HEADER) + 8).map(lambda edits: edited(safetensors_file(HEADER), edits)),
    st.sampled_from([*EXTREMES, 100_000_000, 100_000_001]).map(
        lambda length: safetensors_file(HEADER, length)
    ),
)

json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 20),
        st.sampled_from([*EXTREMES, -(2**63), 10**30]),
        st.floats(),
        st.sampled_from(["llama", "qwen3", "linear", "llama3", "full_attention", "4", ""]),
        st.text(max_size=3),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["type", "rope_type", "factor", "rope_theta"]), inner),
    ),
    max_leaves=4,
)
mutated_configs = st.dictionaries(
    st.sampled_from([*CONFIG, *OTHER_KEYS]), json_values, min_size=1, max_size=3
).map(lambda changes: {**CONFIG, **changes})


def values_of(kind: Kind) -> SearchStrategy[Any]:
    if kind == Kind.STRING:
        return st.sampled_from(["llama", "qwen2", "qwen3", "linear", "none", "yarn", "4", "", "ü"])
    if kind == Kind.BOOL:
        return st.booleans()
    if kind in (Kind.FLOAT32, Kind.FLOAT64):
        return st.floats(width=32 if kind == Kind.FLOAT32 else 64)
    bits = 8 * np.dtype(LAYOUTS[kind]).itemsize
    signed = LAYOUTS[kind].islower()
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return st.one_of(st.integers(0, 8), st.integers(least, most), st.sampled_from([least, most]))


any_value = st.sampled_from([*LAYOUTS, Kind.STRING]).flatmap(
    lambda kind: st.one_of(
        values_of(kind).map(lambda content: Value(kind, content)),
        st.lists(values_of(kind), max_size=3).map(
            lambda contents: Value(kind, contents, is_array=True)
        ),
    )
)
mutated_metadata = st.tuples(
    st.sampled_from(["llama", "qwen2", "qwen3"]),
    st.dictionaries(st.sampled_from(list(METADATA)), st.none() | any_value, min_size=1, max_size=3),
).map(lambda both: metadata_with(*both))


def metadata_with(architecture: str, changes: dict[str, Value | None]) -> dict[str, Value]:
    changed = {**METADATA, "general.architecture": text(architecture), **changes}
    return {
        key.replace("llama.", f"{architecture}."): value
        for key, value in changed.items()
        if value is not None
    }


# --- what must hold ----------------------------------------------------------------------------


def outcome(attempt: Callable[[], Any]) -> str:
    """Return SOUND, or the name of the MinigenError; any other exception is raised."""
    refusal: MinigenError | None = None
    try:
        attempt()
    except MinigenError as error:
        refusal = error
    if refusal is None:
        return SOUND
    assert 0 < len(str(refusal)) < 2000
    assert "\n" not in str(refusal)
    return type(refusal).__name__


def read_all(path: Path) -> None:
    """Open a model, and read every number of it, so that a wrongly mapped tensor would show."""
    checkpoint = open_checkpoint(path)
    for tensor in checkpoint.tensors.values():
        read_tensor(tensor)


def read_tensor(tensor: StoredTensor) -> None:
    assert tensor.dequantize().shape == tensor.shape


def tried(
    strategy: SearchStrategy[Any], attempt: Callable[[Any], None], examples: int
) -> Counter[str]:
    """Return how often each outcome occurred, over seeded examples."""
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(example: Any) -> None:
        outcomes[outcome(lambda: attempt(example))] += 1

    run()
    return outcomes


def fuzz_gguf(folder: Path, examples: int) -> Counter[str]:
    path = folder / "model.gguf"

    def attempt(raw: bytes) -> None:
        path.write_bytes(raw)
        for tensor in read_gguf(path).tensors.values():
            read_tensor(tensor)
        read_all(path)

    return tried(mutated_ggufs, attempt, examples)


def fuzz_safetensors(folder: Path, examples: int) -> Counter[str]:
    write_directory(folder)

    def attempt(raw: bytes) -> None:
        (folder / "model.safetensors").write_bytes(raw)
        read_all(folder)

    return tried(mutated_safetensors, attempt, examples)


def fuzz_metadata(folder: Path, examples: int) -> Counter[str]:
    path = folder / "model.gguf"

    def attempt(metadata: dict[str, Value]) -> None:
        path.write_bytes(gguf_model(metadata).data)
        read_all(path)

    return tried(mutated_metadata, attempt, examples)


def fuzz_config(folder: Path, examples: int) -> Counter[str]:
    return tried(mutated_configs, read_config, examples)


def test_the_files_that_are_mutated_are_sound_and_hold_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(GGUF.data)
    write_directory(tmp_path / "hf")
    ours, theirs = open_checkpoint(tmp_path / "model.gguf"), open_checkpoint(tmp_path / "hf")
    assert ours.config == theirs.config
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in ours.tensors.items():
        if ".q_proj" not in name:  # its rows are stored in another order
            assert torch.equal(tensor.dequantize(), theirs.tensors[name].dequantize())


# The number of examples that each tries, briefly and at length, and the outcomes that must occur,
# which show that the mutations get past the first check. (Hypothesis draws other examples when
# other modules of this project are loaded, so an outcome that occurs five times in a thousand is
# not asked for: mutated values of a GGUF meet `ConfigError` often.)
FUZZERS: dict[str, tuple[Callable[[Path, int], Counter[str]], int, int, set[str]]] = {
    "bytes of a GGUF": (
        fuzz_gguf,
        1200,
        25_000,
        {SOUND, "FileFormatError", "UnsupportedError", "WeightsError"},
    ),
    "bytes of safetensors": (
        fuzz_safetensors,
        1200,
        40_000,
        {SOUND, "FileFormatError", "WeightsError"},
    ),
    "values of a GGUF": (
        fuzz_metadata,
        600,
        15_000,
        {SOUND, "ConfigError", "UnsupportedError", "WeightsError", "FileFormatError"},
    ),
    "values of config.json": (fuzz_config, 600, 30_000, {SOUND, "ConfigError", "UnsupportedError"}),
}


@pytest.mark.parametrize("what", FUZZERS)
def test_mutated_files_are_read_or_refused(what: str, tmp_path: Path) -> None:
    fuzz, examples, _, met = FUZZERS[what]
    outcomes = fuzz(tmp_path, examples)
    assert outcomes.total() >= examples  # 3,600 in all
    assert set(outcomes) >= met


@pytest.mark.long
@pytest.mark.parametrize("what", FUZZERS)
def test_very_many_mutated_files_are_read_or_refused(what: str, tmp_path: Path) -> None:
    fuzz, _, examples, met = FUZZERS[what]
    outcomes = fuzz(tmp_path, examples)
    assert outcomes.total() >= examples  # 110,000 in all
    assert set(outcomes) >= met


# --- memory ------------------------------------------------------------------------------------


def hostile_files() -> Iterator[bytes]:
    """Yield files in which each number of the header in turn is replaced by each very large one."""
    large = [value for value in EXTREMES if value >= 2**31 - 1]
    for at, width in GGUF.numbers:
        for value in large:
            yield replaced(bytes(GGUF.data), at, width, value)
    for span in NUMBER_SPANS:
        for token in map(str, large):
            yield with_tokens([(span, token)])
    for length in (*large, 100_000_000, 100_000_001):
        yield safetensors_file(HEADER, length)


def read_hostile_files(folder: Path, spare_bytes: int) -> None:
    """Read them all with little more memory than is in use; print their number."""
    import resource

    write_directory(folder)
    read_all(folder)  # what is loaded once is not a cost of a file
    pages = int(Path("/proc/self/statm").read_text("utf-8").split()[0])
    limit = pages * resource.getpagesize() + spare_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with pytest.raises(MemoryError):  # the limit is one
        bytearray(2 * spare_bytes)
    count = 0
    for raw in hostile_files():
        is_gguf = raw.startswith(b"GGUF") or raw[4:8] == b"\3\0\0\0"
        path = folder / ("model.gguf" if is_gguf else "model.safetensors")
        path.write_bytes(raw)
        outcome(lambda path=path: read_all(path if path.suffix == ".gguf" else folder))
        count += 1
    print(count)


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_a_header_that_claims_terabytes_is_given_no_memory(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.test_11_fuzz import read_hostile_files; "
        "read_hostile_files(Path(sys.argv[1]), 100_000_000)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) >= 2000
