r"""Exercise split of chapter 12 (core, 10 points, about 10 minutes).

Cut a text into words, as the pre-tokenizer of this model does; joined, the words are the text.
Every number character (Unicode class `\p{N}`: also ½ and ₂) is a word of its own. The texts
between numbers are cut on their own, at each place by the first of these rules that fits:

1. `'s`, `'t`, `'re`, `'ve`, `'m`, `'ll` or `'d`, in lower case;

2. a run of letters (`\p{L}`), with one space before it if there is one;

3. a run of characters that are neither letters nor numbers nor white space, with one space
before it if there is one;

4. a run of white space: all of it at the end of such a text, else all but its last character,
or that one character alone. So `a␣␣␣b` becomes `a`, `␣␣`, `␣b`, and `a␣␣3` becomes `a`, `␣␣`,
`3`.

`pieces_of(pattern, text)` of `minigen_course.ch12_tokenizer.reference` cuts a text at every
match of a regular expression that may contain `\p{L}` and `\p{N}`; you may use it, or any other
way.

Check it:     minigen check exercises/12_tokenizer/split.py
With a hint:  minigen check exercises/12_tokenizer/split.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams, hub
    from minigen.checkpoint.gguf import read_gguf
    from minigen_course import load_model
    from minigen_course.ch12_tokenizer.lesson import merging_encoder, tokenizing_by

    llm = load_model()
    encode_text = merging_encoder(read_gguf(hub.resolve(hub.DEFAULT_MODEL)).metadata)
    with using(12, split=mine), tokenizing_by(llm, encode_text):
        print(llm.generate("It's 1969, and", SamplingParams(temperature=0, max_tokens=16)).text)

Harder: Llama 3 cuts numbers into groups of up to three characters, ignores the case of
contractions, and lets any one character that is no letter, number or line end (not only a
space) begin a run of letters. Write that pattern. What does it change for code, and for long
numbers?
"""

# exercise: minigen_course.ch12_tokenizer.reference.split
def split(text: str) -> list[str]:
    """Cut a text into words, as the model's pre-tokenizer does; joined they are the text.

    >>> split("It's the 42nd time.")
    ['It', "'s", ' the', ' ', '4', '2', 'nd', ' time', '.']
    """
    raise NotImplementedError  # your turn
