"""gsplat's `rasterization` by our operators, for nerfstudio's own method.

With this in its place, what still differs from our method is not the kernels' doing. It serves on a CPU too, where
gsplat's kernels do not.

Which Gaussians are seen, and how large, is computed by gsplat's own torch code, since densification counts that. (Its
formula is that of the kernel for rows that are not packed, which nerfstudio asks for; for packed rows it is another.)
"""

import inspect
from typing import Any

import gsplat
import torch
from gsplat.cuda._torch_impl import _fully_fused_projection, _quat_scale_to_covar_preci
from torch import Tensor

import cuda_ext

_GSPLAT = {name: p.default for name, p in inspect.signature(gsplat.rasterization).parameters.items()}
"""gsplat's defaults for arguments that nerfstudio omits."""


def rasterization(
    means: Tensor, quats: Tensor, scales: Tensor, opacities: Tensor, colors: Tensor, viewmats: Tensor, Ks: Tensor,
    width: int, height: int, *, packed: bool, near_plane: float, far_plane: float, render_mode: str,
    sh_degree: int | None, sparse_grad: bool, absgrad: bool, rasterize_mode: str,
) -> tuple[Tensor, Tensor, dict[str, Any]]:  # fmt: skip
    """Render one view by our operators, with the interface of gsplat's function as nerfstudio calls it.

    Args and returns: as gsplat 1.4.0's, of which only what nerfstudio uses is present.

    Args and returns: as gsplat 1.4.0's, of which only what nerfstudio looks at is there.

    Raises:
        NotImplementedError: asked for what nerfstudio does not ask for.
    """
    if packed or sparse_grad or render_mode not in ("RGB", "RGB+ED") or len(viewmats) != 1:
        raise NotImplementedError("one view, not packed, without sparse gradients, as RGB or RGB+ED")
    sizes = [width, height]
    planes: dict[str, Any] = {"near": near_plane, "far": far_plane}
    cameras, eps2d, tile = (viewmats, Ks.to(viewmats.dtype)), _GSPLAT["eps2d"], _GSPLAT["tile_size"]
    view_ids, point_ids = cuda_ext.cull(
        means.detach(), scales.detach(), opacities.detach(), *cameras,
        sizes=sizes, rects=[0, 0, *sizes], eps2d=eps2d, **planes,
    )  # fmt: skip
    means2d, conics, depths, seen_opacities, radii = cuda_ext.project(
        means, quats, scales, opacities, *cameras, sizes, view_ids, point_ids,
        eps2d=eps2d, antialiased=rasterize_mode == "antialiased", **planes,
    )  # fmt: skip
    if sh_degree is None:
        features = colors[point_ids.long()]
    else:
        centers = -(viewmats[:, :3, :3].transpose(1, 2) @ viewmats[:, :3, 3:]).squeeze(-1)
        features = cuda_ext.sh_colors(sh_degree, means, centers, colors[:, 0], colors[:, 1:], view_ids, point_ids)
    if render_mode == "RGB+ED":
        features = torch.cat([features, depths[:, None]], dim=1)

    # Where gsplat keeps gradients for densification: `absgrad` is an attribute that its backward adds to the tensor.
    kept: Any = torch.zeros(1, len(means), 2, dtype=means.dtype, device=means.device, requires_grad=True)
    probe = torch.zeros_like(means2d, requires_grad=True)

    def keep(gradient: Tensor) -> None:
        whole = torch.zeros_like(kept)
        whole[0, point_ids.long()] = gradient
        setattr(kept, "absgrad" if absgrad else "grad", whole)

    probe.register_hook(keep)
    if not absgrad:
        means2d = means2d + probe
    patch = [0, 0, 0, width, height]
    flat = (means2d.detach(), conics.detach(), seen_opacities.detach(), radii, depths.detach(), view_ids)
    lists = cuda_ext.intersect(*flat, patches=patch, tile_size=tile)
    out, alpha, _ = cuda_ext.rasterize(
        means2d, conics, seen_opacities, features, *lists,
        patches=patch, tile_size=tile, absgrad_probe=probe if absgrad else None,
    )  # fmt: skip
    info = {"width": width, "height": height, "n_cameras": 1, "gaussian_ids": None, "means2d": kept}
    with torch.no_grad():
        covars: Any = _quat_scale_to_covar_preci(quats, scales, compute_preci=False)[0]
        seen = _fully_fused_projection(means, covars, *cameras, width, height, eps2d, near_plane, far_plane)
        info["radii"] = seen[0]
    if render_mode == "RGB+ED":  # the depth expected of a pixel: of what covers it
        out = torch.cat([out[:, :3], out[:, 3:] / alpha.reshape(-1, 1).clamp(min=1e-10)], dim=1)
    return out.reshape(1, height, width, -1), alpha.reshape(1, height, width, 1), info
