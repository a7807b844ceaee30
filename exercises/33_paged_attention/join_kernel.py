"""Exercise join_kernel of chapter 33 (core, 10 points, about 15 minutes).

Write the second pass, which joins the splits. Each program has one row, that is, one query head
of one sequence. It loads the partial results of the row's splits, rescales them to one maximum,
adds them up, divides, and stores the row's attention. A split without tokens has the maximum
-inf.

Check it:     minigen check exercises/33_paged_attention/join_kernel.py
With a hint:  minigen check exercises/33_paged_attention/join_kernel.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen import SamplingParams
    from minigen_course import load_model
    from minigen_course.ch33_paged_attention.kernels import joining

    llm = load_model(weights="float32", num_blocks=2, attention_backend=joining(mine))
    print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=4)).text)

Harder: The parts are float32, and each row has SPLITS of them. Let the first pass divide each
part by its sum, and store it in 16 bits. What else must it store, and how does the join change?
"""

# exercise: minigen_course.ch33_paged_attention.kernels.join_kernel
from minigen_course.lab.triton_interpreter import tl


def join_kernel(
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    mixed_ptr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Join the splits of one row: one program per row, that is, per query head of a sequence.

    Split s of row r has the largest score `maxima_ptr`[r, s]; weights are powers of two.
    `sums_ptr`[r, s] is the sum of its weights 2^(score - maximum), and `parts_ptr`[r, s]
    (`HEAD_DIM` elements) the sum of the values times these weights. A split without tokens has the
    maximum -inf, and zeros. The row's attention over all splits is stored to `mixed_ptr`[r].
    `BLOCK_S` and `BLOCK_D` are the next powers of two of `SPLITS` and `HEAD_DIM`. All tensors are
    contiguous. Each element is loaded once.
    """
    raise NotImplementedError  # your turn
