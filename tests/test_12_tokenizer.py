"""Text becomes the token ids of the reference tokenizers, and decodes to the same text."""

import functools
import io
import itertools
import json
import random
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import decoders as library_decoders
from transformers import PreTrainedTokenizerFast

from minigen.checkpoint.gguf import read_gguf
from minigen.errors import MinigenError, PromptError, TokenizerError, UnsupportedError
from minigen.tokenizer.gguf import FAMILIES, _merges_by_score
from minigen.tokenizer.tokenizer import LONG_TEXT, Tokenizer

always = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],  # the first example builds a vocabulary
)

SPECIAL = ["<|begin|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
PLAIN_ADDED = ["<think>", "</think>"]

HARD_TEXTS = [
    "",
    " ",
    "Hello, world! It's we'll I'M they'RE 'tis 1234567 3.14159",
    "  two leading spaces,   three inside, two at the end  ",
    "tabs\t\tand\ttabs \t mixed \t\t",
    "lines\nLF\n\n\nCRLF\r\n\r\nCR\r\rmixed \n \r\n  \n\n  end",
    "NBSP\u00a0and\u2003em\u2009thin\u3000ideographic\u200bzero\u2028line\u2029paragraph\x85next",
    "controls \x00\x01\x02\x07\x08\x0b\x0c\x1b\x1f\x7f\x80\x9f end",
    "\x00",
    "combining e\u0301 a\u0308\u0323 n\u0303 \u1e9b\u0323 Z\u0351\u036b\u0343\u036a a\u0301\u0301",
    "precomposed é ä ñ ﬁ Å Å ｆｕｌｌ ½ ² Ⅷ ٣ १२३",
    "long s: 'ſ K (Kelvin) İ ı ß ẞ ŉ",
    "العربية مرحبا بالعالم \u200fعִבְרִית שלום\u200e فارسی\u200cها",
    "中文字符，没有空格。日本語のテキスト、カタカナ한국어 텍스트 ไทยไม่มีช่องว่าง",
    "हिन्दी संयुक्ताक्षर क्षत्रिय தமிழ் తెలుగు မြန်မာ",
    "👍 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷🇯🇵 ☺️ 1️⃣ 🧑🏿‍🚀 ❤️‍🔥",
    "planes \U00010348 \U00020000 \U0002fa1d \U00030000 \U000e0041 \U000f0000 \U0010fffd",
    "nonchars \ufffe\uffff\U0001ffff and \ufffd and BOM \ufeff",
    "αβγ ΑΒΓ Кириллица ЀЁЂ Հայերեն ქართული",
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # comment\n\n\tif x != 3:\n\t\tpass\n",
    "https://example.org/a/b?c=d&e=f#g user@example.org C:\\path\\file //// /\n/ !!/",
    "CamelCaseWords snake_case_words SCREAMING_CASE kebab-case XMLHttpRequest iPhone McDONALD",
    "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n<think>\nhm</think> ok<|im_end|>",
    "almost <|im_start |> <| im_end|> <s> </s> <unk> <0x0A> <|begin|><|begin|> x",
    "ÿ Ā ā Ġ Ċ č ġ Ń ▁ ▁▁ Ġthe",
    "".join(chr(c) for c in range(0x20, 0x250)),
    "".join(random.Random(0).choices([chr(c) for c in range(1, 0xD800)], k=3000)),
]

LONG_LINES = {
    "words": "the quick brown fox jumps " * 4000,
    "one letter": "a" * 100_000,
    "one space": " " * 100_000 + "x",
    "newlines": "\n" * 100_000,
    "digits": "1234567890" * 10_000,
    "no spaces": "永和九年歲在癸丑" * 4_000,
    "emoji": "👩🏽" * 12_000,
}

# The settings of these families' tokenizer.json files, in the library's own words: how text is
# normalised, how it is cut into words, and whether whole words come before merges.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _by_regex(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_GPT2_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_DIGITS_WORDS = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), _GPT2_WORDS]
)
WITNESSES: dict[str, tuple[Any, pre_tokenizers.PreTokenizer, bool]] = {
    "gpt-2": (None, _GPT2_WORDS, False),
    "smollm": (None, _DIGITS_WORDS, False),
    "starcoder": (None, _DIGITS_WORDS, False),
    "refact": (None, _DIGITS_WORDS, False),
    "llama-bpe": (None, _by_regex(_LLAMA3), True),
    "llama3": (None, _by_regex(_LLAMA3), True),
    "llama-v3": (None, _by_regex(_LLAMA3), True),
    "falcon3": (None, _by_regex(_LLAMA3), True),
    "pixtral": (None, _by_regex(_LLAMA3), True),
    "dbrx": (None, _by_regex(_LLAMA3), False),
    "smaug-bpe": (None, _by_regex(_LLAMA3), False),
    "qwen2": (normalizers.NFC(), _by_regex(_QWEN2), False),
    "deepseek-r1-qwen": (normalizers.NFC(), _by_regex(_QWEN2), False),
    "tekken": (None, _by_regex(_TEKKEN), True),
}
BEGINS_WITH_BOS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"}


