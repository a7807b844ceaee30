# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises of chapter 41
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/exercises/41_tensor_parallel.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=exercises/41_tensor_parallel.ipynb)
#
# The chapter: [One model on several devices](../notebooks/41_tensor_parallel.ipynb). Its exercises take about 125 minutes in all.
#
# | exercise | level | points | time |
# |---|---|--:|--:|
# | `choose_all_reduce` | warm-up | 5 | 10 min |
# | `ring_all_reduce` | core | 10 | 20 min |
# | `fused_rows` | warm-up | 5 | 10 min |
# | `shard_tensors` | core | 10 | 20 min |
# | `run_split_layer` | core | 10 | 20 min |
# | `run_parallel_layer` | stretch | 15 | 20 min |
# | bug hunt: `agreed_blocks` | core | 10 | 25 min |
#
# Replace the line that raises NotImplementedError, and run the cell below it: `check` runs your part in a process of its own and names the first mistake. `hint=1` adds a hint to that, `hint=2` a clearer one.

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
# %load_ext minigen_course
import torch

from minigen_course import check, using


# %% [markdown]
# ## choose_all_reduce
#
# *Warm-up, 5 points, about 10 minutes.*
#
# Say how an all-reduce should be done: by a ring or by a tree. Return the pair of a word and seconds: `("ring", t_ring)` or `("tree", t_tree)`, whichever is faster by the chapter's formulas for a ring and a tree. If both take equally long, return the ring. A single rank sends nothing, so its ring takes 0 seconds.

# %%
# exercise: minigen_course.ch41_tensor_parallel.lesson.choose_all_reduce
def choose_all_reduce(
    num_bytes: float, num_ranks: int, latency: float, bandwidth: float
) -> tuple[str, float]:
    """Return "ring" or "tree", whichever takes fewer seconds, and these seconds.

    If both take equally long, it is a ring. The latency is in seconds per turn, the bandwidth in
    bytes per second.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(41, choose_all_reduce=choose_all_reduce)

# %% [markdown]
# Try it:

# %%
from minigen_course.ch41_tensor_parallel.lesson import LINKS

for name, link in LINKS.items():
    print(name, mine(16_384, 8, link.latency, link.bandwidth))

# %% [markdown]
# **Harder.** Set the two formulas equal, and solve for the bytes. From which message size on is the ring faster on 8 ranks over NVLink 4 (between NVIDIA's GPUs), with 2 µs and 450 GB/s? How many tokens of Llama-3-70B's 8,192 numbers in bfloat16 is that?

# %% [markdown]
# ## ring_all_reduce
#
# *Core, 10 points, about 20 minutes.*
#
# Write the all-reduce of a ring. Each rank may talk to its neighbours only: `pass_on(piece)` sends a piece to the next rank (after the last one comes rank 0), and returns the piece that the rank before has sent at the same time. Return the sum of all ranks' x. Use 2 (n - 1) calls of `pass_on`, and pass on an n-th of the numbers in each. x has one axis and a multiple of n numbers, and must stay as it is.

# %%
# exercise: minigen_course.ch41_tensor_parallel.lesson.ring_all_reduce
from jaxtyping import Float
from torch import Tensor

from minigen_course.ch41_tensor_parallel.lesson import PassOn


def ring_all_reduce(
    x: Float[Tensor, " numbers"], rank: int, num_ranks: int, pass_on: PassOn
) -> Float[Tensor, " numbers"]:
    """Return the sum of all ranks' x, by messages to the next rank in a ring only.

    `pass_on(piece)` sends a piece to the next rank, and returns the piece that came from the rank
    before. All ranks call it 2 (n - 1) times, with an n-th of the numbers each time; x has a
    multiple of n numbers, and stays as it is.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(41, ring_all_reduce=ring_all_reduce)

# %% [markdown]
# Try it:

# %%
from minigen import hub
from minigen.checkpoint.checkpoint import open_checkpoint
from minigen_course.ch41_tensor_parallel.lesson import continue_split

checkpoint = open_checkpoint(hub.resolve(hub.DEFAULT_MODEL))
tokenizer = checkpoint.tokenizer()
made = continue_split(checkpoint, 3, tokenizer.encode("The sea is"), 8, ring=mine)
print(tokenizer.decode(made))

# %% [markdown]
# **Harder.** The ranks add the pieces in different orders: which ranks' numbers come first in piece 0, and which in piece 1? Do all ranks still end with the same bits?

