"""Exercise encode_word of chapter 12 (core, 10 points, about 15 minutes).

Encode one word. Begin with its single bytes. Among all pairs of neighbours, find the one with
the lowest rank (`ranks` says how many merges were learned before this one), and join it
wherever it occurs, from left to right. Repeat until no pair is in `ranks`, and return the
parts. What counts is the pair: two parts are not joined merely because their joined bytes are a
token.

Check it:     minigen check exercises/12_tokenizer/encode_word.py
With a hint:  minigen check exercises/12_tokenizer/encode_word.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams, hub
    from minigen.checkpoint.gguf import read_gguf
    from minigen_course import load_model
    from minigen_course.ch12_tokenizer.lesson import merging_encoder, tokenizing_by

    llm = load_model()
    encode_text = merging_encoder(read_gguf(hub.resolve(hub.DEFAULT_MODEL)).metadata)
    with using(12, encode_word=mine), tokenizing_by(llm, encode_text):
        print(llm.generate("Why is the sky blue?", SamplingParams(temperature=0, max_tokens=16)).text)

Harder: A word of n bytes takes up to n rounds over n pairs. The exercise `encode_long` asks for
the same result with three look-ups per byte, and its check counts them.
"""

# exercise: minigen_course.ch12_tokenizer.reference.encode_word
from collections.abc import Mapping

from minigen_course.ch12_tokenizer.reference import Pair


def encode_word(word: bytes, ranks: Mapping[Pair, int]) -> list[bytes]:
    """Return the parts of a word after all merges that fit, the earliest-learned first.

    `ranks` says for each merge how many were learned before it.

    >>> encode_word(b"then", {(b"h", b"e"): 0, (b"t", b"he"): 1, (b"e", b"n"): 2})
    [b'the', b'n']
    """
    raise NotImplementedError  # your turn