def _corpus() -> list[str]:
    """Return text to learn merges from: hard texts (several times, to count), words and numbers."""
    words = (
        "the of and to in is that it was for on are with as his they be at one have this".split()
    )
    rng = random.Random(1)
    lines = [" ".join(rng.choices(words, k=12)) for _ in range(200)]
    numbers = [f"{rng.randrange(10**6)} + {rng.random():.4f}\r\n\t  x" for _ in range(100)]
    return [*HARD_TEXTS * 3, *lines, *numbers]


@functools.cache
def _trained_without_words() -> str:
    """Return a vocabulary whose merges cross every border, so that a wrong cut changes the ids."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_corpus(), trainer)
    return backend.to_str()


@functools.cache
def _trained(family: str) -> tokenizers.Tokenizer:
    normalizer, words, whole_words = WITNESSES[family]
    backend = tokenizers.Tokenizer.from_str(_trained_without_words())
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = words
    description = json.loads(backend.to_str())
    description["model"]["ignore_merges"] = whole_words
    if whole_words:  # a token that no merge reaches: only "whole words first" finds it
        description["model"]["vocab"]["Ġunreachable"] = backend.get_vocab_size()
    backend = tokenizers.Tokenizer.from_str(json.dumps(description))
    backend.add_tokens([AddedToken(token, normalized=False) for token in PLAIN_ADDED])
    backend.decoder = library_decoders.ByteLevel()
    if family in BEGINS_WITH_BOS:
        backend.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
        )
    return backend


def _save(backend: tokenizers.Tokenizer, directory: Path, **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def _gguf(backend: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    """Return the same vocabulary as key/values of a GGUF."""
    model = json.loads(backend.to_str())["model"]
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    types = [3 if t in SPECIAL else 4 if t in PLAIN_ADDED else 1 for t in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a directory with one tokenizer per family."""
    root = tmp_path_factory.mktemp("byte_level")
    for family in WITNESSES:
        _save(_trained(family), root / family)
    return root


# ---- byte-level: against transformers and the library ------------------------------------------


def test_every_family_but_llama_cpps_own_default_has_a_reference() -> None:
    assert set(WITNESSES) == set(FAMILIES) - {"default"}


@pytest.mark.parametrize("family", WITNESSES)
def test_a_directory_gives_the_ids_and_the_text_of_transformers(
    byte_level: Path, family: str
) -> None:
    ours = Tokenizer.from_directory(byte_level / family)
    theirs = PreTrainedTokenizerFast.from_pretrained(byte_level / family)
    for text in HARD_TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                    ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )


@pytest.mark.parametrize("family", WITNESSES)
def test_a_gguf_gives_the_same_ids_as_the_tokenizer_json_that_it_was_made_from(
    byte_level: Path, family: str
) -> None:
    backend = tokenizers.Tokenizer.from_file(str(byte_level / family / "tokenizer.json"))
    ours = Tokenizer.from_gguf(_gguf(backend, family))
    for text in [*HARD_TEXTS, " unreachable"]:
        ids = ours.encode(text)
        assert ids == backend.encode(text).ids
        assert ours.decode(ids, skip_special_tokens=False) == backend.decode(
            ids, skip_special_tokens=False
        )


def test_a_directory_and_a_gguf_name_the_same_beginnings_and_ends(byte_level: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(byte_level / "smollm" / "tokenizer.json"))
    for ours in (
        Tokenizer.from_directory(byte_level / "smollm"),
        Tokenizer.from_gguf(_gguf(backend, "smollm")),
    ):
        assert ours.bos_token_id == 0
        assert ours.eos_token_ids == {2}
        assert ours.num_ids == backend.get_vocab_size()


def test_llama_cpps_default_cuts_punctuation_then_words_then_digits_by_three() -> None:
    words = FAMILIES["default"].pre_tokenizer().pre_tokenize_str("it's  a1 b12345!?x\n\ny")
    pieces = [text.replace("Ġ", " ").replace("Ċ", "\n") for text, _ in words]
    assert pieces == ["it", "'", "s", " ", " a", "1", " b", "123", "45", "!?", "x", "\n", "\n", "y"]


