"""Nerfstudio's own method `splatfacto`, trained on the CPU: what ours is held against.

Trainer, pipeline, datamanager, model, loss, optimizers and gsplat's densification are the installed ones, unchanged.
What is replaced is what a CPU or a comparison cannot do without:

- gsplat's `rasterization`, whose kernels are CUDA only, by our CPU operators (`benchmarks.captures.our_rasterization`);
- `Tensor.cuda()`, by nothing; `torch.compile`, by the function itself;
- LPIPS, whose weights would have to be fetched, by nothing: it takes no part in training;
- chance: the start is given, and the default generator is seeded before each background and each refinement as ours is
  for them; views come as nerfstudio draws them;
- where asked for, L1 and SSIM, by our operator of them; and single precision, by double, in which pixels are cast and
  SSIM's window is computed.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gsplat.strategy import DefaultStrategy
from gsplat.strategy import default as rules
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackLocation
from nerfstudio.engine.trainer import Trainer
from nerfstudio.models.splatfacto import SplatfactoModel
from pytorch_msssim import SSIM
from torch import Tensor

from benchmarks.captures.our_rasterization import rasterization
from ns_multigpu.core.random import seed_from
from ns_multigpu.core.step.loss import photometric_loss
from ns_multigpu.core.types import Patch, View
from tests.lib.training_run import small_config

STATISTICS = ("grad2d", "count", "radii")
"""Statistics that gsplat's densification stores for each Gaussian between refinements."""

_SIGMA = inspect.signature(SSIM).parameters["win_sigma"].default


@dataclass(frozen=True)
class Refinement:
    """One growing and pruning: the step, how many points, and the statistics [N] that decided it."""

    step: int
    duplicated: int
    split: int
    pruned: int
    statistics: dict[str, Tensor]


@dataclass
class StockRun:
    """Record of a run of nerfstudio's method.

    Attributes:
        trainer: with everything that it trained.
        start: its own parameters before those given were put in their place.
        refinements: in order.
        lowered: how many opacities each reset made smaller, by step.
    """

    trainer: Trainer
    start: dict[str, Tensor]
    refinements: list[Refinement] = field(default_factory=list)
    lowered: dict[int, int] = field(default_factory=dict)


def follow_stock(
    capture: Path, runs: Path, options: Mapping[str, Any], steps: int, start: Mapping[str, Tensor], seed: int,
    *, eps: float, double: bool = True, our_loss: bool = False,
) -> StockRun:  # fmt: skip
    """Train nerfstudio's `splatfacto` for so many steps of a view each.

    Args:
        capture: folder that `write_capture` wrote.
        runs: folder to write the run's folder to.
        options: of the model, by name.
        steps: how many.
        start: the parameters to begin with, by name.
        seed: the seed that our run drew backgrounds and splits by.
        eps: of Adam.
        double: whether to train in double precision.
        our_loss: whether our L1 and SSIM take the place of nerfstudio's, which round otherwise.
    """
    config = small_config(capture, runs, "splatfacto", eps)
    config.max_num_iterations = steps
    config.viewer.quit_on_train_completion = True
    config.pipeline.datamanager.cache_images_type = "float32" if double else "uint8"
    for name, value in options.items():
        assert hasattr(config.pipeline.model, name), name
        setattr(config.pipeline.model, name, value)
    config.get_base_dir().mkdir(parents=True)
    with _on_the_cpu():
        trainer: Trainer = config.setup(local_rank=0, world_size=1)
        trainer.setup()
        model: Any = trainer.pipeline.model
        run = StockRun(trainer, {n: p.detach().clone() for n, p in model.gauss_params.items()})
        for name, value in model.gauss_params.items():
            value.data.copy_(start[name])
        _draw_as_ours(trainer, seed)
        if our_loss:
            model.get_loss_dict = _our_loss(model)
        with _recorded(model.strategy, run), _precision(trainer, double):
            trainer.train()
    return run


