"""Points that patches show, by label: the native operator counts as the reference does, and both as defined."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ext.ops.project.patch_counts import patch_counts
from cuda_ext.reference import boxes as reference
from ns_multigpu.locality.groups import Groups, cube_around, z_codes
from tests.locality.towns import HEIGHT, WIDTH, cameras, town

SIZE, LABELS, VIEWS = 7, 5, 12


def inputs(points: int = 6000, **changes: Any) -> dict[str, Any]:
    """Groups of a town, seen by cameras from anywhere; views of two sizes, the second with fewer parts along a side."""
    means, viewmats, Ks = town(points)[0], *cameras(VIEWS)
    groups = Groups.along(means, z_codes(means, *cube_around(means)).argsort(), SIZE)
    boxes = torch.cat([(groups.lower + groups.upper) / 2, (groups.upper - groups.lower) / 2], 1).T.contiguous()
    columns = torch.tensor([[0, 32, 48, WIDTH], [0, 16, 32, 32]], dtype=torch.int32).repeat(VIEWS // 2, 1)
    rows = torch.tensor([[0, 16, 48, HEIGHT], [0, 16, 32, 48]], dtype=torch.int32).repeat(VIEWS // 2, 1)
    lenses = torch.stack([Ks[:, 0, 0], Ks[:, 1, 1], Ks[:, 0, 2], Ks[:, 1, 2]], 1)
    lenses[1::2, 2:] = torch.tensor([16.0, 24.0])
    return {
        "points": means[groups.order].T.contiguous(), "size": SIZE, "boxes": boxes,
        "labels": torch.arange(len(groups)) % LABELS, "num_labels": LABELS, "viewmats": viewmats, "lenses": lenses,
        "columns": columns, "rows": rows, "halos": torch.tensor([5, 0] * (VIEWS // 2), dtype=torch.int32),
        "near": 0.5, "far": 90.0, **changes,
    }  # fmt: skip


def difference(a: Tensor, b: Tensor) -> int:
    """Points counted in one and not in the other: on a border they may be, by rounding."""
    return int((a - b).abs().sum())


@pytest.mark.parametrize("points", [1, 6000])
def test_counts_are_the_references(points: int) -> None:
    given = inputs(points)
    counts, expected = patch_counts(**given), reference.patch_counts(**given)
    assert counts.shape == (VIEWS, 9, LABELS) and difference(counts, expected) <= 4
    if points > 1:
        assert all(int((expected[k::2].sum((1, 2)) > 20).sum()) >= 2 for k in (0, 1)), "views of both sizes see some"
        assert not counts[1::2, [2, 5, 8]].any(), "no patch between equal cuts"


def test_a_point_counts_in_each_patch_whose_halo_holds_it() -> None:
    # A camera at the origin that looks along z with a focal length of 1: points at depth 1 lie at their pixels.
    inside = [[5.0, 5], [15.5, 5], [20.5, 5], [21.5, 5], [15.5, 18.5]]
    at = torch.tensor([*inside, [-0.5, 5], [5, 5], [5, 5], [torch.nan, 0]])
    depth = torch.tensor([1.0, 1, 1, 1, 1, 1, 0.4, 3.0, 1])
    points = torch.cat([at * depth[:, None], depth[:, None]], 1)
    groups = Groups.along(points, torch.arange(9), 1)
    boxes = torch.cat([(groups.lower + groups.upper) / 2, (groups.upper - groups.lower) / 2], 1).T.contiguous()
    found = patch_counts(
        points.T.contiguous(), 1, boxes, torch.arange(9), 9, torch.eye(4)[None], torch.tensor([[1.0, 1, 0, 0]]),
        torch.tensor([[0, 16, 32]], dtype=torch.int32), torch.tensor([[0, 16, 32]], dtype=torch.int32),
        torch.tensor([5], dtype=torch.int32), 0.5, 2.0,
    )  # fmt: skip
    shown = [set(column.nonzero()[:, 0].tolist()) for column in found[0].T]
    assert shown == [{0}, {0, 1}, {0, 1}, {1}, {0, 1, 2, 3}, set(), set(), set(), set()]
