"""Splatfacto, rendered through a primitive and a strategy.

A subclass of nerfstudio's model because its viewer and exporter ask for one; it is built for one device and knows of
other ranks only that a rendering may hold some of a batch's patches.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.model_components.lib_bilagrid import BilateralGrid
from nerfstudio.models.splatfacto import SplatfactoModel
from nerfstudio.utils.colors import get_color
from pytorch_msssim import SSIM
from torch import Tensor
from torch.nn.functional import avg_pool2d

from cuda_ext.ops.loss.bilateral_map import bilateral_map
from ns_multigpu.core.assign.image_part import ImagePart
from ns_multigpu.core.densifier import Densifier
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.primitive import Primitive
from ns_multigpu.core.random import keyed_generator
from ns_multigpu.core.schema import POSITION, Parameter, names
from ns_multigpu.core.step.bilateral_grids import VARIATION_WEIGHT, variation
from ns_multigpu.core.step.exposures import drift
from ns_multigpu.core.step.loss import photometric_loss, sky_loss
from ns_multigpu.core.types import FAR, Patch, Pixels, Points, Rendering, Splats, View
from ns_multigpu.plugin.launch.checks import check_first_points, check_random_points
from ns_multigpu.plugin.model import exposures, surfaces
from ns_multigpu.plugin.model.cameras import in_box, view_from_camera
from ns_multigpu.plugin.model.densifiers import make_densifier
from ns_multigpu.plugin.model.metrics import OptionalLpips, psnr
from ns_multigpu.plugin.model.sharded_points import ShardedPoints, mean_of
from ns_multigpu.primitives.densify.cap import ChosenCap
from ns_multigpu.primitives.densify.densifier import densification_info, dues
from ns_multigpu.primitives.gaussians.init import SH_C0
from ns_multigpu.primitives.gaussians.schema import ORDER
from ns_multigpu.primitives.registry import PRIMITIVES, Kind
from ns_multigpu.primitives.registry import RenderOptions as Wanted

if TYPE_CHECKING:
    from ns_multigpu.plugin.model.options import SplatModelConfig


class SplatModel(ShardedPoints, SplatfactoModel):
    """Splatting of 3D Gaussians, or of another primitive, for any strategy.

    `step` is the number of images seen, so that warm-up, resolution schedule, harmonics and densification do not depend
    on the batch size.
    """

    config: "SplatModelConfig"
    exposures: torch.nn.Parameter | None
    chosen_cap: ChosenCap | None = None
    """With mcmc, how many Gaussians suit the capture, where that is what caps them."""
    render_override: Any = None
    """Renderer that uses other ranks, or serves a viewer; None if this process renders (see
    `RenderService.outputs`)."""

    @property
    def kind(self) -> Kind:
        """Primitive of the points."""
        return PRIMITIVES[self.config.primitive]

    @property
    def schema(self) -> tuple[Parameter, ...]:
        """Parameters of its points, which are in `gauss_params`."""
        return self.kind.schema

    def populate_modules(self) -> None:
        """Build parameters and modules on the CPU, without downloads or a GPU."""
        config, params = self.config, self.initial_points()
        self.gauss_params = torch.nn.ParameterDict({k: torch.nn.Parameter(params[k]) for k in names(self.schema)})
        self.camera_optimizer = config.camera_optimizer.setup(num_cameras=self.num_train_data, device="cpu")
        self.psnr = psnr
        self.ssim = SSIM(data_range=1.0, size_average=True, channel=3)
        self._lpips = OptionalLpips()
        self.step = 0
        self.seed = torch.initial_seed()
        self.crop_box: OrientedBox | None = None
        if config.background_color == "random":
            # What nerfstudio's viewer shows behind a scene; training draws its own colours.
            self.background_color = torch.tensor([0.1490, 0.1647, 0.2157])
        else:
            self.background_color = get_color(config.background_color)
        self.register_parameter(exposures.GROUP, None)
        if config.exposure == "gain":
            exposures.add(self)
        if config.use_bilateral_grid:
            x, y, w = config.grid_shape
            self.bil_grids = BilateralGrid(num=self.num_train_data, grid_X=x, grid_Y=y, grid_W=w)
        self.rendering: Rendering | None = None
        self.views: list[View] = []
        self.view_losses: dict[int, Tensor] = {}
        self.prepare_densifier(World.single(), self.seed)

    def initial_points(self) -> dict[str, Tensor]:
        """Return the initial parameters."""
        config, seeds = self.config, self.seed_points
        check_first_points(config.initial_opacity, config.initial_scale)
        if config.random_init or seeds is None or len(seeds[0]) == 0:
            seeds = None  # whether that is an error is for the pipeline to say: not when a checkpoint follows
            check_random_points(config.num_random, config.random_scale)
        return self.kind.initial(
            seeds,
            sh_degree=config.sh_degree,
            count=config.num_random,
            extent=config.random_scale,
            generator=keyed_generator(torch.initial_seed(), "initial gaussians"),
            opacity=config.initial_opacity,
            scale=config.initial_scale,
        )

    def get_gaussian_param_groups(self) -> dict[str, list[torch.nn.Parameter]]:
        """Return a parameter group for each parameter of the points."""
        return {name: [param] for name, param in self.gauss_params.items()}

    def get_param_groups(self) -> dict[str, list[torch.nn.Parameter]]:
        """Return the parameters of each optimizer, exposures included."""
        return super().get_param_groups() | ({} if self.exposures is None else {exposures.GROUP: [self.exposures]})

    def prepare_densifier(self, world: World, seed: int) -> None:
        """Make densification count over `world` and draw by `seed`. Called before the first step."""
        self.seed = seed
        self.densifier: Densifier = make_densifier(
            self.config, self.num_train_data, world, seed, shard_index=self.shard_index
        )
        self.densifier_state = self.densifier.initialize_state()

    @property
    def lpips(self) -> OptionalLpips:  # pyright: ignore[reportIncompatibleVariableOverride]
        """LPIPS, built on first use."""
        return self._lpips

    def __dir__(self) -> list[str]:
        """Return attribute names without splatfacto's of parameters that the primitive lacks: the viewer reads all."""
        absent = set(ORDER) - set(self.gauss_params)
        return [name for name in super().__dir__() if name not in absent]

    @property
    def points(self) -> Points:
        """Parameters in the primitive's form."""
        return Points(dict(self.gauss_params.items()))

    def counts(self, images: int) -> bool:
        """Return whether densification counts a step that begins after so many images."""
        return self.densifier.counts(images)

    def degree(self, images: int) -> int | None:
        """Return the degree of harmonics in use after so many images; None for plain colours."""
        config = self.config
        return min(images // config.sh_degree_interval, config.sh_degree) if config.sh_degree > 0 else None

    @property
    def far(self) -> float:
        """Largest depth that is drawn, world units."""
        return FAR if self.config.far_plane is None else self.config.far_plane

    def primitive(self, *, depth: bool, counted: bool = True) -> Primitive:
        """Return the primitive for the images seen so far.

        Args:
            depth: whether it renders depth as well.
            counted: whether densification may count what it renders.
        """
        config = self.config
        counted_here = surfaces.weights(config, self.step) if counted and self.training else {}
        wanted = Wanted(
            sh_degree=self.degree(self.step),
            antialiased=config.rasterize_mode == "antialiased",
            absgrad=counted and self.training and config.use_absgrad and self.counts(self.step),
            depth=depth or not counted_here.keys().isdisjoint(("normals", *surfaces.of_depth(config))),
            channels=surfaces.channels(config, counted_here),
            far=self.far,
            radius_clip=config.radius_clip,
        )
        return self.kind.make(wanted)

    def in_one_color(
        self, primitive: Primitive, points: Points, color: tuple[float, float, float]
    ) -> tuple[Primitive, Points]:
        """Return the points in one colour from all directions, and the primitive that renders them.

        Args:
            color: red, green and blue, each above 0 and below 1.
        """
        plain = points.params["features_dc"]
        constant = (torch.tensor(color, dtype=plain.dtype, device=plain.device) - 0.5) / SH_C0
        params = {**points.params, "features_dc": constant.expand_as(plain).contiguous()}
        # Each primitive that has harmonics is a dataclass with this field.
        return replace(cast(Any, primitive), sh_degree=0), Points(params)

    # ---- training ----

    def training_views(self, cameras: Sequence[tuple[Cameras, Cameras]], indices: Sequence[int]) -> list[View]:
        """Return the views of a batch, at the present resolution and with the present pose corrections.

        Args:
            cameras: each camera twice, on the host (its numbers are read) and on the device (its pose is corrected).
            indices: their numbers in the capture.
        """
        factor = self._get_downscale_factor()
        return [
            view_from_camera(host, self.camera_optimizer.apply_to_camera(there)[0], index, factor)
            for (host, there), index in zip(cameras, indices, strict=True)
        ]

    def patch_losses(
        self,
        rendering: Rendering,
        views: Sequence[View],
        images: Mapping[Patch, ImagePart],
        *,
        world: World,
        metrics: bool,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return this rank's share of the batch's loss, which is the mean over views of Splatfacto's.

        Args:
            rendering: this rank's patches.
            views: the whole batch.
            images: "image" [h, w, 3|4] and perhaps "mask" [h, w, 1|2] under each of this rank's patches, or of more; of
                the whole view as long as it is drawn at a lower resolution than its image's.
            world: the ranks: terms on parameters are shared out over them.
            metrics: whether to compute metrics too.

        Returns:
            losses and metrics; summed over ranks they are the batch's.
        """
        self.rendering, self.views, self.view_losses = rendering, list(views), {}
        loss = torch.zeros((), device=self.device)
        if not rendering.pixels:
            # A rank without patches still takes part in the sum of gradients.
            loss = loss + 0.0 * sum(row.sum() for row in rendering.splats.rows.values() if row.requires_grad)
        squared = torch.zeros((), device=self.device)
        shaped = surfaces.weights(self.config, self.step)
        of_pixels = [*map(surfaces.loss_name, shaped), *(["sky_loss"] if self.config.sky_loss > 0 else [])]
        losses = {name: torch.zeros((), device=self.device) for name in of_pixels}
        for pixels in rendering.pixels:
            view = views[pixels.patch.view]
            background = self._training_background(pixels.patch.view)
            rgb = self._composite(pixels, view, background)
            target, mask, sky = self._target(images[pixels.patch], pixels.patch, view, background)
            if target.dtype.is_floating_point:
                target = target.to(rgb.dtype)
            if mask is not None:
                rgb = rgb * mask
            share = photometric_loss(rgb, target, pixels.patch, view, self.config.ssim_lambda) / len(views)
            self.view_losses[view.index] = share.detach()
            loss = loss + share
            surfaces.add_shares(losses, shaped, pixels, view, len(views))
            if sky is not None:
                share = self.config.sky_loss * sky_loss(pixels.alpha, sky, pixels.patch, view) / len(views)
                losses["sky_loss"] = losses["sky_loss"] + share
            if metrics:
                x0, y0, x1, y1 = pixels.patch.inner(view)
                scale = 1.0 if target.dtype.is_floating_point else 255.0
                error = (rgb.detach() - target / scale)[y0:y1, x0:x1]
                squared = squared + error.square().sum() / (3 * view.width * view.height * len(views))
        losses["main_loss"] = loss
        losses.update(self.regularisation(rendering.splats, len(views), world))
        extra = dict[str, Tensor]()
        self.camera_optimizer.get_loss_dict(extra)
        if self.config.use_bilateral_grid:
            extra["tv_loss"] = VARIATION_WEIGHT * variation(self.bil_grids.grids)
        if self.exposures is not None:
            extra["exposure_drift"] = drift(self.exposures)
        losses.update({name: value / world.size for name, value in extra.items()})
        return losses, {"mse": squared} if metrics else {}

    def step_cb(self, optimizers: Any, step: int) -> None:
        """Keep the optimizers, before each step. `step` is nerfstudio's; the pipeline sets `self.step`."""
        self.rates, self.optimizers = optimizers, optimizers.optimizers

    def step_post_backward(self, step: int) -> None:
        """Densify, after each step."""
        if self.rendering is None:
            return
        splats, views = self.rendering.splats, self.views
        self.densifier.after_step(
            self.gauss_params, self.optimizers, self.densifier_state, self.step, len(views),
            self.rates.rate_of_one_view(POSITION), lambda: densification_info(splats, views, self.kind.screen_radii),
        )  # fmt: skip
        self.rendering = None
        if dues(self.config.refine_every, self.step, len(self.views)):
            self.count_shards()

    def _training_background(self, position: int) -> Tensor:
        """Return the background of the batch's view at `position`, seeded by its image's number in the whole run."""
        if self.config.background_color != "random":
            return self._get_background_color()
        drawn = torch.rand(3, generator=keyed_generator(self.seed, "background", self.step + position))
        return drawn.to(self.device)

    def _composite(self, pixels: Pixels, view: View, background: Tensor) -> Tensor:
        rgb = pixels.color + (1 - pixels.alpha) * background
        rgb = (rgb if self.exposures is None else rgb * self.exposures[view.index]).clamp(0.0, 1.0)
        if not self.config.use_bilateral_grid:
            return rgb
        return bilateral_map(
            self.bil_grids.grids[view.index], rgb, pixels.patch.rendered(view), (view.width, view.height)
        )

    def _target(
        self, part: ImagePart, patch: Patch, view: View, background: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the image under a patch, halo included, its mask and sky; uint8 while nothing is computed on it."""
        rectangle, small = patch.rendered(view), self._get_downscale_factor() > 1
        data = part.data if small else part.under(rectangle).data
        image, mask = data["image"], data.get("mask")
        if image.shape[2] == 3 and mask is None and not small:
            return image, None, None
        target = self.composite_with_background(self.get_gt_img(image), background)
        covered = None if mask is None else self._downscale_if_required(mask).to(self.device)
        if small:
            x0, y0, x1, y1 = rectangle
            target = target[y0:y1, x0:x1]
            covered = None if covered is None else covered[y0:y1, x0:x1]
        if covered is None:
            return target, None, None
        kept, *sky = covered.split(1, dim=-1)
        return target * kept, kept, sky[0] if sky else None

    def _downscale_if_required(self, image: Tensor) -> Tensor:
        """Return means over squares of pixels, like nerfstudio's convolution, which would make a GPU load cuDNN
        for up to 1.5 s."""
        factor = self._get_downscale_factor()
        if factor == 1 or image.numel() == 0:  # of a patch without pixels there is no image
            return image
        return avg_pool2d(image.float().permute(2, 0, 1)[None], factor)[0].permute(1, 2, 0).contiguous()

    def needle_weight(self, images: int, batch: int) -> float:
        """Return the weight of PhysGaussian's penalty on needles in a step, which counts for every tenth image.

        Args:
            images: seen before the step. batch: of the step.
        """
        return 0.1 * len(dues(10, images, batch)) / batch if self.config.use_scale_regularization else 0.0

    def regularisation(self, splats: Splats, batch: int, world: World) -> dict[str, Tensor]:
        """Return this rank's share of the mean over a batch's images of the regularization of the points.

        Splatfacto's is of all points. MCMC's is of those that an image's view draws, so that its weight relative to the
        photographs does not depend on their number.

        Args:
            splats: of this rank's points. world: the ranks.
        """
        config = self.config
        terms = {"scale_reg": torch.zeros((), device=self.device)}
        weight = self.needle_weight(self.step, batch)
        if weight > 0:
            scales = self.scales.exp()
            ratio = (scales.amax(dim=-1) / scales.amin(dim=-1)).clamp(min=config.max_gauss_ratio)
            terms["scale_reg"] = weight * mean_of(ratio - config.max_gauss_ratio) * self.share_of_points(world)
        if config.densifier == "mcmc":
            drawn = splats.hits.point_ids[(splats.rows["radii"] > 0).all(-1)].long()
            views = torch.bincount(drawn, minlength=self.num_points).to(self.scales)[:, None]  # that draw each point
            share = 1 / (batch * max(self.total_points, 1))
            terms["mcmc_opacity_reg"] = config.mcmc_opacity_reg * share * (views * self.opacities.sigmoid()).sum()
            terms["mcmc_scale_reg"] = config.mcmc_scale_reg * share / 3 * (views * self.scales.exp()).sum()
        return terms

    # ---- evaluation and viewing: the whole view ----

    def get_outputs(self, camera: Cameras) -> MutableMapping[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Render one camera, by this process or by `render_override`. See `SplatfactoModel.get_outputs`.

        Returns:
            rgb [H, W, 3], depth [H, W, 1], accumulation [H, W, 1], background [3] or [H, W, 3].
        """
        if (
            self.render_override is not None
            and (outputs := self.render_override.outputs(camera, self.crop_box)) is not None
        ):
            return outputs
        params = dict(self.gauss_params.items())
        if self.crop_box is not None and not self.training:
            kept = in_box(self.crop_box, self.means)
            if not bool(kept.any()):
                return self.get_empty_outputs(
                    int(camera.width.item()), int(camera.height.item()), self.background_color.to(self.device)
                )
            params = {name: value[kept] for name, value in params.items()}
        view = view_from_camera(camera, camera.camera_to_worlds.reshape(-1, 3, 4)[0], 0, self._get_downscale_factor())
        primitive = self.primitive(depth=True)
        if not self.training:
            primitive = primitive.showing()
        points = Points(params)
        splats = primitive.splat(points, primitive.cull(points, [view], [0]), [view])
        return self.outputs_of(primitive.render(splats, [Patch.whole(0, view)], [view])[0], view)

    def outputs_of(self, pixels: Pixels, view: View) -> dict[str, Any]:
        """Return the outputs of `get_outputs` for a full view's pixels, with their depth."""
        background = self._get_background_color()
        rgb = (pixels.color + (1 - pixels.alpha) * background).clamp(0.0, 1.0)
        depth = pixels.depth
        assert depth is not None
        depth = torch.where(pixels.alpha > 0, depth, depth.detach().max())
        if not self.training:
            background = background.expand(view.height, view.width, 3)
        # Directions as colours: 0.5 is none.
        shown = {name: 0.5 + 0.5 * pixels.extra[name] for name in self.shown if name in pixels.extra}
        return {"rgb": rgb, "depth": depth, "accumulation": pixels.alpha, **shown, "background": background}

    @property
    def corrects_colours(self) -> bool:
        """True if PSNR with corrected colours is measured: the model maps exposures, or the metric was requested."""
        return self.exposures is not None or self.config.color_corrected_metrics

    def compared(self, outputs: dict[str, Any], image: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return a photograph as the image that `get_outputs` rendered should be, and that image, both [H, W, 3]."""
        truth = self.composite_with_background(self.get_gt_img(image["image"]), outputs["background"])
        return truth.to(self.device), outputs["rgb"]

    @property
    def shown(self) -> list[str]:
        """Names of the primitive's further outputs."""
        return list(self.primitive(depth=False, counted=False).shown)

    def get_empty_outputs(self, width: int, height: int, background: Tensor) -> dict[str, Any]:
        """See `SplatfactoModel.get_empty_outputs`: of a view of nothing."""
        grey = background.new_full((height, width, 3), 0.5)
        return super().get_empty_outputs(width, height, background) | dict.fromkeys(self.shown, grey)

    def get_image_metrics_and_images(
        self, outputs: dict[str, Tensor], batch: dict[str, Tensor]
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """See `SplatfactoModel.get_image_metrics_and_images`.

        Without LPIPS where its weights cannot be had. Colour-corrected metrics are NaN for an image whose colours admit
        no least-squares fit (nearly all of one colour, as after the first steps), which nerfstudio asserts not to meet.
        """
        corrected = self.config.color_corrected_metrics
        try:
            metrics, images = super().get_image_metrics_and_images(outputs, batch)
        except AssertionError:
            if not corrected:
                raise
            self.config.color_corrected_metrics = False
            try:
                metrics, images = super().get_image_metrics_and_images(outputs, batch)
            finally:
                self.config.color_corrected_metrics = True
            metrics |= dict.fromkeys(("cc_psnr", "cc_ssim", "cc_lpips"), float("nan"))
        if self._lpips.missing:
            metrics = {name: value for name, value in metrics.items() if not name.endswith("lpips")}
        return metrics, images
