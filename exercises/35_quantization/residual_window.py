"""Exercise residual_window of chapter 35 (stretch, 15 points, about 10 minutes).

Write KIVI's bookkeeping. The newest tokens of a KV cache stay in full precision. A channel's
scale is shared by `residual` tokens, so keys get codes only in whole groups: as soon as
`residual` keys wait, all of them get codes. A value has scales of its own, so values get codes
one by one: the newest `residual` values stay in full. Return how many of the oldest
`num_tokens` tokens have codes, for keys and for values.

Check it:     minigen check exercises/35_quantization/residual_window.py
With a hint:  minigen check exercises/35_quantization/residual_window.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    for num_tokens in (31, 32, 33, 64):
        keys, values = mine(num_tokens, 32)
        print(f"{num_tokens} tokens: {keys} keys and {values} values have codes")

Harder: minigen's cache has pages. A group of keys lies within one block, and the block that a
sequence is filling stays in full precision, keys and values. How many tokens have codes with
blocks of 32? Why does that make sharing a prefix safe?
"""

# exercise: minigen_course.ch35_quantization.reference.residual_window
def residual_window(num_tokens: int, residual: int) -> tuple[int, int]:
    """Return how many of a sequence's oldest tokens have codes in KIVI's cache: keys, and values.

    A channel's scale is shared by `residual` tokens, so keys get codes when that many have come:
    whole groups of them. A value's scales are its own, so a value gets its codes as soon as
    `residual` newer ones are there.
    """
    raise NotImplementedError  # your turn
