"""Matrix products of tokens with packed weights, for one token or for hundreds.

A task is one or several panels of sixteen output columns. Their weights are read from memory once,
and stay in the cache while all tokens are multiplied with them, one tile of tokens at a time. A
step of one token is bound by the bytes of the weights, a step of hundreds by the dot products.
`PanelLinear` is the same product for the layer-by-layer runner.
"""

from functools import partial
from typing import Any, NamedTuple

from numba import njit

from minigen.kernels.cpu.amx.products import (
    begin_tiles,
    by_tiles,
    end_tiles,
    products_of_block,
    tiles_of_worker,
    unpack,
)
from minigen.kernels.cpu.amx.scratch import BLOCK, PARTS, USE_TILES
from minigen.kernels.cpu.arrays.inputs import GATED
from minigen.kernels.cpu.elementwise import prepare, silu, write_group
from minigen.kernels.cpu.microkernels import (
    AHEAD_FOUR,
    AHEAD_SIX,
    ONLY_FOUR,
    ONLY_ONE,
    ONLY_TWO,
    SIX,
    first_tile,
    product_of_two,
    product_tile,
    takes_two_panels,
    unpack_panel,
    widest_tile,
)
from minigen.kernels.cpu.packed_weights import GROUP, Pairs
from minigen.kernels.cpu.register_tiles import FOUR, ONE, TWO, add_stored, store_tile
from minigen.kernels.cpu.simd import OutsideKernelError, kernel, load, overload, store
from minigen.kernels.cpu.thread_pool import (
    barrier,
    join_step,
    leave_step,
    next_phase,
    take,
    task_size,
)

AHEAD = 16  # tokens whose tiles prefetch the next panel
FEW = 4  # tokens: up to here a panel is unpacked while it is read, once
TWO_PANELS = 2 * len(SIX)  # tokens: from here on `takes_two_panels` counts for codes


class Product(NamedTuple):
    """A task that writes one panel's products to `out` [tokens, width], or adds them to it."""

    panel: int
    out: Any
    width: int
    add: bool


class Gate(NamedTuple):
    """A task of two gate and two up panels, whose result is an input of the next product."""

    pair: int
    hidden: Any
    ffn: int
    products: Any


class Target(NamedTuple):
    """Where a panel's products go: token t's to `out` from `start + t * width` on, or `add`ed.

    The panel's first group is group `own` of the worker's `unpacked`; `ahead` is how many panels
    further the next one is that this worker multiplies with.
    """

    panel: int
    own: int
    ahead: int
    out: Any
    start: int
    width: int
    add: bool


@njit(inline="always")
def _part(target, part, groups):
    """Return the target for the panel that is `part` panels further."""
    return Target(
        *(target.panel + part, target.own + part * groups, target.ahead),
        *(target.out, target.start + part * 16, target.width, target.add),
    )


@njit(inline="always")
def _run_tile(tokens, target, weights, layer, inputs, first, groups, unpacked):
    total = product_tile(
        *(tokens, weights, layer, target.panel, inputs, first, groups, unpacked),
        *(target.own, target.ahead),
    )
    _put_tile(total, target, first)


@njit(inline="always")
def _put_tile(total, target, first):
    at = target.start + first * target.width
    if target.add:
        total = add_stored(total, target.out, at, target.width)
    store_tile(target.out, at, target.width, total)