@pytest.mark.parametrize("family", ["gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken"])
@always
@given(text=st.text() | st.text(alphabet="aA1 é中'sS\n\r\t/.!\u0301\u1e9e\u017f²\u200d\u00a0"))
def test_any_text_is_cut_into_the_words_that_the_familys_tokenizer_json_cuts(
    family: str, text: str
) -> None:
    words = WITNESSES[family][1].pre_tokenize_str(text)
    assert FAMILIES[family].pre_tokenizer().pre_tokenize_str(text) == words


def test_the_expressions_are_those_that_transformers_has_for_ggufs() -> None:
    theirs = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    for name, family in FAMILIES.items():
        if name in theirs.GGUF_PRE_TOKENIZER_SPLITS:
            assert family.patterns == (theirs.GGUF_PRE_TOKENIZER_SPLITS[name],)


@pytest.mark.parametrize("name", LONG_LINES)
@pytest.mark.parametrize("family", ["smollm", "llama-bpe"])
def test_a_line_of_100_kb_takes_no_time(byte_level: Path, family: str, name: str) -> None:
    ours = Tokenizer.from_directory(byte_level / family)
    start = time.process_time()
    ids = ours.encode(LONG_LINES[name])
    assert ours.decode(ids) == LONG_LINES[name]
    assert time.process_time() - start < 5  # well under 1 s; anything quadratic takes minutes


# ---- SentencePiece: against sentencepiece itself ------------------------------------------------


