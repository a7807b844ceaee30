"""How byte-level vocabularies cut a text into words before any merging, by name.

A GGUF only names it, in `tokenizer.ggml.pre`. Sources: llama.cpp's `llama-vocab.cpp` for the names
and what else they imply; the `tokenizer.json` of the model that a name comes from for the exact
expressions, since llama.cpp's own differ on rare characters.
"""

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Family:
    """What the vocabularies of a family share.

    Each pattern cuts what the one before it left: a match is a word, and so is what lies between
    two matches. With `single_digits` every digit is a word, before any pattern; with `composes`
    Unicode's NFC comes before all else; with `whole_words` a word that is a token is not merged;
    with `adds_bos` a text begins with BOS unless the vocabulary says otherwise.
    """

    patterns: tuple[str, ...]
    single_digits: bool = False
    composes: bool = False
    whole_words: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> PreTokenizer:
        """The family's cutting as the `tokenizers` library does it, down to the byte alphabet."""
        return Sequence(
            [
                *([Digits(individual_digits=True)] if self.single_digits else []),
                *(Split(Regex(pattern), "isolated") for pattern in self.patterns),
                ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )


_SINGLE_DIGITS = Family((_GPT2,), single_digits=True)
_LLAMA3_FAMILY = Family((_LLAMA3,), whole_words=True, adds_bos=True)
_CL100K = Family((_LLAMA3,))
_QWEN2_FAMILY = Family((_QWEN2,), composes=True)

FAMILIES = {
    "default": Family((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": Family((_GPT2,)),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3_FAMILY,
    "llama3": _LLAMA3_FAMILY,
    "llama-v3": _LLAMA3_FAMILY,
    "falcon3": _LLAMA3_FAMILY,
    "pixtral": _LLAMA3_FAMILY,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "qwen2": _QWEN2_FAMILY,
    "deepseek-r1-qwen": _QWEN2_FAMILY,
    "tekken": Family((_TEKKEN,), whole_words=True, adds_bos=True),
}
