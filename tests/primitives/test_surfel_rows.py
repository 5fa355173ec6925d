"""Rows of 2D Gaussians through other ranks' memory, and gradients back: in two records each, nothing is lost."""

import pytest
import torch
from torch import Tensor

from cuda_ext.ops.row_exchange import add_records
from ns_multigpu.primitives.surfels.rows import (
    SURFEL_FLOATS,
    SurfelGradients,
    SurfelRows,
    collect_surfels,
    gradients_of,
    pack_surfels,
    records_of,
    unpack_surfels,
)
from tests.cuda_ext.test_row_exchange import addresses

REAL, LINES, ROOM = 9, 12, 8
NAMES = ("view_ids", *SurfelGradients._fields, "radii")


def make_rows(device: str) -> SurfelRows:
    g = torch.Generator().manual_seed(4)
    widths = {"means2d": (2,), "transforms": (9,), "normals": (3,), "opacities": (), "features": (3,), "depths": ()}
    floats = {name: torch.randn(LINES, *shape, generator=g) for name, shape in widths.items()}
    view_ids = torch.tensor([0] * 4 + [1] * 8).int()
    radii = torch.randint(1, 9, (LINES, 2), generator=g).int()
    rows = SurfelRows(view_ids, torch.arange(LINES).int(), torch.tensor([REAL]), radii=radii, **floats)
    return SurfelRows(*(part.to(device) for part in rows))


def make_place(device: str) -> Tensor:
    """To rank 0 every other row, to rank 1 all, of which the last has no room."""
    place = torch.full((2, LINES), -1, dtype=torch.int32)
    place[0, 0:REAL:2] = torch.arange(5).int()
    place[1, :REAL] = torch.arange(REAL).int()
    return place.to(device)


def there_and_back(device: str) -> None:
    rows, place = make_rows(device), make_place(device)
    segments = [torch.zeros(1, ROOM, SURFEL_FLOATS, device=device) for _ in range(2)]
    for first, end in ((0, 4), (4, LINES)):
        pack_surfels(rows, place, addresses(segments, 0), ROOM, first, end)
    arrived = unpack_surfels(torch.cat(segments), torch.tensor([5, REAL], device=device), 2)
    for rank, sent in enumerate((range(0, REAL, 2), range(ROOM))):
        lines = slice(rank * ROOM, rank * ROOM + len(sent))
        for name in NAMES:
            assert torch.equal(getattr(arrived, name)[lines], getattr(rows, name)[list(sent)]), name
        assert arrived.slots[lines].tolist() == list(sent) and arrived.owners[lines].tolist() == [rank] * len(sent)
    # Each rank adds what it found of a row to the record there, which the owner adds up.
    found = records_of(SurfelGradients(*(getattr(arrived, name) for name in SurfelGradients._fields)))
    sums = [torch.ones(1, ROOM, SURFEL_FLOATS, device=device) for _ in range(2)]
    slots = torch.arange(ROOM, dtype=torch.int32, device=device).repeat(2)
    add_records(found, addresses(sums, 0), arrived.owners, slots)
    records = collect_surfels(place, rows.count, addresses(sums, 0), ROOM) - 1  # of rank 1
    seen = torch.zeros(LINES, device=device)
    seen[:ROOM] = 1
    once, twice = gradients_of(records), [k for k in range(0, REAL, 2) if k < ROOM]
    for name in SurfelGradients._fields:
        value = getattr(rows, name)
        expected = value * seen.view(-1, *[1] * (value.dim() - 1))
        expected[twice] *= 2
        expected[twice] += 1  # rank 0's
        expected[REAL - 1] = value[REAL - 1]  # of rank 0 alone
        expected[REAL:] -= 1  # padding gets nothing
        torch.testing.assert_close(getattr(once, name), expected, rtol=0, atol=1e-5)


def test_there_and_back_through_memory() -> None:
    there_and_back("cpu")


@pytest.mark.gpu
def test_there_and_back_through_memory_on_a_gpu() -> None:
    there_and_back("cuda")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_records_are_added_where_their_owners_have_them(device: str) -> None:
    sinks = [torch.zeros(5, 8, device=device) for _ in range(2)]
    records = torch.randn(4, 8, device=device)
    records[2], records[3, 1] = 0.0, torch.nan
    owners, slots = torch.tensor([[1, 1, 99, 0], [3, 3, -7, 4]], dtype=torch.int32, device=device)
    add_records(records, addresses([sink[None] for sink in sinks], 0), owners, slots)
    torch.testing.assert_close(sinks[1][3], records[0] + records[1])
    torch.testing.assert_close(sinks[0][4], records[3], equal_nan=True)
    assert not sinks[0][:4].any() and not sinks[1][[0, 1, 2, 4]].any()
    with pytest.raises(TypeError, match="owners"):
        add_records(records, addresses([sinks[0][None]], 0), owners.long(), slots)
    given = (records, addresses([sink[None] for sink in sinks], 0), owners, slots, False)
    torch.library.opcheck(torch.ops.ns_multigpu.add_records.default, given)
