"""The chapter's figures: timelines of ranks, rings, and which cut when."""

from minigen_course.ch42_pipeline.figures.cuts import (
    against_published,
    kind_of,
    layout_costs,
    which_cut,
)
from minigen_course.ch42_pipeline.figures.rings import causal_shares, hidden_messages, ring_table
from minigen_course.ch42_pipeline.figures.timelines import (
    bubble_curves,
    groups_and_messages,
    stage_work,
    timelines,
)

__all__ = [
    "against_published",
    "bubble_curves",
    "causal_shares",
    "groups_and_messages",
    "hidden_messages",
    "kind_of",
    "layout_costs",
    "ring_table",
    "stage_work",
    "timelines",
    "which_cut",
]
