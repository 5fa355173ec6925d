"""Splatfacto's options, and those of MCMC added."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from nerfstudio.models.splatfacto import SplatfactoModelConfig

from ns_multigpu.plugin.launch.option_help import Only
from ns_multigpu.plugin.model import exposures
from ns_multigpu.plugin.model.splat_model import SplatModel
from ns_multigpu.primitives.registry import FIRST, PrimitiveName

_CONVEX = Only("pipeline.model.primitive", "convex")
_DEPTH = Only("pipeline.model.depth_loss")
_FLAT = Only("pipeline.model.primitive", "2dgs")
_MCMC = Only("pipeline.model.densifier", "mcmc")
_FROM_FILE = Only("load_ply")
_SHARDED = Only("pipeline.strategy", "tile", "locality")


@dataclass
class SplatModelConfig(SplatfactoModelConfig):
    """Splatfacto's options, under their own names. Those that count steps count images seen, over all ranks.

    The options of MCMC bear the names of nerfstudio's later versions, where its `strategy` is our `densifier`.
    """

    _target: type = field(default_factory=lambda: SplatModel)
    primitive: PrimitiveName = FIRST
    """Primitive of the model: "3dgs", 3D Gaussians; "2dgs", flat ones, which lie on surfaces (Huang et al. 2024);
    "4dgs", Gaussians over space and time, for captures whose views have times (Yang et al. 2024); "convex", 3D convex
    shapes with edges as sharp as need be (Held et al. 2024). See docs/methods/primitives.md for their features. Add a
    primitive to --help to see its options: --help --pipeline.model.primitive convex."""
    densify_grad_thresh_convex: Annotated[float, _CONVEX] = 0.0008
    """Densification threshold of convexes, in the place of densify-grad-thresh. It applies to the gradient itself, and
    use-absgrad has no effect. A split makes six of one."""
    cull_alpha_thresh_convex: Annotated[float, _CONVEX] = 0.03
    """With convex, what cull-alpha-thresh is for 3dgs: convexes of less opacity are removed. A split halves opacity."""
    densify_grad_thresh_2dgs: Annotated[float, _FLAT] = 0.0002
    """With 2dgs, what densify-grad-thresh is for 3dgs. Of 2D Gaussians the gradient itself counts, as published, and
    use-absgrad is not read."""
    normal_loss: Annotated[float, _FLAT] = 0.05
    """With 2dgs, weight of the loss by which rendered normals and those of the depth agree; 0 for none."""
    normal_loss_start: Annotated[int, _FLAT] = 7000
    """With 2dgs, number of images seen before the normal loss applies."""
    distortion_loss: Annotated[float, _FLAT] = 0.0
    """With 2dgs, weight of the depth distortion, which concentrates the splats of a ray; 0 for none. It is in the
    capture's units: larger for smaller scenes."""
    distortion_loss_start: Annotated[int, _FLAT] = 3000
    """With 2dgs, number of images seen before the depth distortion applies."""
    depth_loss: float = 0.0
    """Weight of the loss by which the depth that is drawn agrees with the capture's depth maps, or else with COLMAP's
    points where a view observes them: of disparities, in units of the scene; 0 for none. The published weight is 0.01.
    It needs depth maps or COLMAP's tracks."""
    depth_loss_start: Annotated[int, _DEPTH] = 0
    """Number of images seen before the depth loss applies."""
    depth_maps: Annotated[Literal["metric", "relative", "inverse", "off"], _DEPTH] = "metric"
    """Kind of the capture's depth maps (depth_file_path in transforms.json, or colmap's depths-path), for depth-loss:
    "metric", in the capture's unit; "relative", up to scale, or "inverse", disparities up to scale and shift as
    monocular estimators give, both fitted to COLMAP's points view by view; "off" takes those points alone."""
    normal_map_loss: float = 0.0
    """Weight of the loss by which drawn normals agree with the capture's normal maps (normal_file_path in
    transforms.json, or the folder normals of COLMAP's layout); 0 for none. 2D Gaussians' own normals are compared, of
    others those of the drawn depth. See docs/methods/primitives.md#normal-maps."""
    sky_loss: float = 0.0
    """Weight of the loss by which nothing is drawn where the capture's masks have sky (sky_mask_path in
    transforms.json, or the folder sky_masks of COLMAP's layout); 0 reads no such masks. Pixels of the sky then train no
    colours. See docs/use/recipes.md#sky."""
    exposure: exposures.Choice = "off"
    """Correction of each training view, for photographs of different exposure or white balance: "gain" trains a gain of
    each channel, "off" none, and "auto" trains them if the photographs differ. Held-out views and rendered images have
    none. See docs/use/recipes.md#exposure."""
    optimizer_state: Literal["full", "compact"] = "full"
    """Storage of Adam's two moments of every parameter of the Gaussians: "full" is float32, 8 bytes a parameter and 472
    a Gaussian; "compact" is bfloat16 with stochastic rounding, half of that. With compact a Gaussian takes 484 bytes in
    all instead of 720. For fused steps only (see --fused-steps)."""
    far_plane: float | None = None
    """Largest depth at which points are drawn, in the run's units: cameras lie within 1 of the origin unless the
    dataparser scales otherwise. For streets, which views see along: about a sixteenth of the scene. "None": no limit.
    Training, evaluation, rendering and the viewer apply it."""
    radius_clip: float = 0.0
    """Pixels: a splat is not drawn if its half extents on the screen are at most this, as with gsplat's radius_clip. 0
    draws all; 3 is usual for streets."""
    densifier: Literal["default", "mcmc"] = "default"
    """Rule that adds and removes points: "default" splits, clones and prunes; "mcmc" relocates, up to max-gaussians.
    Add it to --help to see the options of MCMC: --help --pipeline.model.densifier mcmc."""
    morton_order: bool = False
    """Order the Gaussians, at every tenth refinement, along a Morton curve within small cells, distributed round-robin:
    neighbours in space are neighbours in memory. If they are sharded over GPUs, that is always done."""
    rebalance_above: Annotated[float, _SHARDED] = 1.1
    """If the Gaussians are sharded: reshard them, at a refinement, once a GPU has more than this times the mean of the
    work."""
    max_gaussians: Annotated[int | None, tyro.conf.arg(aliases=("--pipeline.model.max-gs-num",))] = None
    """The most Gaussians the whole model may have, over all ranks. "None" with default: what fits the GPUs' memory (see
    docs/use/planning.md), on a CPU any number. "None" with mcmc: as many as suit the capture; the start of a run says
    how many. The alias is later nerfstudios' name."""
    gs_per_seed: Annotated[int, _MCMC] = 9
    """With mcmc and max-gaussians None, how many Gaussians for each of the first 30,000 seed points."""
    noise_lr: Annotated[float, _MCMC] = 5e5
    """With mcmc, noise on positions in units of their learning rate; 0 adds none."""
    mcmc_opacity_reg: Annotated[float, _MCMC] = 0.02
    """With mcmc, weight in the loss of the opacities that an image's view draws, over the number of Gaussians."""
    mcmc_scale_reg: Annotated[float, _MCMC] = 0.02
    """With mcmc, weight in the loss of the scales that an image's view draws, over three times that number."""
    mcmc_whole_step_scale: Annotated[float, _MCMC] = 0.0
    """With mcmc, the scale from which on a Gaussian's position takes whole steps of Adam, in the run's units. Smaller
    Gaussians move in proportion to the middle one of their three scales. 0: all take whole steps."""
    mcmc_min_opacity: Annotated[float, _MCMC] = 0.005
    """With mcmc, a Gaussian of at most this opacity is dead and gets relocated."""
    mcmc_picks: Annotated[Literal["opacity", "gradient", "both"], _MCMC] = "opacity"
    """With mcmc, where relocated and added Gaussians go: onto those of high opacity, as in the paper; onto those of
    steep gradients on screen, which default densification would split; or by the product of both."""
    load_ply: Annotated[Path | None, tyro.conf.arg(prefix_name=False)] = None
    """PLY file of Gaussians that a new run begins from, instead of seed points: ns-export's, ours, Inria's or gsplat's.
    Each GPU reads its own part. All harmonics are drawn from the start. See docs/use/data.md#begin-from-a-ply-file."""
    load_ply_frame: Annotated[Literal["run", "capture"], tyro.conf.arg(prefix_name=False), _FROM_FILE] = "run"
    """With load-ply, the file's frame: "run", that of exports of runs with the same capture and dataparser options;
    "capture", that of the capture's files, as Inria's trainer writes it."""
    initial_opacity: float = 0.1
    """Opacity of the Gaussians that training starts from."""
    initial_scale: float = 1.0
    """Standard deviations of the Gaussians that training starts from, in units of the mean distance to the three
    nearest seed points."""
