"""Bug hunt slots of chapter 22 (core, 10 points, about 20 minutes).

**The report.** *Answers start well and become wrong after a while; how soon depends on the
length of the prompt. In a batch with other requests, even answers that were correct alone
become wrong. Prompts are read correctly, and no error is raised.* MinivLLM computed the slot of
a decode step from the number of tokens in the last block, as `next_slots` does here (its issue
76). ONNX Runtime GenAI once wrote every decoded token one slot too far, and read a slot that
was never written (pull request 2354).

Find the mistake in the part below. Catch it with a test that fails on this part and passes on
every correct one. Then mend the part in the same file.

Check both:  minigen check exercises/22_paged/hunt_slots.py
"""

# hunt: minigen_course.ch22_paged.hunt
from minigen_course.lab.toy_engine import SlotsOf


def next_slots(block_ids: list[int], num_computed: int, num_new: int, block_size: int) -> list[int]:
    """Return the slots of a sequence's next `num_new` tokens, after `num_computed` tokens.

    A slot is `block_id * block_size + offset`. `block_ids` has blocks for all of these tokens.
    """
    num_tokens = num_computed + num_new
    if num_new == 1:  # a decode step: the last used slot of the last block
        num_in_last_block = num_tokens % block_size
        last_block = block_ids[(num_tokens - 1) // block_size]
        return [last_block * block_size + num_in_last_block - 1]
    slots = []
    for position in range(num_computed, num_tokens):
        block, offset = divmod(position, block_size)
        slots.append(block_ids[block] * block_size + offset)
    return slots


def test_slots(next_slots: SlotsOf) -> None:
    """Assert what every correct `next_slots` does, and the one above does not."""
    raise NotImplementedError  # your turn
