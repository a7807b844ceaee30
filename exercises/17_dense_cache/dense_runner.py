"""Exercise DenseRunner of chapter 17 (stretch, 15 points, about 30 minutes).

Write the runner. `logits` runs the model on the new tokens of each sequence (`new_ids`), with
one `DenseCache` per sequence, and returns the logits of each sequence's next token. `release`
frees a sequence's cache. `DenseCache` and `attend_dense` are in
`minigen_course.ch17_dense_cache.reference`.

Check it:     minigen check exercises/17_dense_cache/dense_runner.py
With a hint:  minigen check exercises/17_dense_cache/dense_runner.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen_course import load_model
    from minigen_course.ch17_dense_cache.lesson import continue_dense

    llm = load_model(weights="float32")
    with using(17, DenseRunner=mine):
        token_ids = continue_dense(llm, "The history of the sea begins", 12)
    print(llm.tokenizer.decode(token_ids))

Harder: Two prompts have the same first 100 tokens. Let the second sequence start with a copy of
the first one's cache. What if the whole prompts are equal?
"""

# exercise: minigen_course.ch17_dense_cache.reference.DenseRunner
from collections.abc import Sequence as SequenceOf

import torch
from jaxtyping import Float
from torch import Tensor

from minigen.model.transformer import Transformer
from minigen.sequence import Sequence


class DenseRunner:
    """Runs the model on each sequence's new tokens: the whole prompt, then one token per step.

    `windows` are the layers' sliding windows.
    """

    def __init__(
        self,
        model: Transformer,
        kv_heads: int,
        windows: SequenceOf[int | None],
        dtype: torch.dtype = torch.float32,
    ):
        raise NotImplementedError  # your turn

    @torch.inference_mode()
    def logits(self, sequences: SequenceOf[Sequence]) -> Float[Tensor, "sequences vocab"]:
        """Return the raw logits of each sequence's next token."""
        raise NotImplementedError  # your turn

    def release(self, sequence: Sequence) -> None:
        """Free a sequence's keys and values."""
        raise NotImplementedError  # your turn
