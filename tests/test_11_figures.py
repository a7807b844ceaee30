"""Figures of chapter 11: pieces of a file, their positions, bytes by field, costs of opening."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from minigen.checkpoint.gguf import read_gguf
from minigen_course.ch11_weights import figures
from minigen_course.ch11_weights.lesson import Opening
from minigen_course.figures.explore import png
from minigen_course.figures.style import INK
from minigen_course.lab.memory_watch import cost_of, forget_pages
from tests.gguf_files import write_gguf


@pytest.fixture
def pieces(tmp_path: Path) -> list[figures.Piece]:
    path = tmp_path / "tiny.gguf"
    tensors = {
        "token_embd.weight": (np.ones((4, 8), np.float32), None),
        "blk.0.attn_norm.weight": (np.ones(8, np.float32), None),
        "blk.0.ffn_up.weight": (np.ones((2, 8), np.float16), None),
    }
    write_gguf(path, "llama", {}, tensors)
    return figures.pieces_of(read_gguf(path))


def test_pieces_lie_in_order_and_know_their_part(pieces: list[figures.Piece]) -> None:
    assert [each.part for each in pieces] == ["header", "embedding", "norms", "feed-forward"]
    assert [each.offset for each in pieces] == sorted(each.offset for each in pieces)
    assert pieces[0].num_bytes == pieces[1].offset


def test_a_byte_leads_to_its_piece_and_no_further(pieces: list[figures.Piece]) -> None:
    for each in pieces:
        assert figures.piece_at(pieces, each.offset) is each
        assert figures.piece_at(pieces, each.offset + each.num_bytes - 1) is each
        assert figures.named(pieces, each.name) is each
    with pytest.raises(ValueError, match="The file has the bytes 0 to"):
        figures.piece_at(pieces, 10**9)
    with pytest.raises(ValueError, match="no tensor 'nonsense'"):
        figures.named(pieces, "nonsense")


@pytest.mark.parametrize("by", ["part", "kind"])
def test_a_map_names_the_framed_piece_and_frames_all_of_it(
    pieces: list[figures.Piece], by: str
) -> None:
    chosen = figures.named(pieces, "token_embd.weight")
    figure = figures.file_map(pieces, chosen, by=by, rows=8)
    (axes,) = figure.axes
    title = axes.get_title(loc="left")
    assert "4 × 8 numbers as F32" in title
    assert "128 bytes, 32 bits per number" in title
    frames = [each for each in axes.patches if not each.get_fill()]
    assert sum(each.get_width() for each in frames) == pytest.approx(chosen.num_bytes / 1e6)
    png(figure)


def test_a_header_is_described_without_a_shape(pieces: list[figures.Piece]) -> None:
    figure = figures.file_map(pieces, pieces[0])
    assert "vocabulary" in figure.axes[0].get_title(loc="left")


def test_bytes_are_shown_one_by_one() -> None:
    figure = figures.byte_grid(b"GGUF\x03$", [("magic", 4), ("rest", 2)], "bytes", letters=True)
    texts = [each.get_text() for each in figure.axes[0].texts]
    assert texts == ["47", "G", "47", "G", "55", "U", "46", "F", "03", "24", r"\$"]
    labels = [each.get_text() for each in figure.axes[0].get_legend().get_texts()]
    assert labels == ["magic", "rest"]
    assert figure.axes[0].patches[0].get_edgecolor() != INK
    with pytest.raises(ValueError, match="take 9 bytes, but there are 2"):
        figures.byte_grid(b"ab", [("nine", 9)], "bytes")


def test_bars_of_costs_are_as_long_as_the_costs() -> None:
    costs = {
        "eager, warm": Opening(0.2, 0.1, 49, 50, 40, None),
        "mapped, warm": Opening(0.0, 0.4, 0, 60, 0, None),
    }
    figure = figures.opening_costs(costs, 2 * 10**8)
    left, right = figure.axes
    assert [round(bar.get_width(), 6) for bar in left.patches] == [200, 0, 100, 400]
    assert [bar.get_width() for bar in right.patches] == [40, 0, 10, 60, 190, 140]
    assert [bar.get_x() for bar in right.patches][-2:] == [50, 60]
    labels = [each.get_text() for each in left.get_yticklabels()]
    assert labels == ["eager, warm\n0.67 GB/s", "mapped, warm\n0.5 GB/s"]


@pytest.mark.parametrize("stage", range(1, 7))
def test_memory_is_drawn_at_each_stage(stage: int) -> None:
    figure = figures.virtual_memory(stage)
    (axes,) = figure.axes
    assert axes.get_title(loc="left").startswith(f"{stage}. ")
    texts = [each.get_text() for each in axes.texts]
    assert ("B" in texts) == (stage >= 4)
    assert ("C" in texts) == (stage >= 5)
    png(figure)


def test_there_is_no_seventh_stage() -> None:
    with pytest.raises(ValueError, match="stages are 1 to 6"):
        figures.virtual_memory(7)


def test_a_numbers_bits_are_drawn_in_every_format() -> None:
    figure = figures.number_bits("0.1", "1")
    (axes,) = figure.axes
    texts = [each.get_text() for each in axes.texts]
    assert sum(text in ("0", "1") for text in texts) == 32 + 16 + 16 + 8 + 8 + 8 + 4
    assert "0.1015625   1.6 % off" in texts
    assert axes.get_title(loc="left") == "0.1: BF16 0.098 % off, FP8 E4M3 1.6 % off, INT4 43 % off"
    png(figure)


@pytest.mark.parametrize(
    ("number", "said"),
    [("70000", "overflow"), ("1e-20", "underflow to zero"), ("-0.5", "exact"), ("inf", None)],
)
def test_what_happens_to_a_number_is_said(number: str, said: str | None) -> None:
    if said is None:
        with pytest.raises(ValueError, match="finite"):
            figures.number_bits(number, "1")
        return
    texts = [each.get_text() for each in figures.number_bits(number, "1").axes[0].texts]
    assert any(text.endswith(said) for text in texts)


def test_what_is_no_number_gets_a_sentence() -> None:
    with pytest.raises(ValueError, match="'ten' is not a number"):
        figures.number_bits("ten", "1")


def test_a_cost_has_time_and_memory(tmp_path: Path) -> None:
    path = tmp_path / "ones"
    path.write_bytes(b"\1" * 2**26)
    forget_pages(path)

    def read() -> mmap.mmap:
        area = mmap.mmap(-1, 2**26)  # new pages; an allocator might have free ones at hand
        with path.open("rb") as file:
            file.readinto(area)
        return area

    data, seconds, megabytes = cost_of(read)
    assert data[-1] == 1
    assert seconds > 0
    assert megabytes > 40


def test_every_piece_describes_itself_on_hovering(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []
    monkeypatch.setattr(figures, "display", lambda data, raw: shown.append(data))
    pieces = [
        figures.Piece("(header)", "header", (), 0, 100),
        figures.Piece("blk.0.attn_q.weight", "Q4_1", (10, 32), 100, 200),
        figures.Piece('a"<b>', "F32", (25,), 300, 100),
    ]
    figures.hover_map(pieces, rows=4)
    html = shown[0]["text/html"]
    assert html.count("10 × 32 numbers as Q4_1") == 2, "it lies in two rows"
    assert "a&quot;&lt;b&gt;: 25 numbers as F32" in html
    assert html.count("display:flex") == 4