@functools.cache
def _sentence_pieces(**options: Any) -> sentencepiece.SentencePieceProcessor:
    settings = {
        "vocab_size": 1200,
        "character_coverage": 0.98,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "user_defined_symbols": PLAIN_ADDED,
        **options,
    }
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text.replace("\0", "") for text in _corpus() if text]),
        model_writer=model,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **settings,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def _gguf_of_pieces(pieces: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    def kind(i: int) -> int:
        if pieces.is_unknown(i):
            return 2
        if pieces.is_control(i):
            return 3
        if pieces.is_byte(i):
            return 6
        return 4 if pieces.id_to_piece(i) in PLAIN_ADDED else 1

    ids = range(pieces.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [pieces.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": np.array([pieces.get_score(i) for i in ids], np.float32),
        "tokenizer.ggml.token_type": np.array([kind(i) for i in ids], np.int32),
        "tokenizer.ggml.bos_token_id": pieces.bos_id(),
        "tokenizer.ggml.eos_token_id": pieces.eos_id(),
        "tokenizer.ggml.unknown_token_id": pieces.unk_id(),
    }


@functools.cache
def _llama() -> Tokenizer:
    return Tokenizer.from_gguf(_gguf_of_pieces(_sentence_pieces()))


def _without_written_specials(text: str) -> bool:
    """Remove special tokens: sentencepiece does not recognise control tokens in text."""
    return not any(token in text for token in ("<s>", "</s>", "<unk>", *PLAIN_ADDED))


@pytest.mark.parametrize("text", [t for t in HARD_TEXTS if _without_written_specials(t)])
def test_pieces_are_joined_as_sentencepiece_joins_them(text: str) -> None:
    ids = _llama().encode(text)
    assert ids == _sentence_pieces().encode(text, add_bos=True)
    assert _llama().decode(ids) == _sentence_pieces().decode(ids) == text.replace("▁", " ")


@pytest.mark.parametrize("name", LONG_LINES)
def test_a_line_of_100_kb_is_joined_as_sentencepiece_joins_it(name: str) -> None:
    start = time.process_time()
    ids = _llama().encode(LONG_LINES[name])
    assert time.process_time() - start < 5
    assert ids == _sentence_pieces().encode(LONG_LINES[name], add_bos=True)


@always
@given(st.text(alphabet="ab \t1▁theofn", max_size=60))
def test_repetitive_text_is_joined_as_sentencepiece_joins_it(text: str) -> None:
    assert _llama().encode(text, add_special_tokens=False) == _sentence_pieces().encode(text)


@always
@given(st.text(alphabet="ab", max_size=60), st.integers(0, 5))
def test_a_vocabulary_full_of_overlaps_is_joined_as_sentencepiece_joins_it(
    text: str, which: int
) -> None:
    pieces, ours = _overlapping(which)
    assert ours.encode(text, add_special_tokens=False) == pieces.encode(text)


@functools.cache
def _overlapping(seed: int) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    rng = random.Random(seed)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=("".join(rng.choices("aab", k=30)) for _ in range(200)),
        model_writer=model,
        model_type="bpe",
        vocab_size=259 + 20 * (seed + 1),
        byte_fallback=True,
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return pieces, Tokenizer.from_gguf(_gguf_of_pieces(pieces))


def test_without_a_space_prefix_nothing_is_put_before_a_text() -> None:
    pieces = _sentence_pieces(add_dummy_prefix=False)
    ours = Tokenizer.from_gguf(
        {**_gguf_of_pieces(pieces), "tokenizer.ggml.add_space_prefix": False}
    )
    for text in filter(_without_written_specials, HARD_TEXTS):
        ids = ours.encode(text)
        assert ids == pieces.encode(text, add_bos=True)
        assert ours.decode(ids) == text.replace("▁", " ")


def test_written_special_tokens_are_recognised_and_each_text_after_one_gets_its_space() -> None:
    tokens = [_sentence_pieces().id_to_piece(i) for i in _llama().encode("of</s>of<think>of")]
    assert tokens == ["<s>", "▁of", "</s>", "▁of", "<think>", "▁of"]  # as llama.cpp does


def test_a_written_unknown_token_is_recognised_and_not_shown() -> None:
    ids = _llama().encode("of<unk>", add_special_tokens=False)
    assert ids[-1] == _sentence_pieces().unk_id()
    assert _llama().decode(ids) == "of"


def test_an_unused_piece_is_never_made() -> None:
    metadata = _gguf_of_pieces(_sentence_pieces())
    unused = metadata["tokenizer.ggml.tokens"].index("▁the")
    assert unused in Tokenizer.from_gguf(metadata).encode("the")
    metadata["tokenizer.ggml.token_type"][unused] = 5
    ours = Tokenizer.from_gguf(metadata)
    assert unused not in ours.encode("the")
    assert ours.decode(ours.encode("the")) == "the"


def test_a_tokenizer_json_of_pieces_equals_the_gguf_and_transformers(tmp_path: Path) -> None:
    _save(_llama()._backend, tmp_path, bos_token="<s>", eos_token="</s>")
    ours = Tokenizer.from_directory(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in HARD_TEXTS:
        ids = ours.encode(text)
        assert ids == _llama().encode(text) == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_pieces_as_newer_files_prefix_them_equal_transformers(tmp_path: Path) -> None:
    """Newer tokenizer.json files add the space with Metaspace, only at a text's start."""
    description = json.loads(_llama()._backend.to_str())
    description["normalizer"] = None
    description["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "first",
        "split": False,
    }
    library = tokenizers.Tokenizer.from_str(json.dumps(description))
    _save(library, tmp_path, bos_token="<s>", eos_token="</s>")
    ours = Tokenizer.from_directory(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in HARD_TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.encode("of</s>of") != _llama().encode("of</s>of")


# ---- the whole way and back, and streams --------------------------------------------------------


@functools.cache
def _bytes() -> Tokenizer:
    return Tokenizer.from_gguf(_gguf(_trained("llama-bpe"), "llama-bpe"))


@always
@given(st.text())
@example("a<|im_end|>b")
def test_any_text_comes_back_from_byte_level_tokens(text: str) -> None:
    ids = _bytes().encode(text, add_special_tokens=False)
    assert _bytes().decode(ids, skip_special_tokens=False) == text


@always
@given(st.text().filter(lambda text: "▁" not in text and not regex.search("<.+>", text)))
def test_any_text_without_special_tokens_comes_back_from_pieces(text: str) -> None:
    assert _llama().decode(_llama().encode(text)) == text


def test_decoded_text_is_composed_if_the_family_composes(byte_level: Path) -> None:
    ours = Tokenizer.from_directory(byte_level / "qwen2")
    for text in HARD_TEXTS[:22]:  # without special tokens
        assert ours.decode(ours.encode(text)) == unicodedata.normalize("NFC", text)


@functools.cache
def _ids(make: Callable[[], Tokenizer]) -> st.SearchStrategy[list[int]]:
    """Any ids, including ids without a token and many that are one byte."""
    tokenizer = make()
    single = [i for i in range(tokenizer.num_ids) if len(tokenizer.token_bytes(i)) == 1]
    return st.lists(st.integers(-2, tokenizer.num_ids + 2) | st.sampled_from(single))


@pytest.mark.parametrize("make", [_bytes, _llama])
@always
@given(data=st.data(), skip=st.booleans())
def test_a_stream_of_any_ids_adds_up_to_decoding_them_at_once(
    make: Callable[[], Tokenizer], data: st.DataObject, skip: bool
) -> None:
    tokenizer, ids = make(), data.draw(_ids(make))
    stream = tokenizer.stream(skip_special_tokens=skip, continues=False)
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids, skip_special_tokens=skip)


@always
@given(data=st.data())
def test_any_ids_decode_as_in_the_library(data: st.DataObject) -> None:
    ids = [i for i in data.draw(_ids(_bytes)) if i >= 0]
    assert _bytes().decode(ids, skip_special_tokens=False) == _bytes()._backend.decode(
        ids, skip_special_tokens=False
    )


def test_every_byte_that_is_no_text_is_decoded_as_the_library_does() -> None:
    of_byte = {_bytes().token_bytes(i): i for i in range(_bytes().num_ids)}
    rng = random.Random(0)
    broken = [bytes([b]) for b in range(256)] + [
        bytes(rng.choices([0x41, 0x80, 0xBF, 0xC3, 0xE2, 0xED, 0xA0, 0xF0, 0x9F, 0xF4, 0x90], k=6))
        for _ in range(2000)
    ]
    for text in broken:
        ids = [of_byte[bytes([b])] for b in text]
        assert _bytes().decode(ids) == _bytes()._backend.decode(ids)


@always
@given(st.text(min_size=1))
@example("a<|im_end|>b")
def test_a_stream_gives_out_only_whole_characters_and_gives_them_at_once(text: str) -> None:
    stream, shown, pending = _bytes().stream(skip_special_tokens=False), "", b""
    for token_id in _bytes().encode(text, add_special_tokens=False):
        piece = stream.push(token_id)
        pending += _bytes().token_bytes(token_id)
        shown += piece
        assert text.startswith(shown)
        assert len(pending) - len(shown.encode()) < 4  # no whole character is held back
    assert stream.finish() == ""
    assert shown == text


def test_half_a_character_is_held_back_and_shown_as_unknown_only_at_the_end() -> None:
    of_byte = {_bytes().token_bytes(i): i for i in range(_bytes().num_ids)}
    one, two, three, four = (of_byte[bytes([b])] for b in "🙂".encode())
    stream = _bytes().stream()
    assert [stream.push(i) for i in (one, two, three, four)] == ["", "", "", "🙂"]
    assert [stream.push(one), stream.push(two), stream.finish()] == ["", "", "\ufffd"]


def test_text_that_goes_on_after_a_prompt_keeps_its_leading_space() -> None:
    ids = _llama().encode("of", add_special_tokens=False)
    goes_on, begins = _llama().stream(), _llama().stream(continues=False)
    assert "".join(goes_on.push(i) for i in ids) == " of"
    assert "".join(begins.push(i) for i in ids) == "of" == _llama().decode(ids)
    late = _llama().stream(continues=False)  # at the start of the text the space is still dropped
    assert "".join(late.push(i) for i in [_llama().num_ids, *ids]) == "of"


def test_special_tokens_are_shown_only_when_asked_for() -> None:
    ids = _bytes().encode("<|im_start|>a<think>", add_special_tokens=False)
    assert _bytes().decode(ids) == "a<think>"
    assert _bytes().decode(ids, skip_special_tokens=False) == "<|im_start|>a<think>"
    shown = _bytes().stream(skip_special_tokens=False)
    assert [shown.push(i) for i in ids] == ["<|im_start|>", "a", "<think>"]
    assert _bytes().token_bytes(ids[0]) == b"<|im_start|>"


def test_an_id_without_a_token_stands_for_no_bytes() -> None:
    for token_id in (-1, _bytes().num_ids, 2**40):
        assert _bytes().token_bytes(token_id) == b""
    assert _bytes().decode([_bytes().num_ids]) == ""


def test_a_token_that_is_not_in_the_byte_alphabet_stands_for_itself() -> None:
    metadata = _gguf(_trained("gpt-2"), "gpt-2")
    metadata["tokenizer.ggml.tokens"] += ["[PAD 中]", "ñÞ®"]
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], [5, 4])
    ours = Tokenizer.from_gguf(metadata)
    assert ours.token_bytes(ours.num_ids - 2).decode() == "[PAD 中]"
    assert ours.decode(ours.encode("a ñÞ® b")) == "a ñÞ® b"
    assert ours.num_ids - 1 in ours.encode("a ñÞ® b")


# ---- what files contain, and what is wrong with them --------------------------------------------


def test_a_gguf_that_asks_for_bos_and_eos_gets_them() -> None:
    metadata = _gguf(_trained("gpt-2"), "gpt-2")
    plain = Tokenizer.from_gguf(metadata).encode("a")
    framed = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    assert Tokenizer.from_gguf(metadata | framed).encode("a") == [0, *plain, 2]
    assert Tokenizer.from_gguf(metadata | framed).encode("a", add_special_tokens=False) == plain
    silent = {**_gguf_of_pieces(_sentence_pieces()), "tokenizer.ggml.add_bos_token": False}
    assert Tokenizer.from_gguf(silent).encode("of") == _llama().encode("of")[1:]


def test_ends_of_turns_and_messages_are_ends_too() -> None:
    metadata = _gguf(_trained("gpt-2"), "gpt-2")
    metadata |= {"tokenizer.ggml.eot_token_id": 1, "tokenizer.ggml.eom_token_id": 0}
    assert Tokenizer.from_gguf(metadata).eos_token_ids == {0, 1, 2}
    del metadata["tokenizer.ggml.eos_token_id"], metadata["tokenizer.ggml.bos_token_id"]
    assert Tokenizer.from_gguf(metadata).eos_token_ids == {0, 1}
    assert Tokenizer.from_gguf(metadata).bos_token_id is None


def test_without_token_types_bos_and_eos_are_still_special() -> None:
    metadata = _gguf(_trained("gpt-2"), "gpt-2")
    del metadata["tokenizer.ggml.token_type"]
    ours = Tokenizer.from_gguf(metadata)
    assert ours.encode("<|im_end|>") == [2]
    assert ours.decode([2]) == ""


def test_a_gguf_without_a_named_pre_tokeniser_is_cut_by_the_default() -> None:
    metadata = _gguf(_trained("gpt-2"), "default")
    named = Tokenizer.from_gguf(metadata)
    del metadata["tokenizer.ggml.pre"]
    unnamed = Tokenizer.from_gguf(metadata)
    assert [unnamed.encode(t) for t in HARD_TEXTS] == [named.encode(t) for t in HARD_TEXTS]


GGUF_FAULTS: dict[str, tuple[dict[str, Any], type[MinigenError], str]] = {
    "no tokens": ({"tokens": None}, TokenizerError, "no tokenizer.ggml.tokens"),
    "empty tokens": ({"tokens": []}, TokenizerError, "no tokenizer.ggml.tokens"),
    "no merges": ({"merges": None}, TokenizerError, "no tokenizer.ggml.merges"),
    "types of another length": (
        {"token_type": np.ones(3, np.int32)},
        TokenizerError,
        "token_type has 3 entries",
    ),
    "a merge of nothing": ({"merges": ["a"]}, TokenizerError, "merges 'a' and ''"),
    "a merge of an unknown": ({"merges": ["a 中"]}, TokenizerError, "merges 'a' and '中'"),
    "a merge into an unknown": ({"merges": ["Q X"]}, TokenizerError, "merges 'Q' and 'X'"),
    "bos out of range": ({"bos_token_id": 10**6}, TokenizerError, "bos_token_id is 1000000"),
    "eot out of range": ({"eot_token_id": 9999}, TokenizerError, "eot_token_id is 9999"),
    "bos without id": (
        {"bos_token_id": None, "add_bos_token": True},
        TokenizerError,
        "bos_token_id is missing",
    ),
    "another kind": ({"model": "bert"}, UnsupportedError, "'bert'"),
    "no kind": ({"model": None}, UnsupportedError, "of the kind ''"),
    "a list as kind": ({"model": ["gpt2"]}, TokenizerError, "model should be a string, not"),
    "numbers as pre": ({"pre": np.ones(2)}, TokenizerError, "pre should be a string, not"),
    "add_bos of numbers": (
        {"add_bos_token": np.ones(2)},
        TokenizerError,
        "add_bos_token should be true or false",
    ),
    "types of text": (
        {"token_type": ["1"] * len(_trained("gpt-2").get_vocab())},
        TokenizerError,
        "token_type should hold numbers",
    ),
    "unknown words": (
        {"pre": "viking"},
        UnsupportedError,
        "'viking'.*knows default, gpt-2, smollm",
    ),
}


@pytest.mark.parametrize("fault", GGUF_FAULTS)
def test_a_gguf_vocabulary_that_cannot_be_right_is_refused(fault: str) -> None:
    changes, error, message = GGUF_FAULTS[fault]
    metadata = _gguf(_trained("gpt-2"), "gpt-2")
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(error, match=message):
        Tokenizer.from_gguf(metadata)


def test_a_tokenizer_on_which_the_library_panics_is_an_error(
    byte_level: Path, tmp_path: Path
) -> None:
    whole = json.loads((byte_level / "gpt-2" / "tokenizer.json").read_text("utf-8"))
    charsmap = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**whole, "normalizer": charsmap}), "utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer.json cannot be read: The tokenizers libr"):
        Tokenizer.from_directory(tmp_path)
    frame = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "?", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {},
    }
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({**whole, "post_processor": frame}), "utf-8"
    )
    tokenizer = Tokenizer.from_directory(tmp_path)
    for text in ("a", "a" * LONG_TEXT):
        with pytest.raises(TokenizerError, match="The tokenizers library failed"):
            tokenizer.encode(text)


