"""What chapter 12 measures with: a GGUF's merges, ties in training, the library's trainer."""

import json
import re
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import tokenizers
from tokenizers import Regex, models, pre_tokenizers, trainers

from minigen.llm import LLM
from minigen.tokenizer.tokenizer import Tokenizer, bytes_of_letters
from minigen_course.ch12_tokenizer.figures import Row, label
from minigen_course.ch12_tokenizer.reference import GPT2_WORDS, Pair, encode, merge_pair, split

_CONTROL = 3  # tokenizer.ggml.token_type of special tokens


def model_ranks(metadata: Mapping[str, Any]) -> dict[Pair, int]:
    """Return the merges of a byte-level GGUF as pairs of bytes, with their places in the list."""
    ranks = {}
    for rank, merge in enumerate(metadata["tokenizer.ggml.merges"]):
        left, right = merge.split(" ")
        ranks[bytes_of_letters(left), bytes_of_letters(right)] = rank
    return ranks


def text_ids(metadata: Mapping[str, Any]) -> dict[bytes, int]:
    """Return the id of each token of a byte-level GGUF that stands for text, by its bytes."""
    special = special_ids(metadata)
    tokens = enumerate(metadata["tokenizer.ggml.tokens"])
    return {bytes_of_letters(token): i for i, token in tokens if token not in special}


def special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of a GGUF's special tokens by their texts."""
    kinds = metadata["tokenizer.ggml.token_type"]
    tokens = enumerate(metadata["tokenizer.ggml.tokens"])
    return {token: i for i, token in tokens if kinds[i] == _CONTROL}


def merging_encoder(metadata: Mapping[str, Any]) -> Callable[[str], list[int]]:
    """Return a function that encodes plain text by a GGUF's merges, as `reference.encode` does.

    It knows no special token, and skips bytes without a token, as the engine does.
    """
    ranks, ids = model_ranks(metadata), text_ids(metadata)
    return lambda text: [ids[part] for part in encode(text, ranks) if part in ids]


@contextmanager
def tokenizing_by(llm: LLM, encode_text: Callable[[str], list[int]]) -> Generator[None, None, None]:
    """Let an engine encode its prompts with another function while the block runs."""

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        return encode_text(text)

    with patch.object(llm.tokenizer, "encode", encode):
        yield


def num_ties(counts: Mapping[bytes, int], merges: Sequence[Pair]) -> int:
    """Return how many of these merges had a rival with an equal count when they were learned."""
    words = [([bytes([byte]) for byte in word], times) for word, times in counts.items()]
    ties = 0
    for merge in merges:
        found: Counter[Pair] = Counter()
        for parts, times in words:
            for pair in pairwise(parts):
                found[pair] += times
        ties += sum(count == found[merge] for count in found.values()) > 1
        words = [(merge_pair(parts, merge), times) for parts, times in words]
    return ties


def library_merges(text: str, num_merges: int) -> list[Pair]:
    """Return the merges that the `tokenizers` library learns from a text, cut as `split` cuts."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(GPT2_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=256 + num_merges,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([text], trainer)
    merges = json.loads(library.to_str())["model"]["merges"]
    return [(bytes_of_letters(left), bytes_of_letters(right)) for left, right in merges]


def way_of(text: str, tokenizer: Tokenizer, special: Mapping[str, int]) -> list[Row]:
    """Return the stages through which a text becomes ids, for `figures.way`."""
    pattern = "|".join(map(re.escape, special))
    pieces = [piece for piece in re.split(f"({pattern})", text) if piece]
    words = [word for piece in pieces for word in ([piece] if piece in special else split(piece))]
    ids = tokenizer.encode(text)
    tokens = [tokenizer.token_bytes(token_id) for token_id in ids]
    single: list[tuple[str, int]] = []
    for word in words:
        raw = word.encode()
        single += [(word, len(raw))] if word in special else [(f"{each:02X}", 1) for each in raw]
    return [
        Row(f"text: {len(text)} characters", ((text, len(text.encode())),)),
        Row("special tokens first", tuple((each, len(each.encode())) for each in pieces)),
        Row(
            f"{sum(each not in special for each in words)} words",
            tuple((each, len(each.encode())) for each in words),
        ),
        Row("their bytes", tuple(single)),
        Row(f"merged: {len(tokens)} tokens", tuple((label(each), len(each)) for each in tokens)),
        Row("ids", tuple((str(i), len(raw)) for i, raw in zip(ids, tokens, strict=True))),
    ]
