"""Figures of chapter 31 show the given loads and stores."""

from minigen_course.ch31_triton.figures import (
    draw_programs,
    fused_bytes,
    lanes_in_use,
    launch_gaps,
    machine_map,
    occupancy_map,
    sector_map,
    threads_of_block,
)
from minigen_course.ch31_triton.lesson import A100, num_sectors, programs_that_fit
from minigen_course.figures.style import AMBER, BLUE, CYCLE, FAINT
from minigen_course.lab.memory_watch import Operator
from minigen_course.lab.triton_interpreter import Access, bytes_moved, bytes_required

SHAPES = {"x": (3, 8), "out": (3, 8)}


def rows_of_programs() -> list[Access]:
    found = []
    for row in range(3):
        own = tuple(range(8 * row, 8 * row + 8))
        found += [Access((row, 0, 0), False, "x", own, 2), Access((row, 0, 0), False, "x", own, 2)]
        found.append(Access((row, 0, 0), True, "out", own, 2))
    return found


def colour_at(figure, place: int, row: int, column: int) -> str:
    (image,) = figure.axes[place].images
    return "#" + "".join(f"{round(255 * part):02x}" for part in image.get_array()[row, column])


def test_elements_loaded_twice_are_counted_twice_and_required_once() -> None:
    assert bytes_moved(rows_of_programs()) == 3 * 24 * 2
    assert bytes_required(rows_of_programs()) == 2 * 24 * 2


def test_each_element_has_the_colour_of_its_program_and_the_count_of_its_loads() -> None:
    made = draw_programs(rows_of_programs(), SHAPES)
    assert [colour_at(made, 0, row, 3) for row in range(3)] == list(CYCLE[:3])
    assert [text.get_text() for text in made.axes[0].texts] == ["2"] * 24
    assert not made.axes[1].texts
    assert "x: loaded, 96 bytes" in made.axes[0].get_title(loc="left")


def test_no_two_programs_have_the_same_colour() -> None:
    accesses = [Access((row, 0, 0), True, "out", (row,), 2) for row in range(16)]
    made = draw_programs(accesses, {"out": (16, 1)})
    assert len({colour_at(made, 0, row, 0) for row in range(16)}) == 16


def test_if_one_program_is_chosen_the_others_are_pale() -> None:
    made = draw_programs(rows_of_programs(), SHAPES, program=(1, 0, 0))
    assert colour_at(made, 1, 1, 0) == CYCLE[1]
    assert colour_at(made, 1, 0, 0) == FAINT


def test_untouched_elements_stay_white() -> None:
    made = draw_programs([Access((0, 0, 0), True, "out", (0,), 2)], SHAPES)
    assert colour_at(made, 0, 0, 0) == "#ffffff"
    assert "not touched" in made.axes[0].get_title(loc="left")


def test_operators_lie_in_a_row_and_their_kernel_below() -> None:
    apart = {"norm": [Operator("add", 2000, 1000), Operator("mul", 500, 500)]}
    made = fused_bytes(apart, {"norm": 1500})
    bars = [(bar.get_x(), bar.get_width()) for bar in made.axes[0].patches]
    assert bars == [(0, 3), (3, 1), (0, 1.5)]
    assert [text.get_text() for text in made.axes[0].texts] == ["2 operators", "1 kernel"]


def test_lanes_that_no_number_uses_are_pale() -> None:
    made = lanes_in_use(576, (64, 1024))
    widths = [bar.get_width() for bar in made.axes[0].patches]
    assert widths == [576, 0, 576, 448]
    assert "1 x 1,024, 56% in use" in made.axes[0].texts[1].get_text()


def test_each_memory_of_the_machine_is_smaller_or_faster_than_the_one_below() -> None:
    speeds = [level.bandwidth for level in A100]
    assert speeds == sorted(speeds)
    texts = " ".join(text.get_text() for text in machine_map().axes[0].texts)
    for wanted in ("HBM: 80 GB", "L2 cache: 40 MB", "up to 164 KB", "registers: 256 KB"):
        assert wanted in texts
    for level in A100:
        assert f"{level.gigabytes_a_second:,} GB/s" in texts