@partial(kernel, forceinline=True)
def _gate_products(task, products, first, num_tokens):
    """Write SiLU(gate) x up of tokens, whose products are rows of two gate and two up panels."""
    for token in range(num_tokens):
        for half in range(0, 32, 16):
            at = token * 64 + half
            store(products, at, silu(load(products, at)) * load(products, at + 32))
    for token in range(num_tokens):
        low, high = load(products, token * 64), load(products, token * 64 + 16)
        write_group(task.hidden, first + token, task.pair, task.ffn // 32, low, high)


def _finish(task, count, products, first, num_tokens):
    """Use the products of tokens with `count` panels, which are rows of four panels."""
    raise OutsideKernelError


@overload(_finish)
def _finish_task(task, count, products, first, num_tokens):
    return _put_products if task.instance_class is Product else _gate_all


def _put_products(task, count, products, first, num_tokens):
    """Write, or add, the products of tokens with `count` panels to the output."""
    for token in range(num_tokens):
        at = (first + token) * task.width + task.panel * 16
        for part in range(count):
            product = load(products, token * 64 + part * 16)
            if task.add:
                product = product + load(task.out, at + part * 16)
            store(task.out, at + part * 16, product)


def _gate_all(task, count, products, first, num_tokens):
    _gate_products(task, products, first, num_tokens)


def _run_by_tiles(task, weights, layer, panel, count, inputs, num_tokens, groups, tiles):
    """Run a task of `count` panels for all tokens, sixteen at a time."""
    raise OutsideKernelError


@overload(_run_by_tiles)
def _tiles_of_task(task, weights, layer, panel, count, inputs, num_tokens, groups, tiles):
    if not USE_TILES:
        return lambda task, weights, layer, panel, count, inputs, num_tokens, groups, tiles: None

    def run(task, weights, layer, panel, count, inputs, num_tokens, groups, tiles):
        for part in range(count):
            unpack(weights, layer, panel + part, groups, tiles, part)
        for first in range(0, num_tokens, BLOCK):
            size = min(BLOCK, num_tokens - first)
            products_of_block(weights, layer, panel, count, inputs, first, size, groups, tiles)
            _finish(task, count, tiles.products, first, size)

    return run


def _run_task(task, count, weights, layer, inputs, num_tokens, groups, unpacked):
    """Run a task of the fewest panels, `count`, for all tokens, by vector instructions."""
    raise OutsideKernelError


@overload(_run_task)
def _vectors_of_task(task, count, weights, layer, inputs, num_tokens, groups, unpacked):
    if USE_TILES and weights.instance_class is Pairs:  # `by_tiles` is always true
        return lambda task, count, weights, layer, inputs, num_tokens, groups, unpacked: None
    return _panels_of_product if task.instance_class is Product else _panels_of_gate


def _panels_of_product(task, count, weights, layer, inputs, num_tokens, groups, unpacked):
    target = Target(task.panel, 0, count, task.out, task.panel * 16, task.width, task.add)
    if num_tokens <= FEW:
        _few_tokens(target, count, weights, layer, inputs, num_tokens, groups, unpacked)
        return
    for part in range(count):
        unpack_panel(weights, layer, task.panel + part, groups, unpacked, part * groups)
    _run_panels(target, count, weights, layer, inputs, 0, num_tokens, groups, unpacked)


def _panels_of_gate(task, count, weights, layer, inputs, num_tokens, groups, unpacked):
    """Multiply some tokens with one panel after another, so that a panel stays in L1 for them."""
    panel = count * task.pair
    if num_tokens <= FEW:
        target = Target(panel, 0, count, task.products, 0, 64, False)
        _few_tokens(target, count, weights, layer, inputs, num_tokens, groups, unpacked)
        _gate_products(task, task.products, 0, num_tokens)
        return
    for part in range(count):
        unpack_panel(weights, layer, panel + part, groups, unpacked, part * groups)
    for first in range(0, num_tokens, GATED):
        end = min(num_tokens, first + GATED)
        target = Target(panel, 0, count, task.products, -first * 64, 64, False)
        _run_panels(target, count, weights, layer, inputs, first, end, groups, unpacked)
        _gate_products(task, task.products, first, end - first)


def _few_tokens(target, count, weights, layer, inputs, num_tokens, groups, unpacked):
    """Multiply up to `FEW` tokens with `count` panels from `target` on."""
    raise OutsideKernelError


@overload(_few_tokens)
def _tile_of_few(target, count, weights, layer, inputs, num_tokens, groups, unpacked):
    kind = weights.instance_class
    return _few_by_two if kind is Pairs and takes_two_panels(kind) else _few_by_one


def _few_by_one(target, count, weights, layer, inputs, num_tokens, groups, unpacked):
    for part in range(count):
        one = _part(target, part, groups)
        _run_few(one, weights, layer, inputs, num_tokens, groups, unpacked)


def _few_by_two(target, count, weights, layer, inputs, num_tokens, groups, unpacked):
    for part in range(0, count - 1, 2):
        one, other = _part(target, part, groups), _part(target, part + 1, groups)
        if num_tokens == 1:
            _run_two(ONLY_ONE, one, other, weights, layer, inputs, 0, groups, unpacked)
        elif num_tokens == 2:
            _run_two(ONLY_TWO, one, other, weights, layer, inputs, 0, groups, unpacked)
        elif num_tokens == 3:
            _run_two(ONLY_TWO, one, other, weights, layer, inputs, 0, groups, unpacked)
            _run_two(ONLY_ONE, one, other, weights, layer, inputs, 2, groups, unpacked)
        elif num_tokens == FEW:
            _run_two(ONLY_FOUR, one, other, weights, layer, inputs, 0, groups, unpacked)
    if count % 2:
        last = _part(target, count - 1, groups)
        _run_few(last, weights, layer, inputs, num_tokens, groups, unpacked)


def _run_panels(target, count, weights, layer, inputs, first, end, groups, unpacked):
    """Multiply tokens `first` to `end`, more than `FEW`, with `count` panels from `target` on."""
    raise OutsideKernelError


@overload(_run_panels)
def _tiles_of_panels(target, count, weights, layer, inputs, first, end, groups, unpacked):
    return _two_by_two if takes_two_panels(weights.instance_class) else _one_by_one


def _one_by_one(target, count, weights, layer, inputs, first, end, groups, unpacked):
    for part in range(count):
        one = _part(target, part, groups)
        then = _run_first_tiles(one, weights, layer, inputs, first, end, groups, unpacked)
        _run_tiles(one, weights, layer, inputs, then, end, groups, unpacked)


_each_panel = njit(inline="always")(_one_by_one)


def _two_by_two(target, count, weights, layer, inputs, first, end, groups, unpacked):
    if end < TWO_PANELS:
        _each_panel(target, count, weights, layer, inputs, first, end, groups, unpacked)
        return
    for part in range(0, count, 2):
        one, other, then = _part(target, part, groups), _part(target, part + 1, groups), first
        if part + 1 < count:
            while then + len(AHEAD_SIX) <= min(end, AHEAD + 2):
                _run_two(AHEAD_SIX, one, other, weights, layer, inputs, then, groups, unpacked)
                then += len(AHEAD_SIX)
            while then + len(SIX) <= end:
                _run_two(SIX, one, other, weights, layer, inputs, then, groups, unpacked)
                then += len(SIX)
            _run_tiles(other, weights, layer, inputs, then, end, groups, unpacked)
        _run_tiles(one, weights, layer, inputs, then, end, groups, unpacked)


@njit(inline="always")
def _run_two(tokens, one, other, weights, layer, inputs, first, groups, unpacked):
    both = product_of_two(
        *(tokens, weights, layer, one.panel, inputs, first, groups, unpacked),
        *(one.own, one.ahead),
    )
    _put_tile(both[0], one, first)
    _put_tile(both[1], other, first)


@partial(kernel, forceinline=True)
def _run_few(target, weights, layer, inputs, num_tokens, groups, unpacked):
    """Multiply up to four tokens with a panel, which is unpacked on the way.

    It is apart from `_run_tiles` because one token took 4 % longer where both were one function.
    """
    if num_tokens == 1:
        _run_tile(ONLY_ONE, target, weights, layer, inputs, 0, groups, unpacked)
    elif num_tokens == 2:
        _run_tile(ONLY_TWO, target, weights, layer, inputs, 0, groups, unpacked)
    elif num_tokens == 3:
        _run_tile(ONLY_TWO, target, weights, layer, inputs, 0, groups, unpacked)
        _run_tile(ONLY_ONE, target, weights, layer, inputs, 2, groups, unpacked)
    elif num_tokens == FEW:
        _run_tile(ONLY_FOUR, target, weights, layer, inputs, 0, groups, unpacked)


@partial(kernel, forceinline=True)
def _run_first_tiles(target, weights, layer, inputs, first, end, groups, unpacked):
    """Multiply the first tokens of all with a panel, and prefetch the next one; return the next."""
    ahead = first_tile(weights)
    if end < len(ahead):  # five to seven tokens of bfloat16
        _run_tile(AHEAD_FOUR, target, weights, layer, inputs, first, groups, unpacked)
        first += 4
    while first + len(ahead) <= min(end, AHEAD):
        _run_tile(ahead, target, weights, layer, inputs, first, groups, unpacked)
        first += len(ahead)
    return first


@partial(kernel, forceinline=True)
def _run_tiles(target, weights, layer, inputs, first, end, groups, unpacked):
    """Multiply tokens with a panel: the widest tiles first, then tiles of four, two and one."""
    widest = widest_tile(weights)
    while first + len(widest) <= end:
        _run_tile(widest, target, weights, layer, inputs, first, groups, unpacked)
        first += len(widest)
    if first + 4 <= end:
        _run_tile(FOUR, target, weights, layer, inputs, first, groups, unpacked)
        first += 4
    if first + 2 <= end:
        _run_tile(TWO, target, weights, layer, inputs, first, groups, unpacked)
        first += 2
    if first < end:
        _run_tile(ONE, target, weights, layer, inputs, first, groups, unpacked)


def panels_together(weights: Any, num_tokens: int) -> int:
    """Return how many panels a product's tokens are multiplied with at once."""
    raise OutsideKernelError


@overload(panels_together)
def _panels_together(weights, num_tokens):
    kind = weights.instance_class
    if not takes_two_panels(kind):
        return lambda weights, num_tokens: 1
    if kind is Pairs:
        return lambda weights, num_tokens: 2
    return lambda weights, num_tokens: 2 if num_tokens >= TWO_PANELS else 1


@kernel
def multiply(pool, weights, layer, inputs, num_tokens, groups, out, width, add, scratch):
    """Compute out[tokens, width] = inputs x weights[layer]^T; if `add`, add it to `out`."""
    unpacked, tiles = scratch.unpacked[pool.worker], tiles_of_worker(scratch.tiles, pool.worker)
    begin_tiles(weights, num_tokens)
    num_panels = width // 16
    size, together = task_size(pool, num_panels), panels_together(weights, num_tokens)
    if by_tiles(weights, num_tokens):
        size = min(size, PARTS)
    elif together > 1:
        size = max(together, size // together * together)
    num_tasks = -(-num_panels // size)
    next_phase(pool)
    taken = take(pool, num_tasks)
    while taken < num_tasks:
        first, end = taken * size, min(num_panels, taken * size + size)
        if by_tiles(weights, num_tokens):
            task = Product(first, out, width, add)
            _run_by_tiles(
                task, weights, layer, first, end - first, inputs, num_tokens, groups, tiles
            )
        else:
            for panel in range(first, end, together):
                task, count = Product(panel, out, width, add), min(together, end - panel)
                _run_task(task, count, weights, layer, inputs, num_tokens, groups, unpacked)
        taken = take(pool, num_tasks)
    end_tiles(weights, num_tokens)
    barrier(pool, num_tasks)


@kernel
def multiply_and_gate(pool, weights, layer, inputs, num_tokens, groups, ffn, hidden, scratch):
    """Compute hidden[tokens, ffn] = SiLU(inputs x gate^T) x (inputs x up^T), as product inputs.

    The weights alternate: two panels of gate's rows, two of up's, and so on.
    """
    unpacked, tiles = scratch.unpacked[pool.worker], tiles_of_worker(scratch.tiles, pool.worker)
    products = scratch.products[pool.worker]
    begin_tiles(weights, num_tokens)
    num_pairs = ffn // 32
    size = task_size(pool, num_pairs)
    num_tasks = -(-num_pairs // size)
    next_phase(pool)
    taken = take(pool, num_tasks)
    while taken < num_tasks:
        for pair in range(taken * size, min(num_pairs, taken * size + size)):
            task = Gate(pair, hidden, ffn, products)
            if by_tiles(weights, num_tokens):
                _run_by_tiles(task, weights, layer, 4 * pair, 4, inputs, num_tokens, groups, tiles)
            else:
                _run_task(task, 4, weights, layer, inputs, num_tokens, groups, unpacked)
        taken = take(pool, num_tasks)
    end_tiles(weights, num_tokens)
    barrier(pool, num_tasks)


def prepare_and_multiply(pool, step, weights, x, inputs, num_tokens, groups, out, width, scratch):
    """Compute out[tokens, width] = x weights^T, outside a whole step."""
    if join_step(pool, step):
        prepare(pool, x, num_tokens, groups * GROUP, inputs)
        multiply(pool, weights, 0, inputs, num_tokens, groups, out, width, False, scratch)
        leave_step(pool)
