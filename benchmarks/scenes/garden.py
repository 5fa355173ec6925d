"""The scenes that rasterizers are timed on: the garden's points side by side on a grid, each a random Gaussian.

The points of `garden.npz` (gsplat's test data: `means3d`, `colors`, three cameras `viewmats` and `Ks` for images of
`width` x `height`) are cropped to a box, and copies of the box are laid side by side. Scales lie evenly between 0 and
0.02, opacities between 0 and 1; rotations are random. Seed 42 gives each grid the same geometry on every machine, so
that counts can be compared; harmonics are drawn on the device and differ between kinds of device. What is seen is the
first camera's view, at another resolution.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.scenes.cloud import make_scene

DEFAULT = Path(__file__).parents[2].parent / "shared" / "data" / "garden.npz"
DEGREE = 3
"""Degree of the harmonics."""

GRIDS = {
    # name: boxes along a side of the grid, width, height
    "garden-1": (1, 1920, 1080),
    "garden-5": (5, 1920, 1080),
    "garden-11": (11, 1920, 1080),
    "garden-11-4k": (11, 3840, 2160),
}
TINY = "tiny"
"""A scene of a few thousand points that needs no file."""

_LOW, _HIGH = (-1.0, -1.0, -1.0), (1.0, 1.0, 0.7)
_LARGEST_SCALE = 0.02
_SMALLEST = 1e-6  # of scales and opacities, and of one minus these: they must have a logarithm


@dataclass(frozen=True)
class Scene:
    """Gaussians before a camera, and the image that they should show.

    Attributes:
        name: of `GRIDS`, or `TINY`.
        means: [N, 3]. quats: [N, 4] of length one.
        log_scales: [N, 3]. logits: [N] of the opacities.
        sh_dc: [N, 3]. sh_rest: [N, 15, 3].
        viewmats: [1, 4, 4]. Ks: [1, 3, 3].
        target: [H, W, 3] uint8.
    """

    name: str
    means: Tensor
    quats: Tensor
    log_scales: Tensor
    logits: Tensor
    sh_dc: Tensor
    sh_rest: Tensor
    viewmats: Tensor
    Ks: Tensor
    target: Tensor

    @property
    def points(self) -> int:
        return self.means.shape[0]

    @property
    def width(self) -> int:
        return self.target.shape[1]

    @property
    def height(self) -> int:
        return self.target.shape[0]

    @property
    def size(self) -> list[int]:
        return [self.width, self.height]

    @property
    def device(self) -> torch.device:
        return self.means.device

    def raw(self) -> list[Tensor]:
        """Return the optimized tensors, in the order of `cuda_ext.ops.optim.fused.PARAMETERS`."""
        return [self.means, self.quats, self.log_scales, self.logits, self.sh_dc, self.sh_rest]

    def activated(self) -> list[Tensor]:
        """Return the parameters with scales and opacities in place of their logarithms and logits."""
        return [self.means, self.quats, self.log_scales.exp(), self.logits.sigmoid(), self.sh_dc, self.sh_rest]

    def floats(self) -> Tensor:
        """Return the target as [H, W, 3] in [0, 1]."""
        return self.target.float() / 255

    def background(self) -> Tensor:
        """Return a colour [3] to render over."""
        return torch.tensor([0.1490, 0.1647, 0.2157], device=self.device)

    def describe(self) -> str:
        return f"{self.name}: {self.points / 1e6:.2f} M Gaussians, {self.width}x{self.height}"


class Garden:
    """Makes scenes on a device.

    Args:
        path: of garden.npz; looked at when the first garden is made.
        device: where scenes are to lie.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path, self._device = path, device
        self._kept: tuple[int, list[Tensor]] | None = None  # the last grid's parameters

    def scene(self, name: str) -> Scene:
        """Return the scene of that name.

        Raises:
            FileNotFoundError: there is no garden.npz.
            KeyError: there is no such scene.
        """
        if name == TINY:
            return self._tiny()
        boxes, width, height = GRIDS[name]
        if not self._path.exists():
            raise FileNotFoundError(
                f"{self._path} is not there: name garden.npz with --garden, or take --scenes {TINY}."
            )
        with np.load(self._path) as data:
            if self._kept is None or self._kept[0] != boxes:
                self._kept = None
                self._kept = (boxes, self._parameters(torch.from_numpy(data["means3d"]), data["colors"], boxes))
            Ks = torch.from_numpy(data["Ks"][:1]).float()
            Ks[:, 0] *= width / int(data["width"])
            Ks[:, 1] *= height / int(data["height"])
            viewmats = torch.from_numpy(data["viewmats"][:1]).float()
        return Scene(name, *self._kept[1], viewmats.to(self._device), Ks.to(self._device), self._image(width, height))

    def _parameters(self, means: Tensor, colors: np.ndarray, boxes: int) -> list[Tensor]:
        low, high = torch.tensor(_LOW), torch.tensor(_HIGH)
        inside = ((means >= low) & (means <= high)).all(dim=-1)
        box = means[inside].float().to(self._device)
        paint = (torch.from_numpy(colors)[inside].float() / 255).to(self._device)
        steps = torch.arange(boxes, device=self._device) - boxes // 2
        along_x, along_y = torch.meshgrid(steps, steps, indexing="ij")
        shifts = torch.stack([along_x, along_y, torch.zeros_like(along_x)], dim=-1).view(-1, 1, 3)
        means = (box + shifts * (high - low).to(self._device)).reshape(-1, 3)
        count = len(means)
        host = torch.Generator().manual_seed(42)  # the same numbers everywhere, in this order
        scales = (torch.rand(count, 3, generator=host) * _LARGEST_SCALE).to(self._device)
        quats = torch.randn(count, 4, generator=host).to(self._device)
        opacities = torch.rand(count, generator=host).to(self._device)
        there = torch.Generator(self._device).manual_seed(42)
        sh_rest = torch.randn(count, (DEGREE + 1) ** 2 - 1, 3, generator=there, device=self._device) * 0.02
        return [
            means,
            torch.nn.functional.normalize(quats, dim=-1),
            scales.clamp(min=_SMALLEST * _LARGEST_SCALE).log(),
            opacities.clamp(_SMALLEST, 1 - _SMALLEST).logit(),
            paint.repeat(boxes * boxes, 1),
            sh_rest,
        ]

    def _image(self, width: int, height: int) -> Tensor:
        """Return noise."""
        generator = torch.Generator(self._device).manual_seed(43)
        shape = (height, width, 3)
        return torch.randint(0, 256, shape, generator=generator, device=self._device, dtype=torch.uint8)

    def _tiny(self) -> Scene:
        made = make_scene(3000, 176, 128)
        parameters = [made.means, made.quats, made.scales.log(), made.opacities.logit(), made.sh_dc, made.sh_rest]
        tensors = [*parameters, made.viewmats, made.Ks, made.target]
        return Scene(TINY, *(t.to(self._device).contiguous() for t in tensors))
