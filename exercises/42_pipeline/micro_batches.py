"""Exercise micro_batches of chapter 42 (core, 10 points, about 15 minutes).

Cut a step into micro-batches. `num_tokens[i]` says how many tokens sequence i computes in the
step: one if it decodes, many if it is a chunk of a prompt. A sequence is not divided. Give the
sequences away from the longest to the shortest (of equal ones, the lower number first), each to
the micro-batch that has the fewest tokens so far (of equal ones, the first). Return the numbers
of each micro-batch's sequences, in ascending order, and leave micro-batches without a sequence
out.

Check it:     minigen check exercises/42_pipeline/micro_batches.py
With a hint:  minigen check exercises/42_pipeline/micro_batches.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    step = [1] * 12 + [40, 25]
    for count in (1, 2, 4):
        batches = mine(step, count)
        print(count, [sum(step[each] for each in batch) for batch in batches], batches)

Harder: The rule is Graham's: the fullest micro-batch has at most 4/3 of the tokens that it
would have in the best division. Find a step for which the rule is not the best. And what would
change if a chunk of a prompt could be divided?
"""

# exercise: minigen_course.ch42_pipeline.reference.micro_batches
from collections.abc import Sequence


def micro_batches(num_tokens: Sequence[int], num_batches: int) -> list[list[int]]:
    """Return which sequences each micro-batch of a step has, as sorted lists of their numbers.

    `num_tokens[i]` is how many tokens sequence i computes in the step; a sequence is not divided.
    The longest sequence goes first (of equal ones, the one with the lower number), and each goes to
    the micro-batch that has the fewest tokens so far (of equal ones, the first). Micro-batches
    without a sequence are left out.
    """
    raise NotImplementedError  # your turn
