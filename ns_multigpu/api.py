"""The library: render 3D Gaussians, and train them on several GPUs, without nerfstudio.

Names and shapes are gsplat's: `render` takes what `gsplat.rasterization` takes, and `Step` a model with the keys of
gsplat's trainers. examples/tile_minimal.py trains with it under torchrun.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from cuda_ext.ops.optim.adam import adam_scalars
from ns_multigpu.core.assign.assignment import Feedback
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.collectives import all_gather_rows, max_int, sum_in_place
from ns_multigpu.core.dist.peer_memory import choose_transport
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transports import make_transport
from ns_multigpu.core.step.step import Step as CoreStep
from ns_multigpu.core.step.step_settings import Status, StepSettings, first_capacities, padded, with_halos
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.types import Pixels, Points, View
from ns_multigpu.primitives.gaussians.functions import Gaussians
from ns_multigpu.primitives.gaussians.schema import SCHEMA
from strategies import STRATEGIES

_SH_C0 = 0.28209479177387814
_BETAS, _EPS = (0.9, 0.999), 1e-15
"""Adam's, as splatfacto has them."""


def make_strategy(name: str, world: World | None = None, **options: Any) -> Strategy:
    """Return the strategy of that name for the ranks of `world`, by default for this process alone.

    Raises:
        ValueError: there is no such strategy.
    """
    if name not in STRATEGIES:
        raise ValueError(f"there is no strategy {name!r}: choose from {', '.join(STRATEGIES)}")
    return STRATEGIES[name](world or World.single(), **options)


@dataclass(frozen=True)
class _Activated(Gaussians):
    """3D Gaussians whose scales and opacities are given as they are drawn, as `gsplat.rasterization` takes them."""

    def activated(self, points: Points, name: str) -> Tensor:
        return points.params[name]