def strided(stride: int, itemsize: int = 4, lanes: int = 32) -> Access:
    return Access((0, 0, 0), False, "x", tuple(range(0, lanes * stride, stride)), itemsize)


def test_sectors_follow_the_stride_until_each_number_has_its_own() -> None:
    assert [num_sectors([strided(each)]) for each in (1, 2, 3, 8, 32)] == [4, 8, 12, 32, 32]
    assert num_sectors([strided(1, itemsize=2)]) == 2
    assert num_sectors([strided(1), strided(1)]) == 8, "each access counts on its own"


def test_wanted_numbers_and_those_that_come_with_them_differ_in_colour() -> None:
    made = sector_map(strided(4, lanes=4))
    assert [colour_at(made, 0, 0, column) for column in (0, 1, 4, 15)] == [
        BLUE.lower(),
        AMBER.lower(),
        BLUE.lower(),
        AMBER.lower(),
    ]
    assert colour_at(made, 0, 0, 16) not in (BLUE, AMBER)
    assert made.axes[0].get_title(loc="left").startswith("2 sectors, 64 bytes fetched, 25.0%")


def test_what_a_program_takes_limits_how_many_fit() -> None:
    assert programs_that_fit(8, 54, 32).num_programs == 4  # 14,336 registers each
    assert programs_that_fit(8, 54, 32).occupancy == 0.5
    assert programs_that_fit(1, 16, 0).limit == "places for programs"
    assert programs_that_fit(4, 16, 80_000).num_programs == 2
    assert programs_that_fit(4, 16, 80_000).limit == "shared memory"
    assert programs_that_fit(1, 16, 7_296).num_programs == 20  # 8,320 with the system's
    assert programs_that_fit(1, 16, 7_297).num_programs == 19  # 8,448, though 8,321 fit 20 times


def test_a_warp_takes_its_registers_from_one_part_of_the_sm() -> None:
    assert programs_that_fit(1, 216, 0).num_programs == 8  # 65,536 / (32 * 216) is 9.5
    assert programs_that_fit(2, 200, 0).num_programs == 4  # 65,536 / (64 * 200) is 5.1


def test_the_registers_of_an_sm_are_parted_among_its_programs() -> None:
    made = occupancy_map({"narrow": (8, 54, 0), "wide": (8, 255, 0)})
    widths = [bar.get_width() for bar in made.axes[0].patches]
    assert widths == [64, 14, 14, 14, 14, 64, 64]
    assert "1 to 4 programs" in made.axes[0].get_title(loc="left")


def test_each_thread_of_a_block_has_its_lanes() -> None:
    made = threads_of_block(1024, 4)
    texts = [text.get_text() for text in made.axes[0].texts]
    assert "warp 3\n768 to 1,023" in texts
    assert sum(text.startswith("lane ") for text in texts) == 8
    assert "8 lanes for each thread" in made.axes[0].get_title(loc="left")


def test_a_graph_closes_the_gaps_between_short_kernels() -> None:
    apart, together = launch_gaps(8, 2, num_kernels=10).axes
    assert apart.get_title(loc="left").startswith(
        "launched one by one: 82 µs, the GPU idles for 76%"
    )
    assert together.get_title(loc="left").startswith("launched as one graph: 34 µs")


def test_a_graph_gains_no_more_than_launches_once_kernels_hide_them() -> None:
    apart, together = launch_gaps(8, 20, num_kernels=10).axes
    assert "217 µs, the GPU idles for 8%" in apart.get_title(loc="left")  # 8 + 10 * 20 + 9 * 1
    assert "214 µs, the GPU idles for 7%" in together.get_title(loc="left")  # 5 + 10 * 20 + 9 * 1
