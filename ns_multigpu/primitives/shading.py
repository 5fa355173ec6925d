"""View-dependent colours of points."""

from collections.abc import Mapping

from torch import Tensor

import cuda_ext
from ns_multigpu.primitives.gather import spread, take


def camera_centers(viewmats: Tensor) -> Tensor:
    """Return camera positions [V, 3] from world-to-camera matrices [V, 4, 4]."""
    return -(viewmats[:, :3, :3].transpose(1, 2) @ viewmats[:, :3, 3:]).squeeze(-1)


def row_colors(
    params: Mapping[str, Tensor], sh_degree: int | None, viewmats: Tensor, view_ids: Tensor, point_ids: Tensor
) -> Tensor:
    """Return the colours [M, 3] of rows.

    Args:
        params: of the points: `means` [N, 3], `features_dc` [N, 3] and `features_rest` [N, R, 3], spherical harmonics.
        sh_degree: harmonics in use; None for plain colours, of which `features_dc` are the logits.
        viewmats: [V, 4, 4]. view_ids, point_ids: [M] int32; padding's point is -1.
    """
    if sh_degree is None:
        plain = params["features_dc"]
        return take(plain, spread(point_ids, len(plain))).sigmoid()
    return cuda_ext.sh_colors(
        sh_degree, params["means"], camera_centers(viewmats), params["features_dc"], params["features_rest"],
        view_ids=view_ids, point_ids=point_ids,
    )  # fmt: skip