def render(
    means: Tensor,
    quats: Tensor,
    scales: Tensor,
    opacities: Tensor,
    colors: Tensor,
    viewmats: Tensor,
    Ks: Tensor,
    width: int,
    height: int,
    *,
    sh_degree: int | None = None,
    near_plane: float = 0.01,
    far_plane: float = 1e10,
    radius_clip: float = 0.0,
    eps2d: float = 0.3,
    backgrounds: Tensor | None = None,
    render_mode: Literal["RGB", "RGB+ED"] = "RGB",
    rasterize_mode: Literal["classic", "antialiased"] = "classic",
    absgrad: bool = False,
    strategy: Strategy | None = None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Render 3D Gaussians into images; differentiable. Arguments and results are those of `gsplat.rasterization`.

    Args:
        means: [N, 3]. quats: [N, 4] (w, x, y, z), of any length. scales: [N, 3] standard deviations. opacities: [N] in
            (0, 1).
        colors: [N, 3] from 0 on, or with `sh_degree` spherical harmonics [N, K, 3], K >= (sh_degree + 1)^2.
        viewmats: [C, 4, 4] world-to-camera, OpenCV axes. Ks: [C, 3, 3] intrinsics in pixels.
        width, height: of all images, pixels.
        sh_degree: harmonics in use, 0 to 3; None for plain colours.
        near_plane, far_plane: depths beyond which nothing is drawn.
        radius_clip: half extents in pixels up to which a splat is not drawn.
        eps2d: blur added to 2D covariances, pixels squared.
        backgrounds: [C, 3]; black unless given.
        render_mode: "RGB+ED" adds the expected depth as a fourth channel.
        rasterize_mode: "antialiased" scales opacities by what the blur added (Mip-Splatting).
        absgrad: the gradient of `info["probe"]` is the sum of absolute values over pixels (AbsGS).
        strategy: of `make_strategy`, to render with several ranks: each calls this with its own Gaussians and the same
            cameras. A rank's images hold the patches that it drew, and zeros outside: summed over ranks they are the
            images. Gradients are returned to the Gaussians' owners.

    Returns:
        images [C, height, width, 3 or 4], alphas [C, height, width, 1], and a dict: `means2d` [M, 2], `conics` [M, 3],
        `opacities` [M], `depths` [M], `radii` [M, 2] of what was projected, `camera_ids` and `gaussian_ids` [M] int32,
        `probe` [M, 2], `patches` (camera, x0, y0, x1, y1), `width`, `height`, `n_cameras`.

    Raises:
        ValueError: a shape does not fit.
    """
    spread = strategy or make_strategy("single", World.single(means.device))
    _check_shapes(means, colors, viewmats, Ks, sh_degree)
    degree = sh_degree or 0
    features = (colors - 0.5)[:, None] / _SH_C0 if sh_degree is None else colors
    params = {
        "means": means, "quats": quats, "scales": scales, "opacities": opacities,
        "features_dc": features[:, 0], "features_rest": features[:, 1 : (degree + 1) ** 2],
    }  # fmt: skip
    kind = _Activated(
        degree,
        rasterize_mode == "antialiased",
        absgrad,
        render_mode == "RGB+ED",
        eps2d,
        near_plane,
        far_plane,
        radius_clip,
    )
    views = [View(viewmats[i], Ks[i], width, height, i) for i in range(len(viewmats))]
    plan = spread.plan(views)
    rendering = spread.render(kind, Points(params), views, plan)
    images = means.new_zeros(len(views), height, width, 4 if kind.depth else 3)
    alphas = means.new_zeros(len(views), height, width, 1)
    for piece in rendering.pixels:
        view, x0, y0, x1, y1 = _rectangle(piece)
        left, top, right, bottom = piece.patch.inner(views[view])
        color, alpha = piece.color[top:bottom, left:right], piece.alpha[top:bottom, left:right]
        if backgrounds is not None:
            color = color + (1 - alpha) * backgrounds[view]
        if piece.depth is not None:
            color = torch.cat([color, piece.depth[top:bottom, left:right]], -1)
        images[view, y0:y1, x0:x1] = color
        alphas[view, y0:y1, x0:x1] = alpha
    splats = rendering.splats
    names = ("means2d", "conics", "opacities", "depths", "radii")
    info = {name: splats.rows[name] for name in names} | {
        "camera_ids": splats.hits.view_ids, "gaussian_ids": splats.hits.point_ids, "probe": splats.probe,
        "patches": [_rectangle(piece) for piece in rendering.pixels], "width": width, "height": height,
        "n_cameras": len(views),
    }  # fmt: skip
    return images, alphas, info


def _rectangle(piece: Pixels) -> tuple[int, int, int, int, int]:
    patch = piece.patch
    return patch.view, patch.x0, patch.y0, patch.x1, patch.y1


def _check_shapes(means: Tensor, colors: Tensor, viewmats: Tensor, Ks: Tensor, sh_degree: int | None) -> None:
    count = len(means)
    if sh_degree is None and colors.shape != (count, 3):
        raise ValueError(f"colors must be [{count}, 3], not {list(colors.shape)}; for harmonics give sh_degree")
    if sh_degree is not None and not (
        0 <= sh_degree <= 3 and colors.dim() == 3 and colors.shape[1] >= (sh_degree + 1) ** 2
    ):
        raise ValueError(f"sh_degree {sh_degree} wants colors [{count}, K, 3], not {list(colors.shape)}; 0 to 3")
    if viewmats.shape[1:] != (4, 4) or Ks.shape[1:] != (3, 3) or len(viewmats) != len(Ks):
        raise ValueError(f"viewmats and Ks must be [C, 4, 4] and [C, 3, 3], not {[*viewmats.shape]}, {[*Ks.shape]}")


class Step:
    """A training step of 3D Gaussians, distributed over ranks: render, L1 + SSIM, gradients, Adam.

    Every rank creates one with the same arguments, and calls it with the same batches. The step runs in operators that
    read nothing back (`ns_multigpu.core.step.step`). Then all ranks check once whether buffers sufficed. If not, they
    grow them and retry the step.

    Args:
        splats: the whole model, the same on all ranks, with gsplat's keys: `means` [N, 3], `quats` [N, 4], `scales`
            [N, 3] logarithms, `opacities` [N] logits, `sh0` [N, 1, 3], `shN` [N, K, 3]. Copied.
        width, height: of the images. batch_size: views of a step, over all ranks.
        strategy: of `make_strategy`; one rank unless given.
        lr: learning rates by key; those left out are splatfacto's.
        ssim_lambda: weight of 1 - SSIM; that of L1 is 1 - ssim_lambda.
        sh_degree: harmonics in use; those that `shN` has, unless given.
        cameras: the capture's viewmats [V, 4, 4] and Ks [V, 3, 3], for strategies that place points by views.

    Attributes:
        splats: this rank's part of the model, with the same keys; trained in place.

    Raises:
        ValueError: keys or shapes do not fit, or the strategy has no such step.
    """

    def __init__(
        self,
        splats: Mapping[str, Tensor],
        width: int,
        height: int,
        batch_size: int = 1,
        strategy: Strategy | None = None,
        *,
        lr: Mapping[str, float] | None = None,
        ssim_lambda: float = 0.2,
        sh_degree: int | None = None,
        cameras: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self._strategy = strategy or make_strategy("single", World.single(splats["means"].device))
        world = self._world = self._strategy.world
        whole = _ours(splats, world)
        rest = int(whole["features_rest"].shape[1])
        kind = Gaussians(sh_degree if sh_degree is not None else round((rest + 1) ** 0.5) - 1)
        kernels = kind.kernels()
        assert kernels is not None, "3D Gaussians with harmonics have kernels"
        self._kernels, self._size, self._lambda = kernels, (width, height), ssim_lambda
        if cameras is not None:
            views = self._views(*(one.to(world.device) for one in cameras))
            self._strategy.placement.look(lambda: views)
        held = self._strategy.placement.hold(Points(whole), world)
        self._params = {name: value.detach().clone().contiguous() for name, value in held.params.items()}
        self._strategy.observe(kind, Points(self._params), 0)
        self.splats = _theirs(self._params)
        self._moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self._params.items()}
        self._rates = {p.name: p.rate for p in SCHEMA} | {_OURS[key]: rate for key, rate in (lr or {}).items()}
        self._peer = world.size > 1 and choose_transport(world).peer
        is_exchanged = self._strategy.rows.is_exchanged and world.size > 1
        rows, segment, intersections = first_capacities(
            len(held), width * height, batch_size, is_exchanged=is_exchanged
        )
        self._settings = StepSettings(width, height, batch_size, ssim_lambda, rows, segment, intersections)
        self._taken = 0
        self._plan: Plan | None = None
        self._targets: list[Tensor] = []
        self._step = self._made()

    def __call__(self, viewmats: Tensor, Ks: Tensor, images: Tensor, background: Tensor | None = None) -> float:
        """Run a step and return the batch's mean loss, the same on all ranks.

        Args:
            viewmats: [B, 4, 4]. Ks: [B, 3, 3]. images: [B, height, width, 3] uint8, or float in [0, 1].
            background: [3]; black unless given.
        """
        world, device = self._world, self._world.device
        views = self._views(viewmats.to(device), Ks.to(device))
        if len(views) != self._settings.views:
            raise ValueError(f"the step was made for {self._settings.views} views, not {len(views)}")
        self._plan = plan = with_halos(self._strategy.plan_alike(views), views)
        self._targets = []
        for patch in plan.owned[world.rank]:
            left, top, right, bottom = patch.rendered(views[patch.view])
            self._targets.append(images[patch.view, top:bottom, left:right].to(device).contiguous())
        self._taken += 1
        while True:
            self._fill(views, background)
            self._step.take(plan, self._targets)
            status = self._step.status()
            if not max_int(int(status.full), world):
                break
            self._settings = self._grown(status)
            self._step = self._made()
        if self._strategy.assignment.learns is not Feedback.NOTHING:
            self._strategy.assignment.learn(views, self._step.measured_work.reshape(-1).tolist())
        loss = self._step.report[:-1].sum()[None] / len(views)
        sum_in_place(loss, world)
        return float(loss)

    def psnr(self) -> float:
        """Return the PSNR in dB of what the last step rendered, before it was updated; the same on all ranks."""
        assert self._plan is not None, "take a step first"
        mse = self._step.mse(self._plan, self._targets)[None]
        sum_in_place(mse, self._world)
        return float(-10 * mse.log10())

    def gather(self) -> dict[str, Tensor]:
        """Return the whole model on every rank, with the keys of `splats`. Every rank calls it."""
        if self._strategy.placement.replicated:
            return dict(self.splats)
        return {name: all_gather_rows(value, self._world)[0] for name, value in self.splats.items()}

    def _views(self, viewmats: Tensor, Ks: Tensor) -> list[View]:
        return [View(viewmats[i], Ks[i], *self._size, i) for i in range(len(viewmats))]

    def _fill(self, views: Sequence[View], background: Tensor | None) -> None:
        step = self._step
        step.viewmats.copy_(torch.stack([view.viewmat for view in views]))
        step.Ks.copy_(torch.stack([view.K for view in views]))
        step.backgrounds.copy_(step.backgrounds.new_zeros(3) if background is None else background)
        lines = [adam_scalars(self._rates[name], _BETAS, _EPS, self._taken) for name in self._kernels.parameters]
        step.scalars.copy_(torch.tensor(lines))

    def _grown(self, status: Status) -> StepSettings:
        """Return settings whose capacities hold what any rank needed, with some to spare."""
        s, world = self._settings, self._world
        assert isinstance(s.segment, int), "one capacity for all pairs of ranks"
        return replace(
            s,
            rows=max(s.rows, padded(max_int(status.rows, world))),
            segment=max(s.segment, padded(max_int(max(status.segments, default=0), world))),
            intersections=max(s.intersections, padded(max_int(status.intersections, world))),
        )

    def _made(self) -> CoreStep:
        s, spread = self._settings, self._strategy
        transport = make_transport(
            spread.rows, spread.gradients, self._world, self._kernels, s.rows, s.segment, s.words(spread.assignment),
            peer=self._peer,
        )  # fmt: skip
        return CoreStep(self._kernels, self._params, self._moments, {}, s, spread, transport)


_OURS = {"means": "means", "quats": "quats", "scales": "scales", "opacities": "opacities", "sh0": "features_dc",
         "shN": "features_rest"}  # fmt: skip
"""Names of parameters in the core by gsplat's keys."""


def _ours(splats: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    if set(splats) != set(_OURS):
        raise ValueError(f"splats must have the keys {', '.join(_OURS)}, not {', '.join(splats)}")
    params = {_OURS[key]: value.detach().to(world.device, torch.float32) for key, value in splats.items()}
    count = len(params["means"])
    shapes = {"means": (3,), "quats": (4,), "scales": (3,), "opacities": (), "features_dc": (1, 3)}
    for name, shape in shapes.items():
        if params[name].shape != (count, *shape):
            raise ValueError(f"splats: {name} must be {[count, *shape]}, not {list(params[name].shape)}")
    return params | {"opacities": params["opacities"][:, None], "features_dc": params["features_dc"][:, 0]}


def _theirs(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the same memory under gsplat's keys and shapes."""
    views = {"opacities": params["opacities"][:, 0], "features_dc": params["features_dc"][:, None]}
    return {key: views.get(name, params[name]) for key, name in _OURS.items()}
