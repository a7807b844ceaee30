"""Exercise merge of chapter 32 (warm-up, 5 points, about 15 minutes).

Write `merge`. It combines the partial results of two sets of keys into one, as if all keys had
been in one set. A part has, for each query, its maximum score (`maximum`), the sum of its
weights (`total`) and its weighted sum of values (`mixed`). A part in which a query saw no key
adds nothing.

Check it:     minigen check exercises/32_flash_attention/merge.py
With a hint:  minigen check exercises/32_flash_attention/merge.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams
    from minigen_course.ch32_flash_attention.flash import flash_attention
    from minigen_course import load_model
    from minigen_course.grading.plug_in import attend_by

    llm = load_model(weights="float32", attention_backend=attend_by(flash_attention))
    with using(32, merge=mine):  # flash_attention calls it once per tile
        print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=24)).text)

Harder: Chapter 33 cuts a long context into parts that are computed in parallel, and merges them
all at once. Write merge for a list of parts, with one exp for each part.
"""

# exercise: minigen_course.ch32_flash_attention.flash.merge
from minigen_course.ch32_flash_attention.flash import Partial


def merge(one: Partial, other: Partial) -> Partial:
    """Combine two partial results over different keys into one; no key may be in both.

    >>> one = Partial(torch.tensor([0.0]), torch.tensor([2.0]), torch.tensor([[4.0]]))
    >>> other = Partial(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([[5.0]]))
    >>> both = merge(one, other)
    >>> (both.mixed / both.total.unsqueeze(-1)).tolist()
    [[3.0]]
    """
    raise NotImplementedError  # your turn