def test_merges_of_a_very_long_piece_are_found_at_once() -> None:
    """Its cuts are tried at the lengths of other pieces only, so the time is not quadratic."""
    long = "ab" * 500_000
    merges = _merges_by_score({"a": 0.0, "b": 0.0, "ab": 1.0, long[:-1]: 2.0, long: 3.0})
    assert merges == [(long[:-1], "b"), ("a", "b")]


def test_a_token_that_occurs_twice_is_refused_by_name() -> None:
    metadata = _gguf(_trained("gpt-2"), "gpt-2")
    metadata["tokenizer.ggml.tokens"][70] = metadata["tokenizer.ggml.tokens"][50]
    with pytest.raises(TokenizerError, match="more than once, as 50 and as 70"):
        Tokenizer.from_gguf(metadata)


def test_pieces_without_scores_or_bytes_are_refused() -> None:
    metadata = _gguf_of_pieces(_sentence_pieces())
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(TokenizerError, match="scores has 0 entries, but there are 1200"):
        Tokenizer.from_gguf(metadata)
    metadata = _gguf_of_pieces(_sentence_pieces())
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("<0x41>")] = "no byte"
    with pytest.raises(TokenizerError, match="lacks 1 of the 256 byte tokens, <0x41>"):
        Tokenizer.from_gguf(metadata)


