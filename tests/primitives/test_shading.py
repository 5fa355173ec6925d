"""The colours of points as cameras see them."""

import math

import torch

from ns_multigpu.primitives.shading import camera_centers, row_colors
from tests.strategies.scene import make_points, make_views


def test_colours_of_rows() -> None:
    points, views = make_points(6, torch.float64).params, make_views(3, torch.float64)
    viewmats = torch.stack([view.viewmat for view in views])
    centers = camera_centers(viewmats)
    torch.testing.assert_close(centers, torch.linalg.inv(viewmats)[:, :3, 3])
    view_ids, point_ids = (torch.tensor(ids).int() for ids in ([0, 1, 2, 2], [5, 0, 3, 4]))
    rows = (viewmats, view_ids, point_ids)
    picked = points["features_dc"][point_ids.long()]
    torch.testing.assert_close(row_colors(points, None, *rows), picked.sigmoid())
    flat = 0.5 + picked / (2 * math.sqrt(math.pi))
    torch.testing.assert_close(row_colors(points, 0, *rows), flat.clamp(min=0))
    # The first harmonics: as a camera sees a point.
    x, y, z = torch.nn.functional.normalize(points["means"][point_ids.long()] - centers[view_ids.long()], dim=1).T
    first = math.sqrt(3 / (4 * math.pi)) * torch.stack([-y, z, -x], dim=1)[..., None]
    expected = flat + (first * points["features_rest"][point_ids.long(), :3]).sum(1)
    torch.testing.assert_close(row_colors(points, 1, *rows), expected.clamp(min=0))
