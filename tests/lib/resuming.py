"""Short runs with all features, and the state that must be equal at their ends."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ns_multigpu.core.dist.collectives import all_gather_objects
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint import background as background_save
from ns_multigpu.plugin.run.trainer import DistributedTrainer
from tests.lib.training_run import set_up, small_config

MCMC = {"densifier": "mcmc", "max_gaussians": 80, "mcmc_min_opacity": 0.095, "noise_lr": 5e3}
DENSIFIERS: dict[str, dict[str, Any]] = {
    "splits": {},
    "mcmc": MCMC,
    "mcmc by gradients": {**MCMC, "mcmc_picks": "both"},
}
Model = dict[str, torch.Tensor]


def start(
    world: World, capture: Path, run: Path, steps: int, views: int = 1, *, method: str = "splatfacto-batch",
    **options: Any,
) -> DistributedTrainer:  # fmt: skip
    """Return a trainer that is set up for `steps` steps in all, of `views` views a rank, with densification early
    on."""
    config = small_config(capture, run, method, eps=1e-7)
    config.max_num_iterations, config.max_num_images, config.steps_per_checksum = steps, None, 1
    config.pipeline.views_per_rank = views
    model = config.pipeline.model
    model.num_downscales, model.camera_optimizer.mode, model.background_color = 0, "SO3xR3", "random"
    model.warmup_length, model.refine_every, model.reset_alpha_every, model.densify_grad_thresh = 2, 6, 50, 1e-9
    model.cull_alpha_thresh = 0.02
    for name, value in options.items():
        place = next((p for p in (model, config.pipeline, config.pipeline.datamanager) if hasattr(p, name)), config)
        setattr(place, name, value)
    return set_up(world, config)


def went_on(begin: Callable[..., DistributedTrainer], **options: Any) -> tuple[DistributedTrainer, DistributedTrainer]:
    """Return a run of eight steps, and one that resumes from its middle.

    Args:
        begin: called with the run's name, the steps of the whole run and options; gives a trainer that is set up.
    """
    whole = begin("whole", 8, steps_per_save=4, keep_checkpoints=0, **options)
    whole.train()
    resumed = begin("resumed", 8, load_checkpoint=middle_of(whole), **options)
    assert resumed._start_step == 5
    resumed.train()
    return whole, resumed


def middle_of(whole: DistributedTrainer) -> Path:
    """Return the checkpoint from which the second run of `went_on` resumed."""
    return whole.checkpoint_dir / "step-000000004.ckpt"


def in_double(world: World, *args: Any, **options: Any) -> DistributedTrainer:
    """Return a complete run in double precision. Rounding by another order of sums is far below Adam's eps."""
    load = DistributedTrainer._load_checkpoint

    def load_in_double(self: DistributedTrainer) -> None:
        self.pipeline.model.double()
        torch.set_default_dtype(torch.float64)
        load(self)
        torch.set_default_dtype(torch.float32)

    DistributedTrainer._load_checkpoint = load_in_double
    try:
        trainer = start(world, *args, **options)
        trainer.pipeline.held_out_quality = lambda _: None  # type: ignore[method-assign]  # held-out views stay single
        cameras = trainer.pipeline.datamanager.train_cameras_on_device
        cameras.camera_to_worlds = cameras.camera_to_worlds.double()
        torch.set_default_dtype(torch.float64)
        trainer.train()
    finally:
        torch.set_default_dtype(torch.float32)
        DistributedTrainer._load_checkpoint = load
    return trainer


def everything(trainer: DistributedTrainer) -> dict[str, torch.Tensor]:
    """Return all that must be the same: parameters, moments, rates, statistics of this rank."""
    found = {f"model/{name}": value.detach().clone() for name, value in trainer.pipeline.model.named_parameters()}
    for group, optimizer in trainer.optimizers.optimizers.items():
        (table,) = optimizer.param_groups
        found[f"{group}/rate"] = torch.tensor([table["lr"], *table["betas"], table["eps"]], dtype=torch.float64)
        for number, param in enumerate(table["params"]):
            for name, value in optimizer.state[param].items():
                found[f"{group}/{number}/{name}"] = value.clone()
    for name, value in trainer.pipeline.model.densifier_state.items():
        if isinstance(value, torch.Tensor):
            found[f"densifier/{name}"] = value.clone()
    return found


def whole(trainer: DistributedTrainer, world: World) -> Model:
    """Return the shards of all ranks, by place."""
    model, found = trainer.pipeline.model, everything(trainer)
    places = None if model.shard_index is None else model.shard_index.places
    parts = all_gather_objects((found, places), world)
    order = None if places is None else torch.sort(torch.cat([some for _, some in parts])).indices
    spread: list[str] = []
    if model.sharded:
        groups = tuple(f"{name}/0/" for name in model.gauss_params)
        spread = [name for name in found if name.startswith(("model/gauss_params.", "densifier/", *groups))]
        spread = [name for name in spread if found[name].dim() > 0]
    joined = {name: torch.cat([part[name] for part, _ in parts]) for name in spread}
    return found | {name: value if order is None else value[order] for name, value in joined.items()}


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 0.0) -> list[str]:
    if a.keys() != b.keys():
        return sorted(a.keys() ^ b.keys())
    if tolerance == 0:
        return [name for name in a if not torch.equal(a[name], b[name])]
    return [
        f"{name} {tuple(a[name].shape)} {tuple(b[name].shape)}"
        for name in a
        if a[name].shape != b[name].shape or not torch.allclose(a[name], b[name], rtol=tolerance, atol=tolerance)
    ]


def without_rates(found: Model) -> Model:
    """Return all but learning rates, which follow from the step and the batch."""
    return {name: value for name, value in found.items() if not name.endswith("/rate")}


def part_of(world: World, size: int) -> World | None:
    """Return the world of the first `size` ranks; all ranks call it, those beyond get None."""
    if size == 1:
        return World.single() if world.is_main else None
    group, control, writer_group = (dist.new_group(list(range(size)), backend="gloo") for _ in range(3))
    if world.rank >= size:
        return None
    background_save._groups[control] = writer_group  # type: ignore[index]  # it takes all ranks to make one
    return World(world.rank, size, world.rank, size, world.device, group, group, control)  # type: ignore[arg-type]