# %% [markdown]
# ## fused_rows
#
# *Warm-up, 5 points, about 10 minutes.*
#
# Some checkpoints store several matrices as one tensor, for example gate and up, or Q, K and V. The tensor has the rows of the first matrix, then those of the second, and so on; `parts` has the number of rows of each. Return the stored rows that a rank needs for a column split of each matrix: a list of one range for each matrix. Each number of rows can be divided by the number of ranks.

# %%
# exercise: minigen_course.ch41_tensor_parallel.lesson.fused_rows
from collections.abc import Sequence as SequenceOf


def fused_rows(parts: SequenceOf[int], rank: int, num_ranks: int) -> list[range]:
    """Return the stored rows that a rank needs of several matrices that lie in one tensor.

    The tensor has the rows of all matrices one after another, `parts` says how many rows each
    matrix has, and each is cut evenly, by columns in the sense of y = x W. There is one range for
    each matrix.

    >>> fused_rows([4, 4], rank=1, num_ranks=2)
    [range(2, 4), range(6, 8)]
    """
    raise NotImplementedError  # your turn


# %%
mine = check(41, fused_rows=fused_rows)

# %% [markdown]
# Try it:

# %%
import torch

gate_up = torch.arange(12).repeat_interleave(2).view(12, 2)  # gate has rows 0 to 5, up 6 to 11
print(torch.cat([gate_up[rows.start : rows.stop] for rows in mine([6, 6], 1, 3)]))

# %% [markdown]
# **Harder.** Cut gate and up, as one tensor of 2 x 1,536 rows, in two halves like any other matrix. What does rank 0 have, what does rank 1 have, and what does `swiglu` then multiply?

# %% [markdown]
# ## shard_tensors
#
# *Core, 10 points, about 20 minutes.*
#
# Shard a checkpoint: return the rank's part of every tensor, by name. `PLAN`, `Split`, `module_of` and `span` of `minigen.parallel.sharding` say how each module is split, and where. The methods `rows` and `columns` of a `StoredTensor` cut it without reading it. Names are those of Hugging Face checkpoints, such as `model.layers.3.mlp.down_proj.weight`, whatever the file's format is. Some modules also have a bias, a tensor with one axis, such as `model.layers.3.self_attn.q_proj.bias`: over all ranks, it must be added exactly once to every output.

# %%
# exercise: minigen.parallel.sharding.shard_tensors
from collections.abc import Mapping

from minigen.checkpoint.model_config import ModelConfig
from minigen.checkpoint.safetensors import StoredTensor


def shard_tensors(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, rank: int, num_ranks: int
) -> dict[str, StoredTensor]:
    """Return the rank's shard of every tensor, still in the file; only these bytes are read.

    The bias of a row split is added once, so only rank 0 has it.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(41, shard_tensors=shard_tensors)

# %% [markdown]
# In the running engine:

# %%
from minigen import LLM, SamplingParams

with using(41, shard_tensors=mine):  # in rank 0; the other ranks are other processes
    llm = LLM.load(weights="float32", tensor_parallel_size=3)
print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=12)).text)
llm.close()

# %% [markdown]
# **Harder.** Weights of 4 bits share a scale among 32 inputs of one row. For which numbers of ranks can a matrix with 1,536 inputs be cut by rows so that no such group is cut? And one with 11,008 inputs?

# %% [markdown]
# ## run_split_layer
#
# *Core, 10 points, about 20 minutes.*
#
# Write a layer as one rank runs it. `layer` has this rank's heads and its slice of the ffn; x and the norms are the same on all ranks, and so must be your result. `comm.all_reduce(y)` returns the sum of all ranks' y. `rms_norm` and `swiglu` are in `minigen.model.layers`, `project_qkv` in `minigen.model.transformer`.

# %%
# exercise: minigen_course.ch41_tensor_parallel.lesson.run_split_layer
from jaxtyping import Float
from torch import Tensor

from minigen.model.transformer import AttendInLayer, Layer, Rotation
from minigen.parallel.comm import Collectives


def run_split_layer(
    layer: Layer,
    x: Float[Tensor, "tokens hidden"],
    rotation: Rotation,
    attend: AttendInLayer,
    head_dim: int,
    norm_eps: float,
    comm: Collectives,
) -> Float[Tensor, "tokens hidden"]:
    """Run a layer on one rank; its `layer` has some of the heads, and a slice of the ffn.

    All ranks have the same x and the norms, and all return the result of the whole layer.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(41, run_split_layer=run_split_layer)

