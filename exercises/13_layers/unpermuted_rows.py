"""Exercise unpermuted_rows of chapter 13 (stretch, 15 points, about 15 minutes).

llama.cpp stores the rows of W_q and W_k so that the two rows of each rotated pair are
neighbours: row 0, row 32, row 1, row 33, ... of a head of 64. Return the order that undoes
this, for a matrix of `num_rows` rows and `heads` heads: element i of the result is the index of
the stored row that is row i of the model. The result is a tensor of int64.

Check it:     minigen check exercises/13_layers/unpermuted_rows.py
With a hint:  minigen check exercises/13_layers/unpermuted_rows.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams
    from minigen_course import load_model

    with using(13, unpermuted_rows=mine):
        llm = load_model(weights="float32")
    print(llm.generate("1, 2, 3, 4, 5, 6,", SamplingParams(temperature=0, max_tokens=20)).text)

Harder: Write the converter's direction as well: from the model's order to llama.cpp's. How can
you test both without a file?
"""

# exercise: minigen.checkpoint.gguf_mapping.unpermuted_rows
from jaxtyping import Int64
from torch import Tensor


def unpermuted_rows(num_rows: int, heads: int) -> Int64[Tensor, " rows"]:
    """Return the stored row for each row 0, 1, 2, ...: within a head first the even, then the odd.

    >>> unpermuted_rows(12, heads=2).tolist()
    [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    """
    raise NotImplementedError  # your turn