@contextmanager
def _on_the_cpu() -> Iterator[None]:
    """Make nerfstudio's model possible without a GPU and without a network."""
    lpips = "torchmetrics.image.lpip.LearnedPerceptualImagePatchSimilarity"
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(mock.patch("nerfstudio.models.splatfacto.rasterization", rasterization))
        stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda self: self))
        stack.enter_context(mock.patch(lpips, lambda normalize: torch.nn.Identity()))
        yield


def _draw_as_ours(trainer: Trainer, seed: int) -> None:
    """Make nerfstudio's draws come out as ours: backgrounds, and where halves of a split go."""

    def before(step: int) -> None:
        torch.manual_seed(seed_from(seed, "background", step))

    def after(step: int) -> None:
        torch.manual_seed(seed_from(seed, "densify", step))

    # In front of the model's, which refines.
    trainer.callbacks[:0] = [
        TrainingCallback([TrainingCallbackLocation.BEFORE_TRAIN_ITERATION], before),
        TrainingCallback([TrainingCallbackLocation.AFTER_TRAIN_ITERATION], after),
    ]


def _our_loss(model: SplatfactoModel) -> Callable[..., dict[str, Tensor]]:
    """Return nerfstudio's losses, with our L1 and SSIM."""
    losses = model.get_loss_dict

    def get_loss_dict(outputs: dict[str, Tensor], batch: dict[str, Tensor], metrics: Any) -> dict[str, Tensor]:
        image, rgb = batch["image"], outputs["rgb"]
        target = image if model._get_downscale_factor() == 1 else model.get_gt_img(image)
        height, width = rgb.shape[:2]
        view = View(torch.eye(4), torch.eye(3), width, height, index=0, time=0.0)
        ours = photometric_loss(rgb, target, Patch.whole(0, view), view, model.config.ssim_lambda)
        return losses(outputs, batch, metrics) | {"main_loss": ours}

    return get_loss_dict


@contextmanager
def _recorded(strategy: DefaultStrategy, run: StockRun) -> Iterator[None]:
    """Note in `run` what densification does."""
    grow, prune, reset = strategy._grow_gs, strategy._prune_gs, rules.reset_opa
    grown: dict[str, Any] = {}

    def grow_gs(params: Any, optimizers: Any, state: dict[str, Any], step: int) -> tuple[int, int]:
        grown["statistics"] = {name: state[name].clone() for name in STATISTICS if state.get(name) is not None}
        grown["duplicated"], grown["split"] = result = grow(params, optimizers, state, step)
        return result

    def prune_gs(params: Any, optimizers: Any, state: dict[str, Any], step: int) -> int:
        pruned = prune(params, optimizers, state, step)
        run.refinements.append(Refinement(step, pruned=pruned, **grown))
        return pruned

    def reset_opa(params: Any, value: float, **rest: Any) -> None:
        above = int((params["opacities"].sigmoid() > value).sum())
        reset(params=params, value=value, **rest)
        run.lowered[run.trainer.step] = above

    with (
        mock.patch.object(strategy, "_grow_gs", grow_gs),
        mock.patch.object(strategy, "_prune_gs", prune_gs),
        mock.patch.object(rules, "reset_opa", reset_opa),
    ):
        yield


@contextmanager
def _precision(trainer: Trainer, double: bool) -> Iterator[None]:
    """Run nerfstudio's training in double precision, if requested."""
    data: Any = trainer.pipeline.datamanager
    model: Any = trainer.pipeline.model
    _ = data.cached_train  # what reads the images sets the cameras
    if not double:
        yield
        return
    model.double()
    data.train_cameras.camera_to_worlds = data.train_cameras.camera_to_worlds.double()
    # gsplat counts in single precision and keeps the count in the default one, which must be the same.
    model.strategy_state["count"] = torch.zeros(len(model.means), dtype=torch.float32)
    # Its images are in single precision whatever the default is, and so are the taps of its loss's window.
    get_gt_img, window = model.get_gt_img, model.ssim
    model.get_gt_img = lambda image: get_gt_img(image).double()
    taps = torch.exp(-((torch.arange(window.win_size).double() - window.win_size // 2) ** 2) / (2 * _SIGMA**2))
    window.win = (taps / taps.sum()).expand_as(window.win).clone()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
