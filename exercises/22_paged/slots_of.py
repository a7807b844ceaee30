"""Exercise slots_of of chapter 22 (warm-up, 5 points, about 5 minutes).

Write the slot mapping: for each position of a sequence, return the slot that holds its key and
value. `block_ids` is the sequence's block table.

Check it:     minigen check exercises/22_paged/slots_of.py
With a hint:  minigen check exercises/22_paged/slots_of.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import LLM, SamplingParams

    llm = LLM.load(num_blocks=64)
    with using(22, slots_of=mine):
        print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=12)).text)

Harder: In every decode step the engine calls it for each sequence, with one position. The
exercise `decode_slots` asks for a whole batch of decodes at once.
"""

# exercise: minigen.kv_cache.paged.slots_of
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf


def slots_of(block_ids: SequenceOf[int], positions: Iterable[int], block_size: int) -> list[int]:
    """Return the slots of the tokens at these positions of a sequence.

    `block_ids` is the sequence's block table; its first block holds position 0.

    >>> slots_of([7, 3], range(2, 6), block_size=4)
    [30, 31, 12, 13]
    """
    raise NotImplementedError  # your turn
