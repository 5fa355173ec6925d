"""Two ways to render a scene that autograd follows: gsplat's `rasterization`, and our public operators."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.floors import TILE
from benchmarks.scenes.garden import DEGREE, Scene
from cuda_ext import cull, intersect, project, rasterize, sh_colors
from ns_multigpu.core.types import Hits, Splats

Render = Callable[[list[Tensor]], tuple[Tensor, Tensor]]
"""From means, quats, scales, opacities and harmonics to an image [H W, 3] without background and its alpha [H W]."""
Meet = Callable[[Any], None]
"""Is given what densification counts by, after rendering and before the way back."""


def gsplat_render(scene: Scene, absgrad: bool = False, meet: Meet | None = None) -> Render:
    """Return a renderer by gsplat 1.4.0, packed False, as nerfstudio calls it.

    Harmonics are one tensor [N, 16, 3] or two. `meet` is called with gsplat's `info`.
    """
    from gsplat.rendering import rasterization

    cameras: Any = (scene.viewmats, scene.Ks, scene.width, scene.height)

    def render(leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
        *geometry, harmonics = leaves if len(leaves) == 5 else (*leaves[:4], joined(*leaves[4:]))
        options: Any = {"sh_degree": DEGREE, "packed": False, "absgrad": absgrad}
        image, alpha, info = rasterization(*geometry, harmonics, *cameras, **options)
        if meet is not None:
            meet(info)
        return image.view(-1, 3), alpha.view(-1)

    return render


def gsplat_counts(scene: Scene) -> dict[str, int]:
    """Return the intersections of gsplat's rendering of the scene."""
    from gsplat.rendering import rasterization

    *geometry, dc, rest = scene.activated()
    cameras: Any = (scene.viewmats, scene.Ks, scene.width, scene.height)
    with torch.no_grad():
        info = rasterization(*geometry, joined(dc, rest), *cameras, sh_degree=DEGREE, packed=False)[2]
    return {"visible": int((info["radii"] > 0).sum()), "intersections": len(info["flatten_ids"])}


def operators_render(scene: Scene, absgrad: bool = False, meet: Meet | None = None) -> Render:
    """Return a renderer by the public operators of `cuda_ext`. `meet` is called with `Splats` and needs `absgrad`."""
    cameras: Any = (scene.viewmats, scene.Ks, scene.size)
    patches: Any = (0, 0, 0, *scene.size)

    def render(leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
        means, quats, scales, opacities, dc, rest = leaves
        view_ids, point_ids = cull(means, scales, opacities, *cameras, [0, 0, *scene.size])
        splats = project(means, quats, scales, opacities, *cameras, view_ids, point_ids)
        centers = -(scene.viewmats[:, :3, :3].mT @ scene.viewmats[:, :3, 3:]).squeeze(-1)
        colors = sh_colors(DEGREE, means, centers, dc, rest, view_ids, point_ids)
        means2d, conics, depths, row_opacities, radii = splats
        geometry = [t.detach() for t in (means2d, conics, row_opacities)]
        lists = intersect(*geometry, radii, depths.detach(), view_ids, patches, TILE)
        probe = torch.zeros_like(means2d, requires_grad=torch.is_grad_enabled()) if absgrad else None
        image, alpha, _ = rasterize(means2d, conics, row_opacities, colors, *lists, patches, TILE, probe)
        if meet is not None:
            rows = {"means2d": means2d, "conics": conics, "radii": radii}
            meet(Splats(Hits(view_ids, point_ids), rows, probe, probe_rendered=True))
        return image, alpha

    return render


def joined(dc: Tensor, rest: Tensor) -> Tensor:
    """Join all harmonics into one tensor [N, 16, 3]."""
    return torch.cat([dc[:, None], rest], dim=1)
