"""The chapter's figures: weights on grids, formats, methods, quality, and the KV cache."""

from minigen_course.ch35_quantization.figures.cache import (
    cache_channels,
    cache_errors,
    kept_tokens,
    stored_cache,
)
from minigen_course.ch35_quantization.figures.formats import (
    FORMATS,
    block_bits,
    format_strips,
)
from minigen_course.ch35_quantization.figures.methods import (
    column_steps,
    columns_that_matter,
    knapsack_curve,
    packed_words,
    pushed_errors,
    search_curve,
    seen_and_unseen,
    sensitivity_map,
)
from minigen_course.ch35_quantization.figures.quality import (
    Form,
    decode_speeds,
    matrix_errors,
    quality_by_bits,
    quality_by_form,
    size_and_quality,
    trade_offs,
)
from minigen_course.ch35_quantization.figures.weights import (
    natural_outliers,
    number_line,
    outlier_histogram,
)

__all__ = [
    "FORMATS",
    "Form",
    "block_bits",
    "cache_channels",
    "cache_errors",
    "column_steps",
    "columns_that_matter",
    "decode_speeds",
    "format_strips",
    "kept_tokens",
    "knapsack_curve",
    "matrix_errors",
    "natural_outliers",
    "number_line",
    "outlier_histogram",
    "packed_words",
    "pushed_errors",
    "quality_by_bits",
    "quality_by_form",
    "search_curve",
    "seen_and_unseen",
    "sensitivity_map",
    "size_and_quality",
    "stored_cache",
    "trade_offs",
]
