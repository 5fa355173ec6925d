"""Tile lists cut to windows of depth."""

import pytest
import torch

from cuda_ext import clip_lists, intersect, intersect_capacity
from tests.cuda_ext.splats import make_splats

pytestmark = pytest.mark.usefixtures("native")


@pytest.mark.parametrize("capacity", [None, 4000, 700])
def test_each_list_keeps_the_entries_in_its_window(capacity: int | None) -> None:
    """The capacity of lists is unlimited, larger than needed, or exceeded."""
    splats = make_splats(300, 60, 40, views=2)
    given = (splats.means2d, splats.conics, splats.row_opacities, splats.radii, splats.depths, splats.view_ids)
    if capacity is None:
        offsets, ids = intersect(*given, splats.patches)
    else:
        offsets, ids, _ = intersect_capacity(*given, splats.patches, 16, capacity)
    g = torch.Generator().manual_seed(1)
    windows = torch.sort(1 + torch.rand(len(offsets) - 1, 2, generator=g), 1).values
    windows[3], windows[5] = torch.tensor([2.0, 1.0]), torch.tensor([-torch.inf, torch.inf])
    found, rows = clip_lists(offsets, ids, splats.depths, windows)
    assert found.dtype == rows.dtype == torch.int32 and len(rows) == len(ids)
    for t, (low, high) in enumerate(windows.tolist()):
        listed = ids[offsets[t] : offsets[t + 1]].tolist()
        wanted = [row for row in listed if low <= float(splats.depths[row]) < high]
        assert rows[found[t] : found[t + 1]].tolist() == wanted
    assert int(found[-1]) < int(offsets[-1]) and bool((rows[found[-1] :] == -1).all())


def test_a_row_on_the_border_is_in_one_window() -> None:
    offsets, ids = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([2, 0, 1], dtype=torch.int32)
    depths = torch.tensor([1.5, 2.0, 1.0])
    before, behind = (clip_lists(offsets, ids, depths, torch.tensor([window]))[1] for window in ([0, 1.5], [1.5, 9.0]))
    assert before.tolist() == [2, -1, -1] and behind.tolist() == [0, 1, -1]
