"""How many programs fill a chip: attention of a decode step in waves, as a model of its time.

A processor of the chip holds some programs at a time; what does not fit waits for the next wave. A
program loads one tile after another, and waits for each; all together they read no faster than
memory gives. Sources of the idea: Flash-Decoding, Dao et al. 2023; Little 1961.
"""

from dataclasses import dataclass

from minigen.teach.roofline import MACHINES

TILE = 64  # tokens that a program loads at once
TILE_SECONDS = 1e-6  # assumed: for a tile to come, and to be multiplied
LAUNCH_SECONDS = 3e-6  # assumed: to start the second pass
THREADS = 128  # of a program: four warps
MOST_SPLITS = 64


@dataclass(frozen=True)
class Chip:
    """A GPU: its processors, what one of them has for its programs, and bytes a second."""

    name: str
    code: str  # what machine code for it is called
    processors: int
    shared: int  # bytes of on-chip memory of a processor
    bandwidth: float
    registers: int = 65_536  # of a processor
    threads: int = 2048  # that a processor can hold; 1,536 on cards for graphics

    def resident(self, registers: int, shared: int, threads: int = THREADS) -> int:
        """Programs that fit onto one processor, each of so many registers a thread and bytes.

        Registers are dealt out by eight, and 1 KiB of each program's memory is the system's. At
        least 1.

        >>> CHIPS["H100 SXM"].resident(registers=128, shared=40_000)
        4
        """
        dealt = -(-registers // 8) * 8
        by_registers = self.registers // (dealt * threads)
        return max(min(by_registers, self.shared // (shared + 1024), self.threads // threads), 1)


# Source: NVIDIA's architecture white papers and CUDA's table of compute capabilities.
CHIPS: dict[str, Chip] = {
    each.name: each
    for each in (
        Chip("H100 SXM", "sm_90", 132, 228 * 1024, MACHINES["H100 SXM"].bandwidth),
        Chip("H200", "sm_90", 132, 228 * 1024, MACHINES["H200"].bandwidth),
        Chip("A100 SXM 80 GB", "sm_80", 108, 164 * 1024, MACHINES["A100 SXM 80 GB"].bandwidth),
        Chip("RTX 4090", "sm_89", 128, 100 * 1024, MACHINES["RTX 4090"].bandwidth, threads=1536),
        Chip("L4", "sm_89", 58, 100 * 1024, MACHINES["L4"].bandwidth, threads=1536),
    )
}


@dataclass(frozen=True)
class Decoding:
    """One layer's attention in a decode step: `batch` sequences of `context` tokens, 16 bits."""

    batch: int
    context: int
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128

    @property
    def kv_bytes(self) -> int:
        """Keys and values, which must be read in any case."""
        return 4 * self.batch * self.context * self.kv_heads * self.head_dim

    def part_bytes(self, splits: int) -> int:
        """What splits leave in float32: written by the first pass, read by the second."""
        rows = self.batch * self.kv_heads * self.group
        return 0 if splits == 1 else 2 * 4 * rows * splits * (self.head_dim + 2)

    def num_programs(self, splits: int) -> int:
        """One for each sequence, KV head and split."""
        return self.batch * self.kv_heads * splits

    def tiles(self, splits: int) -> int:
        """Tiles that a program loads, one after another."""
        tiles = -(-self.context // TILE)
        return -(-tiles // splits)


@dataclass(frozen=True)
class Wave:
    """Programs that run at the same time, from `begin` to `end` in seconds."""

    num_programs: int
    begin: float
    end: float


def waves(work: Decoding, chip: Chip, splits: int, resident: int) -> list[Wave]:
    """The first pass: as many programs at a time as fit, in order."""
    left, now, found = work.num_programs(splits), 0.0, []
    bytes_each = work.kv_bytes / left
    while left:
        running = min(left, chip.processors * resident)
        alone = work.tiles(splits) * TILE_SECONDS
        took = max(alone, running * bytes_each / chip.bandwidth)
        found.append(Wave(running, now, now + took))
        left, now = left - running, now + took
    return found


def seconds(work: Decoding, chip: Chip, splits: int, resident: int) -> float:
    """Both passes; the second is there only where the context is split."""
    first = waves(work, chip, splits, resident)[-1].end
    if splits == 1:
        return first
    return first + LAUNCH_SECONDS + work.part_bytes(splits) / chip.bandwidth


def split_choices(work: Decoding) -> list[int]:
    """Powers of two, of which each leaves every split a tile or more."""
    choices = (1 << exponent for exponent in range(MOST_SPLITS.bit_length()))
    return [splits for splits in choices if splits <= max(work.tiles(1), 1)]


def best_splits(work: Decoding, chip: Chip, resident: int) -> int:
    """The number of splits that the model finds fastest, the least of equals."""
    return min(split_choices(work), key=lambda splits: seconds(work, chip, splits, resident))
