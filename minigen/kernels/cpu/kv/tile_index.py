"""Where the tiles of a block, or of a context, begin in the memory of a packed KV cache."""

from numba import njit

from minigen.kernels.cpu.kv.layout import TILE


@njit(inline="always")
def tile_at(shape, layer, half, block, head, tile):
    """Return the first word of a tile of a block's keys (half 0) or values (half 1)."""
    per_block = shape.block_size // TILE
    of_block = ((block * shape.layers + layer) * 2 + half) * shape.kv_heads + head
    return (of_block * per_block + tile) * shape.tile_words


@njit(inline="always")
def tile_start(shape, layer, half, table, head, tile):
    """Return the first word of tile `tile` of the context with the block table `table`."""
    if shape.block_size == TILE:  # divisions would take a thirtieth of attention's time
        return tile_at(shape, layer, half, table[tile], head, 0)
    per_block = shape.block_size // TILE
    return tile_at(shape, layer, half, table[tile // per_block], head, tile % per_block)
