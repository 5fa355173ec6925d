"""Equirectangular pictures, sampled along each ray from six pinhole pictures: the faces of a cube around the camera.

Gaussians are rasterized with pinhole cameras. A pixel at a face's centre covers the same angle as a panorama pixel at
the equator. Faces are slightly wider than the cube's, so that samples at edges are inside.
"""

import math
from collections.abc import Callable

import torch
from nerfstudio.cameras.cameras import Cameras
from torch import Tensor
from torch.nn.functional import grid_sample

from ns_multigpu.plugin.render.pictures import Outputs

_MARGIN = 2
"""Margin of pixels around a face."""
_AT_ONCE = 1 << 22
"""Pixels of the panorama per sampling batch."""
_FACES = tuple((axis, sign) for axis in range(3) for sign in (1.0, -1.0))


def faces(camera: Cameras) -> list[Cameras]:
    """Return the pinhole cameras of the six faces: +x, -x, +y, -y, +z, -z of the camera's axes (OpenGL: viewing along
    -z).

    Args:
        camera: one equirectangular camera.
    """
    side = 16 * math.ceil(int(camera.width.item()) / math.pi / 16)
    pose = camera.camera_to_worlds.reshape(-1, 3, 4)[0]
    whole = side + 2 * _MARGIN
    result: list[Cameras] = []
    for face in range(6):
        turned = torch.cat([pose[:, :3] @ _axes(face).to(pose), pose[:, 3:]], 1)
        focal, center = torch.tensor([[side / 2]]), torch.tensor([[whole / 2]])
        result.append(
            Cameras(turned[None], focal, focal, center, center, width=whole, height=whole, times=camera.times)
        )
    return result


def _axes(face: int) -> Tensor:
    """Return [3, 3] a face's right, up and back axes as columns, in the camera's axes."""
    axis, sign = _FACES[face]
    forward, up = torch.zeros(3), torch.zeros(3)
    forward[axis] = sign
    up[2 if axis == 1 else 1] = 1.0
    return torch.stack([torch.linalg.cross(forward, up), up, -forward], 1)


def directions(width: int, height: int, rows: range, device: torch.device) -> Tensor:
    """Return [len(rows), width, 3] unit ray directions in the camera's axes, as nerfstudio's cameras define them."""
    x = (torch.arange(width, device=device) + 0.5) / width * 2 - 1
    y = (torch.arange(rows.start, rows.stop, device=device) + 0.5) / height
    theta, phi = -math.pi * x[None, :], math.pi * y[:, None]
    one = torch.ones_like(theta)
    return torch.stack(
        [-theta.sin() * phi.sin(), phi.cos() * one, -theta.cos() * phi.sin()],
        -1,
    )


def panorama(camera: Cameras, draw: Callable[[Cameras], Outputs | None]) -> Outputs | None:
    """Render an equirectangular picture; its depth is the distance along the ray.

    Args:
        camera: one equirectangular camera.
        draw: renders a face on all ranks; returns None on ranks that are no root.
    """
    drawn = [draw(face) for face in faces(camera)]
    width, height = int(camera.width.item()), int(camera.height.item())
    pictures: list[Tensor] = []
    for one in drawn:
        if one is None:
            return None
        pictures.append(torch.cat([one["rgb"], one["depth"], one["accumulation"]], -1).permute(2, 0, 1)[None])
    first = drawn[0]
    assert first is not None
    out = pictures[0].new_empty(height, width, 5)
    step = max(1, _AT_ONCE // width)
    for begin in range(0, height, step):
        rows = range(begin, min(begin + step, height))
        rays = directions(width, height, rows, out.device).view(-1, 3)
        nearest = rays.abs().argmax(-1)
        piece = out[begin : rows.stop].view(-1, 5)
        for face, (axis, sign) in enumerate(_FACES):
            some = ((nearest == axis) & (rays[:, axis] * sign > 0)).nonzero()[:, 0]
            local = rays[some] @ _axes(face).to(rays)
            ahead = -local[:, 2:]
            whole = pictures[face].shape[-1]
            side = whole - 2 * _MARGIN
            at = local[:, :2] / ahead * out.new_tensor([side / whole, -side / whole])
            sampled = grid_sample(pictures[face], at[None, None], align_corners=False, padding_mode="border")
            values = sampled[0, :, 0].T
            piece[some] = torch.cat([values[:, :3], values[:, 3:4] / ahead, values[:, 4:]], -1)
    background = first["background"]
    background = background[0, 0] if background.dim() == 3 else background
    rgb, depth, alpha = (part.contiguous() for part in out.split([3, 1, 1], -1))
    return {"rgb": rgb, "depth": depth, "accumulation": alpha, "background": background.expand(height, width, 3)}
