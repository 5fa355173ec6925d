"""Made-up splats, a compositor that loops over pixels, and comparisons, shared by the tests of the rasterization."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cuda_ext import intersect, rasterize


@dataclass(frozen=True)
class Splats:
    """Rows as `project` makes them, with features and the patches to render."""

    means2d: Tensor
    conics: Tensor
    row_opacities: Tensor
    features: Tensor
    radii: Tensor
    depths: Tensor
    view_ids: Tensor
    patches: tuple[int, ...]
    tile_size: int = 16

    def intersect(self) -> tuple[Tensor, Tensor]:
        return intersect(
            self.means2d, self.conics, self.row_opacities, self.radii, self.depths, self.view_ids, self.patches,
            self.tile_size,
        )  # fmt: skip

    def inputs(self) -> list[Tensor]:
        """Return the differentiable inputs of `rasterize`."""
        return [self.means2d, self.conics, self.row_opacities, self.features]

    def render(self, probe: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        return rasterize(*self.inputs(), *self.intersect(), self.patches, self.tile_size, probe)

    def leaves(self) -> "Splats":
        """Return the same with inputs that require gradients."""
        means2d, conics, row_opacities, features = (x.detach().clone().requires_grad_() for x in self.inputs())
        return replace(self, means2d=means2d, conics=conics, row_opacities=row_opacities, features=features)

    def with_patches(self, *patches: int) -> "Splats":
        return replace(self, patches=patches)

    def to(self, device: str | torch.device) -> "Splats":
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def make_splats(
    count: int,
    width: int,
    height: int,
    sizes: tuple[float, float] = (0.5, 4.0),
    opacities: tuple[float, float] = (0.05, 0.95),
    channels: int = 3,
    views: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Splats:
    """Return `count` random splats over one or more views of one size, rendered as whole views by default.

    sizes are standard deviations in pixels along the axes of each ellipse, before the blur of 0.3 px^2.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    means2d = (uniform(count, 2) * 1.2 - 0.1) * torch.tensor([width, height])
    axes = sizes[0] + uniform(count, 2) * (sizes[1] - sizes[0])
    angle = uniform(count) * math.pi
    c, s = torch.cos(angle), torch.sin(angle)
    xx = (c * axes[:, 0]) ** 2 + (s * axes[:, 1]) ** 2 + 0.3
    yy = (s * axes[:, 0]) ** 2 + (c * axes[:, 1]) ** 2 + 0.3
    xy = c * s * (axes[:, 0] ** 2 - axes[:, 1] ** 2)
    row_opacities = opacities[0] + uniform(count) * (opacities[1] - opacities[0])
    extent = torch.sqrt(2 * torch.log(255 * row_opacities)[:, None] * torch.stack([xx, yy], dim=1))
    return Splats(
        means2d.to(dtype),
        (torch.stack([yy, -xy, xx], dim=1) / (xx * yy - xy * xy)[:, None]).to(dtype),
        row_opacities.to(dtype),
        (uniform(count, channels) * 2 - 0.5).to(dtype),
        torch.ceil(extent * 1.0001 + 1e-3).int(),
        (1 + uniform(count)).to(dtype),
        torch.sort(torch.randint(views, (count,), generator=generator)).values.int(),
        tuple(n for view in range(views) for n in (view, 0, 0, width, height)),
    )


def composite_slowly(splats: Splats) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Colours [S,D], alpha [S] and the rows blended at each pixel, straight from the rule, in Python's own floats."""
    rows = sorted(range(len(splats.depths)), key=lambda r: (float(splats.depths[r]), r))
    means, conics = splats.means2d.tolist(), splats.conics.tolist()
    opacities, features = splats.row_opacities.tolist(), splats.features.double()
    colors, alphas, blended = [], [], []
    for k in range(0, len(splats.patches), 5):
        view, x0, y0, x1, y1 = splats.patches[k : k + 5]
        of_view = [r for r in rows if splats.view_ids[r] == view and splats.radii[r].min() > 0]
        for y in range(y0, y1):
            for x in range(x0, x1):
                transmittance, color, hits = 1.0, torch.zeros(features.shape[1], dtype=torch.float64), []
                for r in of_view:
                    dx, dy = means[r][0] - x - 0.5, means[r][1] - y - 0.5
                    a, b, c = conics[r]
                    sigma = 0.5 * (a * dx * dx + c * dy * dy) + b * dx * dy
                    alpha = min(0.999, opacities[r] * math.exp(-sigma))
                    if sigma < 0 or alpha < 1 / 255:
                        continue
                    if transmittance * (1 - alpha) <= 1e-4:
                        break
                    color += transmittance * alpha * features[r]
                    transmittance *= 1 - alpha
                    hits.append(r)
                colors.append(color)
                alphas.append(1 - transmittance)
                blended.append(hits)
    return torch.stack(colors), torch.tensor(alphas, dtype=torch.float64), blended


def backward(splats: Splats, seed: int = 0, weight: Tensor | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and the gradients by means2d, conics, opacities, features and probe of a random weighting of pixels."""
    leaves = splats.leaves()
    probe = torch.zeros_like(splats.means2d).requires_grad_()
    out, alpha, last = leaves.render(probe)
    generator = torch.Generator().manual_seed(seed)
    v_out = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    v_alpha = torch.randn(alpha.shape, generator=generator, dtype=torch.float64).to(alpha)
    if weight is not None:
        v_out, v_alpha = v_out * weight[:, None], v_alpha * weight
    gradients = torch.autograd.grad([out, alpha], [*leaves.inputs(), probe], [v_out, v_alpha])
    return [out.detach(), alpha.detach(), last], list(gradients)


def pixel_ids(patches: tuple[int, ...]) -> Tensor:
    """Index in the whole view, 47 pixels wide, of every pixel of the patches."""
    ids = []
    for k in range(0, len(patches), 5):
        _, x0, y0, x1, y1 = patches[k : k + 5]
        ids.append((torch.arange(y0, y1)[:, None] * 47 + torch.arange(x0, x1)).flatten())
    return torch.cat(ids)


def assert_close_but_few(actual: Tensor, expected: Tensor, rtol: float, atol: float, fraction: float = 1e-3) -> None:
    """Close except for the few values whose pixels lie so near a threshold of the rule that rounding decides."""
    far = (actual - expected).abs() > atol + rtol * expected.abs()
    assert far.float().mean().item() <= fraction, f"{int(far.sum())} of {far.numel()} values differ"


def assert_gradient_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Close as a whole and in direction, without bias; and not all zero, or there would be nothing to compare."""
    actual, expected = actual.double().flatten(), expected.double().flatten()
    norm = expected.norm()
    assert norm > 0
    assert (actual - expected).norm() <= tolerance * norm
    assert torch.dot(actual, expected) / (actual.norm() * norm) >= 1 - tolerance
    assert (actual - expected).sum().abs() <= tolerance * expected.abs().sum()
