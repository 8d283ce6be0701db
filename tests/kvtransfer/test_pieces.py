"""Cutting and coalescing keep every byte, once, in order; coverage counts each (block, layer) once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import TransferError
from kvtransfer.coverage import Coverage
from kvtransfer.fake import SMALL_LAYOUT
from kvtransfer.layout import BlockLayout
from kvtransfer.pieces import PIECE_BYTES_MAX, Piece, blocks_together, joined, part_of, piece_bytes, runs_of

unhurried = settings(deadline=None, max_examples=50)
LAYERS = SMALL_LAYOUT.num_layers
layer_ranges = st.tuples(st.integers(0, LAYERS - 1), st.integers(1, LAYERS)).map(
    lambda pair: range(min(pair[0], pair[1] - 1), max(pair[0] + 1, pair[1]))
)


@unhurried
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12), layer_ranges)
def test_runs_copy_each_layer_of_each_block_in_order(pairs: list[tuple[int, int]], layers: range) -> None:
    sources, targets = [s for s, _ in pairs], [t for _, t in pairs]
    piece = Piece(2, tuple(sources), layers)

    runs = runs_of(piece, [99, 99, *targets, 99], SMALL_LAYOUT)

    block, layer = SMALL_LAYOUT.block_bytes, SMALL_LAYOUT.layer_bytes
    copied = [(run.source + i, run.target + i) for run in runs for i in range(0, run.num_bytes, layer)]
    assert copied == [(s * block + i * layer, t * block + i * layer) for s, t in pairs for i in layers]
    assert sum(run.num_bytes for run in runs) == len(copied) * layer == piece_bytes(piece, SMALL_LAYOUT)


def test_neighbours_on_both_sides_become_one_run() -> None:
    piece = Piece(0, (4, 5, 6, 9), range(LAYERS))

    runs = runs_of(piece, [1, 2, 3, 4], SMALL_LAYOUT)

    assert [run.num_bytes // SMALL_LAYOUT.block_bytes for run in runs] == [3, 1]


def cut_up(piece: Piece, layout: BlockLayout) -> list[Piece]:
    count = blocks_together(len(piece.layers), layout)
    return [part_of(piece, begin, count) for begin in range(0, len(piece.block_ids), count)]


@unhurried
@given(st.integers(1, 100), st.integers(1, 200))
def test_cutting_keeps_all_blocks_and_bounds_the_bytes(count: int, head_dim: int) -> None:
    layout = SMALL_LAYOUT._replace(head_dim=head_dim * 64)

    parts = cut_up(Piece(3, tuple(range(count)), range(1, 3)), layout)

    assert [block for part in parts for block in part.block_ids] == list(range(count))
    assert [part.first for part in parts] == [3 + part.block_ids[0] for part in parts]
    assert all(piece_bytes(part, layout) <= PIECE_BYTES_MAX or len(part.block_ids) == 1 for part in parts)


def test_neighbouring_layers_of_the_same_blocks_become_one_piece() -> None:
    piece = Piece(2, (7, 9), range(1))

    assert joined(piece, Piece(2, (7, 9), range(1, 3))) == Piece(2, (7, 9), range(3))
    for other in (Piece(2, (7, 9), range(2, 3)), Piece(3, (7, 9), range(1, 3)), Piece(2, (9, 7), range(1, 3))):
        assert joined(piece, other) is None


@unhurried
@given(st.permutations([(block, layer) for block in range(4) for layer in range(1, LAYERS)]))
def test_nothing_is_missing_exactly_when_all_layers_of_all_blocks_came(order: list[tuple[int, int]]) -> None:
    coverage = Coverage(4, range(1, LAYERS))
    for number, (block, layer) in enumerate(order):
        assert (coverage.num_missing == 0) == (number == len(order))
        coverage.add(block, 1, range(layer, layer + 1))
        with pytest.raises(TransferError, match="twice"):
            coverage.add(block, 1, range(layer, layer + 1))

    assert coverage.num_missing == 0


@pytest.mark.parametrize(
    ("first", "count", "layers"),
    [(0, 0, range(3)), (4, 1, range(3)), (3, 2, range(3)), (0, 1, range(4)), (0, 1, range(2, 2)), (0, 1, range(2, 1))],
)
def test_what_lies_outside_a_ticket_is_refused(first: int, count: int, layers: range) -> None:
    coverage = Coverage(4, range(3))

    with pytest.raises(TransferError):
        coverage.add(first, count, layers)
    assert coverage.num_missing == 4