def test_a_directory_whose_tokenizer_json_is_missing_or_broken_is_refused(
    byte_level: Path, tmp_path: Path
) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer.json\.$"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(TokenizerError, match=r"does not read tokenizer.model"):
        Tokenizer.from_directory(tmp_path)
    whole = (byte_level / "gpt-2" / "tokenizer.json").read_text("utf-8")
    for broken in (
        "",
        whole[: len(whole) // 2],
        "[]",
        "{}",
        "no json",
        whole.replace("BPE", "XYZ"),
    ):
        (tmp_path / "tokenizer.json").write_text(broken, encoding="utf-8")
        with pytest.raises(TokenizerError, match=r"tokenizer.json cannot be read"):
            Tokenizer.from_directory(tmp_path)


def test_a_broken_tokenizer_config_is_refused(byte_level: Path, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(byte_level / "gpt-2" / "tokenizer.json"))
    _save(backend, tmp_path)
    for broken in ("{", "[1]", '"a"', '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"):
        (tmp_path / "tokenizer_config.json").write_text(broken, encoding="utf-8")
        with pytest.raises(TokenizerError, match=r"tokenizer_config.json"):
            Tokenizer.from_directory(tmp_path)
    _save(backend, tmp_path, eos_token="\ud800")
    with pytest.raises(TokenizerError, match=r"names '\\ud800' as its eos_token, which is no text"):
        Tokenizer.from_directory(tmp_path)
    _save(backend, tmp_path, eos_token="<|nowhere|>")
    with pytest.raises(TokenizerError, match=r"names '<\|nowhere\|>' as its eos_token"):
        Tokenizer.from_directory(tmp_path)


def test_other_kinds_of_tokenizer_are_refused_by_name(tmp_path: Path) -> None:
    unigram = tokenizers.Tokenizer(models.Unigram([("a", 0.0)], unk_id=0))
    suffixed = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    suffixed.decoder = library_decoders.BPEDecoder()
    silent = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    for backend, name in ((unigram, "Unigram"), (suffixed, "BPEDecoder"), (silent, "nothing")):
        backend.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(UnsupportedError, match=name):
            Tokenizer.from_directory(tmp_path)


def test_a_tokenizer_json_that_truncates_or_pads_does_neither_here(
    byte_level: Path, tmp_path: Path
) -> None:
    backend = tokenizers.Tokenizer.from_file(str(byte_level / "gpt-2" / "tokenizer.json"))
    whole = backend.encode(HARD_TEXTS[2]).ids
    for spoil in (lambda: backend.enable_truncation(4), lambda: backend.enable_padding(length=999)):
        spoil()
        assert backend.encode(HARD_TEXTS[2]).ids != whole
        assert Tokenizer.from_directory(_save(backend, tmp_path)).encode(HARD_TEXTS[2]) == whole


def test_special_tokens_are_found_wherever_older_files_name_them(
    byte_level: Path, tmp_path: Path
) -> None:
    backend = tokenizers.Tokenizer.from_file(str(byte_level / "gpt-2" / "tokenizer.json"))
    _save(backend, tmp_path, bos_token=None, eos_token={"content": "<|im_end|>", "lstrip": False})
    assert Tokenizer.from_directory(tmp_path).bos_token_id is None
    assert Tokenizer.from_directory(tmp_path).eos_token_ids == {2}
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.from_directory(tmp_path).eos_token_ids == frozenset()
    (tmp_path / "special_tokens_map.json").write_text(
        '{"eos_token": "<|im_start|>"}', encoding="utf-8"
    )
    assert Tokenizer.from_directory(tmp_path).eos_token_ids == {1}


def test_a_named_token_that_tokenizer_json_does_not_mark_is_special_too(
    byte_level: Path, tmp_path: Path
) -> None:
    description = json.loads((byte_level / "gpt-2" / "tokenizer.json").read_text("utf-8"))
    description["added_tokens"] = []
    _save(tokenizers.Tokenizer.from_str(json.dumps(description)), tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.encode("a<|im_end|>b") == theirs.encode("a<|im_end|>b")
    assert ours.decode([2]) == ""


def test_a_vocabulary_larger_than_the_models_is_refused_naming_its_last_token() -> None:
    _bytes().check_vocabulary(_bytes().num_ids)
    _bytes().check_vocabulary(_bytes().num_ids + 61)  # padding is normal
    with pytest.raises(TokenizerError, match=rf"'</think>' has the id {_bytes().num_ids - 1}"):
        _bytes().check_vocabulary(_bytes().num_ids - 1)


def test_ids_with_gaps_count_up_to_the_highest(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 41}, []))
    backend.decoder = library_decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_directory(tmp_path)
    assert ours.num_ids == 42
    assert [ours.token_bytes(i) for i in (0, 7, 41)] == [b"a", b"", b"b"]


def test_half_a_surrogate_pair_is_refused_with_its_place() -> None:
    with pytest.raises(PromptError, match="position 3"):
        _bytes().encode("abc\ud83d")
    with pytest.raises(PromptError, match="position 0"):
        _llama().encode("\udc00")


# ---- the default model --------------------------------------------------------------------------


def _reference_encode(text: str, tokens: list[str], merges: list[str]) -> list[int]:
    """Byte-pair encoding in its simplest form: join the best pair until none is left."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    letters = [chr(b) if b in printable else chr(next(others)) for b in range(256)]
    ids = {token: i for i, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    found = []
    for special in regex.split(r"(<\|im_start\|>|<\|im_end\|>|<\|endoftext\|>)", text):
        if special in ids and special.startswith("<|"):
            found.append(ids[special])
            continue
        for piece in regex.split(r"(\p{N})", special):
            for word in regex.findall(gpt2, piece):
                symbols = [letters[b] for b in word.encode() if letters[b] in ids]
                while pairs := [p for p in itertools.pairwise(symbols) if p in ranks]:
                    left, right = min(pairs, key=ranks.__getitem__)
                    joined, i = [], 0
                    while i < len(symbols):
                        pair = symbols[i : i + 2] == [left, right]
                        joined.append(left + right if pair else symbols[i])
                        i += 2 if pair else 1
                    symbols = joined
                found += [ids[symbol] for symbol in symbols]
    return found


@pytest.fixture(scope="module")
def default_metadata(default_model_path: Path) -> dict[str, Any]:
    return read_gguf(default_model_path).metadata


@pytest.mark.model
def test_the_default_model_encodes_as_thirty_slow_lines_do(
    default_metadata: dict[str, Any],
) -> None:
    ours = Tokenizer.from_gguf(default_metadata)
    tokens = default_metadata["tokenizer.ggml.tokens"]
    merges = default_metadata["tokenizer.ggml.merges"]
    for text in HARD_TEXTS:
        assert ours.encode(text) == _reference_encode(text, tokens, merges)


@pytest.mark.model
def test_the_default_model_gives_text_back_but_for_characters_that_it_has_no_bytes_for(
    default_metadata: dict[str, Any],
) -> None:
    ours = Tokenizer.from_gguf(default_metadata)
    spelled = {ours.token_bytes(i) for i in range(ours.num_ids)}
    absent = [b for b in range(256) if bytes([b]) not in spelled]
    assert [b for b in absent if b < 0x80] == [0x04, 0x06, 0x13, 0x14, 0x16, 0x1D]
    for text in HARD_TEXTS[:22]:  # without special tokens
        assert ours.decode(ours.encode(text)) == text
    assert ours.decode(ours.encode("a\x04b")) == "ab"


@pytest.mark.model
def test_the_default_model_ends_with_the_end_of_a_message(default_metadata: dict[str, Any]) -> None:
    ours = Tokenizer.from_gguf(default_metadata)
    assert (ours.num_ids, ours.bos_token_id, ours.eos_token_ids) == (49152, 1, {2})
    assert ours.encode("Hello<|im_end|>") == [19556, 2]
