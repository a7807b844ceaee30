"""The example of the recipe "Add a chapter": the files of a chapter 18 that is not in the course."""

FILES = {
    "notebooks/chapters.toml": """
[[chapter]]
number = "18"
stem = "rounding"
title = "How many blocks a text needs"
card = { problem = "memory", phase = "prefill, decode", resource = "memory capacity", layer = "L3 engine", knob = "`--block-size`", metric = "KV cache use" }
minutes = [5, 5]
modules = ["minigen.kv_cache.block_allocator"]
""",
    "minigen_course/ch18_rounding/exercises.toml": """
[blocks_needed]
solution = "minigen.kv_cache.block_allocator.blocks_needed"
level = "warm-up"
minutes = 5
statement = '''
Return how many blocks of `block_size` tokens hold `num_tokens` tokens.
'''
hints = ['''Divide, and round up.''']
use = '''
print(mine(17, 16))
'''
harder = '''
Which block size wastes least on texts of 100 tokens?
'''
""",
    "minigen_course/ch18_rounding/exercises.py": '''"""Checks of chapter 18: how many blocks a text needs."""

from collections.abc import Callable
from typing import Any

from minigen_course.grading.exercise import expect_equal


def whole_blocks_are_counted(part: Callable[..., Any]) -> None:
    """texts that fill their blocks, and texts that do not:"""
    for num_tokens, block_size, right in ((16, 16, 1), (17, 16, 2), (0, 16, 0), (31, 1, 31)):
        found = part(num_tokens, block_size)
        expect_equal(found, right, f"the blocks of {block_size} tokens for {num_tokens} tokens")


def long_texts_are_exact(part: Callable[..., Any]) -> None:
    """a text so long that a float cannot count its tokens:"""
    expect_equal(part(2**60 + 1, 2), 2**59 + 1, "the blocks of 2 tokens for 2 ** 60 + 1 tokens")


CHECKS = {"blocks_needed": (whole_blocks_are_counted, long_texts_are_exact)}
''',
    "tests/answers/ch18_rounding.py": '''"""Answers to the exercise of chapter 18."""

import math

from tests.answers import Answers

ANSWERS = {
    "blocks_needed": Answers(
        right=(
            lambda num_tokens, block_size: (num_tokens + block_size - 1) // block_size,
            lambda num_tokens, block_size: len(range(0, num_tokens, block_size)),
        ),
        wrong={
            "down": lambda n, size: n // size,
            "nearest": lambda n, size: round(n / size),
            "always one more": lambda n, size: n // size + 1,
            "at least one": lambda n, size: max(1, -(-n // size)),
            "a float": lambda n, size: math.ceil(n / size),
            "tokens": lambda n, size: n,
            "modulo": lambda n, size: n % size,
            "nothing": lambda n, size: None,
        },
        equivalent={},
    )
}
''',
    "notebooks/18_rounding.py": """# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 18 · How many blocks a text needs
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minigen/minigen/blob/main/notebooks/18_rounding.ipynb)
# [![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/minigen/minigen/main?labpath=notebooks/18_rounding.ipynb)
#
# **Time:** about 5 minutes to read and try, about 5 for the [exercises](../exercises/18_rounding.ipynb).
#
# <!-- card -->
# <!-- /card -->

# %%
import importlib.util

if importlib.util.find_spec("minigen") is None:  # on Colab or Binder
    get_ipython().run_line_magic(
        "pip", "install -q 'minigen[notebooks] @ git+https://github.com/minigen/minigen'"
    )

# %%
from minigen_course import Claim, chapter_map, check, holds, reveal, task, verdicts
from minigen_course.figures.explore import explore
from minigen_course.figures.style import figure

# %%
chapter_map("blocks")

# %%
task(18, "blocks_needed")

# %%
# exercise: minigen.kv_cache.block_allocator.blocks_needed

# %%
mine = check(18, blocks_needed=blocks_needed)

# %%
reveal(18, blocks_needed=mine)


# %%
def waste(tokens):
    made, axes = figure(6, 2)
    sizes = (4, 8, 16, 32)
    axes.bar([str(size) for size in sizes], [mine(tokens, size) * size - tokens for size in sizes])
    axes.set(xlabel="block size", ylabel="empty slots")
    return made


explore(waste, "Empty slots of one text, by block size.", "18.1", tokens=(1, 100, 1, 17))

# %%
verdicts(
    "18",
    Claim("Small blocks waste little", f"{mine(17, 1) - 17} slots", holds(True), "one token each"),
)
""",
}
