"""Exercise by_panels of chapter 34 (warm-up, 5 points, about 10 minutes).

Pack weights into panels. `rows` is [rows, groups, words], and the number of rows is a multiple
of 16. Sixteen rows make a panel. Within a panel, order the words by group, then by word; the
same word of all sixteen rows is contiguous, one lane per row. Return a flat array. Words have
any dtype, and keep it.

Check it:     minigen check exercises/34_cpu_kernels/by_panels.py
With a hint:  minigen check exercises/34_cpu_kernels/by_panels.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen_course import using
    from minigen import SamplingParams
    from minigen_course import load_model

    with using(34, by_panels=mine):
        llm = load_model(weights="int4")
    print(llm.generate("The old lighthouse", SamplingParams(temperature=0, max_tokens=24)).text)

Harder: A processor with AVX2 has registers of eight 32-bit lanes. Take the number of lanes as
an argument. Which constants of the kernels must change with it?
"""

# exercise: minigen.kernels.cpu.packed_weights.by_panels
import numpy as np


def by_panels(rows: np.ndarray) -> np.ndarray:
    """Pack [rows, groups, words] into panels, a flat array of [panels, groups, words, lanes]."""
    raise NotImplementedError  # your turn