# %% [markdown]
# Try it:

# %%
from minigen import hub
from minigen.checkpoint.checkpoint import open_checkpoint
from minigen_course.ch41_tensor_parallel.lesson import continue_split

checkpoint = open_checkpoint(hub.resolve(hub.DEFAULT_MODEL))
tokenizer = checkpoint.tokenizer()
made = continue_split(checkpoint, 3, tokenizer.encode("The sea is"), 8, run_layer=mine)
print(tokenizer.decode(made))

# %% [markdown]
# **Harder.** Some models run attention and feed-forward in parallel, on the same normalised x, and add both to x. How many messages does such a layer need? The next exercise asks for it.

# %% [markdown]
# ## run_parallel_layer
#
# *Stretch, 15 points, about 20 minutes.*
#
# In some models, such as PaLM and Falcon-7B, the two halves of a layer do not wait for each other: attention and feed-forward both read x after `layer.attention_norm`, and both results are added to x. `layer.ffn_norm` is not used. Write such a layer as one rank runs it, with a single all-reduce.

# %%
# exercise: minigen_course.ch41_tensor_parallel.lesson.run_parallel_layer
from jaxtyping import Float
from torch import Tensor

from minigen.model.transformer import AttendInLayer, Layer, Rotation
from minigen.parallel.comm import Collectives


def run_parallel_layer(
    layer: Layer,
    x: Float[Tensor, "tokens hidden"],
    rotation: Rotation,
    attend: AttendInLayer,
    head_dim: int,
    norm_eps: float,
    comm: Collectives,
) -> Float[Tensor, "tokens hidden"]:
    """Run a layer whose attention and feed-forward both read x after `attention_norm`.

    Both results are added to x. As in `run_split_layer`, `layer` has some of the heads and a slice
    of the ffn, and all ranks return the result of the whole layer, here after one message.
    """
    raise NotImplementedError  # your turn


# %%
mine = check(41, run_parallel_layer=run_parallel_layer)

# %% [markdown]
# Try it:

# %%
from minigen.parallel.comm import SoloComm
from minigen_course.ch41_tensor_parallel import exercises

exercises.one_rank_adds_both_halves_to_x(mine)
exercises.each_rank_sends_one_message_of_the_size_of_x(mine)
print("one rank and two ranks agree, after one message")

# %% [markdown]
# **Harder.** By the cost model of this chapter, how many times as fast would Llama-3-70B decode on 8 H100 over PCIe, if its layers took one message instead of two?

# %% [markdown]
# ## A bug hunt: agreed_blocks
#
# *Core, 10 points, about 25 minutes.*
#
# **The report.** *A model runs on two devices. Each question alone gets the right answer. In the afternoon, when memory is full and requests are preempted, some answers are nonsense, and once a day everything hangs, without an error.* Every rank there schedules for itself, by the same rules, and a preempted request returns as soon as there are enough free blocks. Engines therefore make the ranks agree on the size of the KV cache first: vLLM takes the smallest number of blocks that any of its workers can have, SGLang the smallest free memory of all ranks.
#
# Find the mistake in the part below. Catch it with a test that fails on this part and passes on every correct one. Then mend the part in the same cell.

# %%
# hunt: minigen_course.ch41_tensor_parallel.hunt
import torch

from minigen.parallel.comm import Comm
from minigen_course.ch41_tensor_parallel.lesson import AgreedBlocks


def agreed_blocks(comm: Comm, free_bytes: int, working_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks of every rank's pool: as many as fit on all ranks.

    Each rank calls it with its own free memory, and with the part of it that the rank needs as
    working memory. A block takes the same number of bytes on every rank.
    """
    free = comm.all_gather(torch.tensor([free_bytes]))
    left = int(free.min()) - working_bytes
    return left // block_bytes


def test_agreed_blocks(agreed_blocks: AgreedBlocks) -> None:
    """Assert what holds for every right `agreed_blocks`, and does not hold for the one above.

    `on_ranks(agreed_blocks, [(free, working), ...], block_bytes)` of
    minigen_course.ch41_tensor_parallel.lesson runs one rank per pair, and returns the result of
    each.
    """
    raise NotImplementedError  # your turn


# %%
from minigen_course.grading.hunt import hunt

mine = hunt(41, test=test_agreed_blocks, mended=agreed_blocks)
