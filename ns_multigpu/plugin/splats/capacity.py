"""Model size of a run: what memory holds, the densification cap, and a warning about pruning by size."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from nerfstudio.cameras.cameras import CameraType
from nerfstudio.utils.rich_utils import CONSOLE
from rich.text import Text
from torch import Tensor

from ns_multigpu.core.dist.collectives import all_gather_ints
from ns_multigpu.core.dist.world import World
from ns_multigpu.planning.memory import most_points
from ns_multigpu.planning.outlook import SOME_SIZE, described, outlook
from ns_multigpu.planning.quantities import gib
from ns_multigpu.planning.work import STRATEGIES, VISIBLE, Workload
from ns_multigpu.plugin.capture.seed_points import CaptureViews, seen_points
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.faults.host_memory import available_memory
from ns_multigpu.plugin.faults.memory import free_bytes
from ns_multigpu.plugin.model.optimizers import BatchOptimizers
from ns_multigpu.plugin.model.splat_model import SplatModel
from ns_multigpu.primitives.densify.cap import chosen_cap

if TYPE_CHECKING:
    from ns_multigpu.plugin.splats.pipeline import DistributedPipeline

_SOME = 1000
"""Number of points and of views, about, that a visible fraction is measured with."""


@dataclass(frozen=True)
class Capacity:
    """Memory capacity of all ranks by the planning model; the same on every rank.

    Attributes:
        now: points of the whole model.
        fits: points of the largest model that fits; None if unknown.
        memory: bytes that the rank with the least memory may use for the model and its steps.
        workload: the run that the figures are for.
        on_gpu: True for GPU memory.
    """

    now: int
    fits: int | None
    memory: int
    workload: Workload
    on_gpu: bool


def measure(pipeline: "DistributedPipeline", optimizers: BatchOptimizers, world: World, *, fused: bool) -> Capacity:
    """Return the largest model that fits the devices' free memory by the planning model. Every rank calls it.

    Args:
        pipeline: a `DistributedPipeline`, ready to train. optimizers: its `BatchOptimizers`.
        fused: whether steps are fused.
    """
    model, cameras = pipeline.model, pipeline.datamanager.train_dataset.cameras
    width, height = int(cameras.width.max()), int(cameras.height.max())
    workload = Workload(
        max(model.total_points, 1), width, height, pipeline.batch_size, world.size, model.config.sh_degree, fused=fused,
        compact=model.config.optimizer_state == "compact", machines=world.machines, schema=model.schema,
    )  # fmt: skip
    budget = usable_memory(world, _model_bytes(model, optimizers))
    least = min(row[0] for row in all_gather_ints([-1 if budget is None else budget], world))
    name, fits = pipeline.strategy.name, None
    if least >= 0 and name in STRATEGIES:
        fits = most_points(name, workload, float(least), densify=True)
    return Capacity(model.total_points, fits, least, workload, free_bytes(world.device) is not None)


def usable_memory(world: World, model: int) -> int | None:
    """Return the bytes available to the model and its steps on this rank; None if unknown.

    Args:
        model: bytes of the model, which are already allocated.
    """
    free = free_bytes(world.device)
    if free is not None:
        return free + model
    available = available_memory()
    return None if available is None else available // world.host_size + model


def _model_bytes(model: SplatModel, optimizers: BatchOptimizers) -> int:
    points = {id(param): param for param in model.gauss_params.values()}
    tensors = list(points.values())
    tensors += [param.grad for param in points.values() if param.grad is not None]
    for optimizer in optimizers.optimizers.values():
        for param, state in optimizer.state.items():
            if id(param) in points:
                tensors += [value for value in state.values() if torch.is_tensor(value)]
    tensors += [value for value in model.densifier_state.values() if torch.is_tensor(value)]
    return sum(tensor.nbytes for tensor in tensors if tensor.device == model.device)


def choose_cap(model: SplatModel, cameras: Any) -> None:
    """Set the cap to a number of Gaussians that suits the capture, the same on every rank, for MCMC without a given
    cap.

    Args:
        model: a `SplatModel` with the points that training starts from. cameras: the training views'.

    Raises:
        InputError: `gs_per_seed` is below 1.
    """
    options, seeds = model.config, model.seed_points
    if options.gs_per_seed < 1:
        raise InputError(f"--pipeline.model.gs-per-seed {options.gs_per_seed}: give 1 or more.")
    if options.densifier != "mcmc" or options.max_gaussians is not None:
        return
    count = 0 if options.random_init or seeds is None else len(seeds[0])
    pixels = int((cameras.width.long() * cameras.height.long()).sum())
    model.chosen_cap = chosen_cap(model.total_points, count, pixels, options.gs_per_seed)
    options.max_gaussians = model.chosen_cap.points


def cap_of(found: Capacity, wanted: int | None) -> int | None:
    """Return the most points that densification may make: `wanted`, or on GPUs what fits; None for no limit."""
    return wanted if wanted is not None else found.fits if found.on_gpu else None


def announce(pipeline: "DistributedPipeline", optimizers: BatchOptimizers, world: World, *, fused: bool) -> Capacity:
    """Cap the default densifier and print, on rank 0, the number of points, what fits, and the cap.

    Every rank calls it, before the first step, with the same arguments as `measure`.

    Raises:
        InputError: the given cap is below 1.
    """
    options = pipeline.model.config
    if options.max_gaussians is not None and options.max_gaussians < 1:
        raise InputError(
            f"--pipeline.model.max-gaussians {options.max_gaussians}: give how many Gaussians there may be, "
            "1 or more, or leave it out."
        )
    found, model = measure(pipeline, optimizers, world, fused=fused), pipeline.model
    densifier: Any = model.densifier
    why = None
    if model.chosen_cap is not None:
        chosen = model.chosen_cap.within(found.fits if found.on_gpu else None, found.now)
        densifier.cap_max, why = chosen.points, chosen.why
    cap = cap_of(found, options.max_gaussians)
    cap = densifier.limit(cap, _Reported(cap, world))
    if world.is_main:
        text, worrying = describe(found, pipeline.strategy.name, cap, why)
        CONSOLE.print(Text(text, "bold yellow" if worrying else ""), soft_wrap=True)
        visible = visible_fraction(model.seed_points, pipeline.datamanager.train_dataset.cameras)
        for line in expectations(found, pipeline.strategy.name, cap, options.densifier, visible):
            CONSOLE.print(Text(line), soft_wrap=True)
    return found


def visible_fraction(seeds: tuple[Tensor, Tensor] | None, cameras: Any) -> float:
    """Return the mean fraction of the seed points that a view shows, of some of both; the planning scene's without any.

    Args:
        seeds: positions [N, 3] and colours [N, 3] of the points, or None. cameras: of the views, in the same frame.
    """
    if seeds is None or len(seeds[0]) == 0:
        return VISIBLE
    xyz = seeds[0][:: max(1, len(seeds[0]) // _SOME)].double().cpu().numpy()
    some = cameras[:: max(1, len(cameras) // _SOME)]
    poses = np.tile(np.eye(4), (len(some), 1, 1))
    poses[:, :3] = some.camera_to_worlds.cpu().numpy()
    lenses, sizes = (
        torch.cat(columns, 1).double().cpu().numpy()
        for columns in ((some.fx, some.fy, some.cx, some.cy), (some.width, some.height))
    )
    panorama = bool((some.camera_type == CameraType.EQUIRECTANGULAR.value).any())
    shown = seen_points(CaptureViews(poses, lenses, sizes, is_panorama=panorama), xyz)
    return max(float(shown.mean()) / len(xyz), 1 / len(xyz))


def expectations(
    found: Capacity, strategy: str, cap: int | None, densifier: str, visible: float = VISIBLE
) -> list[str]:
    """Return lines on the expected performance of each strategy on these GPUs; none without a choice, or
    without a GPU. `visible`: see `Workload`."""
    if not found.on_gpu or found.workload.gpus == 1 or strategy not in STRATEGIES:
        return []
    grown = cap if densifier == "mcmc" and cap is not None else SOME_SIZE
    memory = float(found.memory) if found.memory >= 0 else None
    sizes = dict.fromkeys((found.now, max(grown, found.now)))
    workload = replace(found.workload, visible=visible, scene="auto")
    return described([outlook(strategy, workload, points, memory) for points in sizes], strategy, workload.gpus)


def describe(found: Capacity, strategy: str, cap: int | None, why: str | None = None) -> tuple[str, bool]:
    """Return the line on capacity, and whether it is a warning."""
    text = f"Gaussians: {found.now:,} at the start, no cap (--pipeline.model.max-gaussians sets one)."
    if cap is not None:
        reason = why or ("what fits in memory" if cap == found.fits else "")
        option = f"{reason}; --pipeline.model.max-gaussians" if reason else "--pipeline.model.max-gaussians"
        text = f"Gaussians: {found.now:,} at the start, cap {cap:,} ({option})."
    if found.fits is not None:
        each, fits = "GPU" if found.on_gpu else "worker", found.fits
        about = f"{fits / 1e6:,.1f} million" if fits >= 1e6 else f"{fits:,}"
        text += f" About {about} fit in memory ({gib(found.memory)} GiB per {each}, strategy {strategy})."
    worries = []
    if found.fits is not None and found.now > found.fits:
        worries.append("The model may not fit: use splatfacto-tile on more GPUs, fewer views a step, smaller images.")
    elif found.fits is not None and cap is not None and cap > found.fits:
        worries.append("Memory may run out before that: see --pipeline.model.max-gaussians.")
    return " ".join([text, *worries]), bool(worries)


MANY = 0.1
"""Fraction of the model above which the warning is printed. Of seed points on a phone's captures 1 in 7,000 is so
large."""


@torch.no_grad()
def warn_of_size_rule(model: SplatModel, world: World, images: int) -> None:
    """Print a warning, on rank 0, if pruning by size would remove a large part of the model. Every rank calls it.

    From its first reset of opacities (image 3,000), splatfacto prunes Gaussians larger than `cull-scale-thresh`. The
    unit follows from the cameras' positions. If cameras stand close together, as on one rig, a street is fifty units
    wide and three quarters of its Gaussians are larger. They are then pruned at once, and quality does not recover
    (docs/methods/moving-scenes.md). If cameras surround the scene, hardly any are larger.

    Args:
        model: a `SplatModel`. images: number of images that the run sees in all.
    """
    rules: Any = model.densifier
    limit = getattr(rules, "prune_scale3d", None)  # MCMC prunes nothing by size
    if limit is None or min(images, rules.refine_stop_iter) <= rules.reset_every:
        return
    sizes = rules.split_rule.sizes(model.gauss_params)
    large = int((sizes > limit * model.densifier_state["scene_scale"]).sum())
    table = all_gather_ints([large, len(sizes)], world)
    part = sum(row[0] for row in table) / max(sum(row[1] for row in table), 1)
    if world.is_main and part > MANY:
        CONSOLE.print(Text(size_rule_text(part, limit, rules.reset_every), "bold yellow"))


def size_rule_text(part: float, limit: float, begins: int) -> str:
    """Return the warning.

    Args:
        part: fraction of the model that is larger than `limit`. begins: images after which it is pruned.
    """
    return (
        f"{100 * part:.0f} % of the Gaussians are larger than --pipeline.model.cull-scale-thresh {limit:g}, and will "
        f"be pruned after image {begins:,}: quality may collapse there. The cameras stand close together compared with "
        "what they see. Give --pipeline.model.cull-scale-thresh inf, or use --recipe best, which never prunes by size."
    )


class _Reported:
    """Printer of one message, on rank 0, when the cap first limits growth."""

    def __init__(self, cap: int | None, world: World) -> None:
        self._cap, self._world, self._done = cap, world, False

    def __call__(self, wanted: int) -> None:
        if self._done or not self._world.is_main:
            return
        self._done = True
        CONSOLE.print(
            Text(
                f"A refinement would have made {wanted:,} Gaussians; the cap is {self._cap:,}. It has only pruned, as "
                "will each that would exceed the cap. To allow more: --pipeline.model.max-gaussians N, or more GPUs "
                "with splatfacto-tile.",
                "bold yellow",
            )
        )
