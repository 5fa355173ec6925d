"""Rows of a rank's own, which are put where they are drawn from without a buffer, on the CPU."""

import pytest
import torch

from cuda_ext.ops.exchange.row_layout import GAUSSIAN_ROWS
from cuda_ext.ops.exchange.row_wire import LOCAL, keep_rows, pack_gradients, pack_wire, row_words, unpack_wire
from tests.cuda_ext.exchange.test_row_exchange import OPS, bands, make_rows, numbers
from tests.cuda_ext.exchange.test_row_wire import Sent, gradients, send, splats, uneven


def check_kept(sent: Sent, half: bool, slots: bool) -> None:
    """Local rows, and rows beyond the capacity, are where the buffer would have put them, bit for bit. The buffer
    has no capacity for local rows."""
    width = row_words(half=False, slots=slots)
    for rank, (rows, place, wire) in enumerate(zip(sent.rows, sent.places, sent.wires, strict=True)):
        come = sent.incoming[rank]
        starts = [start if source != rank else LOCAL for source, start in enumerate(come.starts)]
        wire = wire.clone()
        come.segment(wire, rank, width).fill_(9)
        where = (wire, starts, come.capacities)
        received = unpack_wire(*where, sent.counts[:, rank].contiguous(), rank, 2, half=half, slots=slots)
        first = sum(come.capacities[:rank])
        keep_rows(rows, place[rank], received, first, come.capacities[rank], slots=slots)
        for name, column in received._asdict().items():
            assert torch.equal(column, getattr(sent.received[rank], name)), name
        untouched = torch.full_like(wire, 5)
        away = torch.where(torch.arange(len(place), device=place.device)[:, None] == rank, place, -1)
        options = {"half": half, "slots": slots}
        pack_wire(rows, away, untouched, starts, come.capacities, rank, **options)
        grads = gradients(len(received.radii), 0).to(wire.device)
        only = torch.where(torch.arange(len(starts), device=wire.device) == rank, sent.counts[:, rank], 0)
        # A segment may stay that is not this rank's own.
        pack_gradients(
            grads, only, untouched, starts, come.capacities, (rank + 1) % len(starts), half=half, returned=range(9)
        )
        assert bool((untouched == 5).all())


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_local_rows_have_the_order_of_exchanged_rows(ranks: int, half: bool, slots: bool) -> None:
    rows = [splats(make_rows(200 + 30 * rank, 20, seed=rank), rank) for rank in range(ranks)]
    pairs = uneven(ranks)
    pairs[0][0] = 11
    sent = send(rows, numbers(bands(ranks, 2), 2), pairs, half, slots)
    assert int(sent.counts[0, 0]) > 11, "some exceed the capacity"
    check_kept(sent, half, slots)


def test_opcheck() -> None:
    rows = splats(make_rows(20, 4))
    place, counts = rows.route(numbers(bands(2, 2), 2), 2)
    capacities, wire = [20, 24], torch.zeros(800, dtype=torch.int32)
    came = (wire, [0, 400], capacities, counts, 0, True, True, 2, GAUSSIAN_ROWS.columns)
    some = ("test_schema", "test_faketensor")
    columns, radii, view_ids, _, ids = OPS.unpack_wire(wire, [LOCAL, 400], *came[2:])
    kept = (*rows.packed(), place[0], columns, radii, view_ids, ids, 0, 20, True)
    torch.library.opcheck(OPS.keep_rows.default, kept, test_utils=some)
