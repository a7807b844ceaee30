"""Exercise best_count of chapter 36 (core, 10 points, about 15 minutes).

Choose the number of drafts per step. A draft is right with the probability `acceptance` = a if
those before it are, so a step with k drafts gives 1 + a + ... + a^k = (1 - a^(k+1)) / (1 - a)
tokens on average. `step_costs[k]` is the time of a step with k drafts, which has k + 1 rows, as
a multiple of the time of a step without drafts. Return the k from 0 to `len(step_costs) - 1`
with the most tokens per time, and the smallest of several that are equally good. a may be 0 and
1.

Check it:     minigen check exercises/36_speculative/best_count.py
With a hint:  minigen check exercises/36_speculative/best_count.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen import LLM, SamplingParams

    costs = [1.0, 1.2, 1.21, 1.22, 1.26, 1.3, 1.35, 1.39]  # of a step with 0, 1, 2, ... drafts
    for acceptance in (0.1, 0.5, 0.9):
        print(f"acceptance {acceptance}: {mine(acceptance, costs)} drafts")
    most = max(mine(0.8, costs), 1)
    config = {"method": "ngram", "num_speculative_tokens": most, "adaptive": False}
    llm = LLM.load(speculative_config=config)
    text = "Mon, Tue, Wed, Thu, Fri. " * 3 + "Mon,"
    print(llm.generate(text, SamplingParams(temperature=0, max_tokens=24)).text)
    counts = llm.engine.speculator.counts
    print(f"with up to {most} drafts: {counts.accepted} of {counts.drafted} were right")

Harder: In a batch, the rows of all sequences share one step. Given the acceptance of each
sequence and the cost of a step by its number of rows, choose the number of drafts of each, so
that all together get the most tokens per time. Which draft should get the next row?
"""

# exercise: minigen_course.ch36_speculative.reference.best_count
from collections.abc import Sequence


def best_count(acceptance: float, step_costs: Sequence[float]) -> int:
    """Return the number of drafts per step that gives the most tokens per second.

    `step_costs[k]` is the time of a step with k drafts (k + 1 rows), as a multiple of the time
    without drafts. A draft is right with the probability `acceptance` if those before it are, so k
    drafts give 1 + a + a^2 + ... + a^k tokens on average. Of equally good numbers, the smallest.
    """
    raise NotImplementedError  # your turn
