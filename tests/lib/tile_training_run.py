"""Training runs with sharded points, and with replicas in the same order: whole models to compare."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ns_multigpu.core.dist.collectives import all_gather_ints, all_gather_objects
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.run.trainer import DistributedTrainer
from ns_multigpu.primitives.morton import interleaved_order
from tests.lib.training_run import follow

MODEL = "pipeline.model."
Outcome = dict[str, Any]


def train_model(
    world: World, tile: bool, capture: Path, runs: Path, options: Mapping[str, Any], steps: int, views: int,
    *, double: bool = True,
) -> Outcome:  # fmt: skip
    """Train with `tile` on all of `world`, or with `batch` on a world of one, in order from the start.

    Args:
        world: this process's. capture, runs, options, steps, double: see `follow`.
        tile: whether with `tile`.
        views: of a step, over all ranks.

    Returns:
        On every rank, of the whole model: `parameters` and `moments` by name; `points`, the numbers after each
        refinement, (image, number); `rebalanced`, whether ranges were cut again; `shards`, each rank's number at
        the end; `metrics` on the held-out views.
    """
    refined: list[tuple[int, int]] = []
    rebalanced: list[bool] = []

    def ready(trainer: DistributedTrainer) -> None:
        model = trainer.pipeline.model
        if not model.sharded:
            order = interleaved_order(model.means.detach())
            for value in model.gauss_params.values():
                value.data = value.detach()[order]
        mcmc = model.config.densifier == "mcmc"
        name = "refine_when_due" if mcmc else "_refine"
        refine = getattr(model.densifier, name)

        def counted(params: Any, *rest: Any) -> None:
            before = getattr(model.densifier, "reordering", None)
            refine(params, *rest)
            if mcmc and not model.densifier.due_after(*rest[-2:]):
                return
            record = getattr(model.densifier, "reordering", None)
            rebalanced.append(record is not before and record.rebalanced)
            refined.append((model.step, sum(row[0] for row in all_gather_ints([len(params["means"])], world))))

        setattr(model.densifier, name, counted)
        if mcmc:
            ahead = model.densifier.refine_ahead

            def counted_ahead(params: Any, *rest: Any) -> bool:
                done, taken = ahead(params, *rest), rest[-1]
                if done and bool(taken):
                    rebalanced.append(False)
                    refined.append((rest[-3], sum(row[0] for row in all_gather_ints([len(params["means"])], world))))
                return bool(done)

            model.densifier.refine_ahead = counted_ahead

    options = {MODEL + "morton_order": True, **options}
    if tile:
        options["pipeline.views_per_step"] = views
    method = "splatfacto-tile" if tile else "splatfacto-batch"
    trainer = follow(world, capture, runs, options, steps, views, method=method, double=double, ready=ready)
    model = trainer.pipeline.model
    rows = {f"gauss_params.{name}": value.detach().clone() for name, value in model.gauss_params.items()}
    others = {n: p.detach().clone() for n, p in model.named_parameters() if n not in rows}
    replicated: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    for name, optimizer in trainer.optimizers.optimizers.items():
        for state in optimizer.state.values():
            for key, value in state.items():
                place = moments if name in model.gauss_params and value.dim() else replicated
                place[f"{name}.{key}"] = value.clone()
    without = [name for name, value in model.named_parameters() if value.grad is None and value.numel()]
    model.float()
    model.lpips.missing = True
    measured = trainer.pipeline.get_average_eval_image_metrics()
    return {
        "parameters": {**_whole(rows, world, model.sharded), **others},
        "moments": {**_whole(moments, world, model.sharded), **replicated},
        "points": refined,
        "rebalanced": rebalanced,
        "shards": [row[0] for row in all_gather_ints([len(model.means)], world)],
        "without gradient": without,
        "metrics": {k: v for k, v in measured.items() if k not in ("fps", "num_rays_per_sec")},
    }


def _whole(rows: dict[str, Tensor], world: World, sharded: bool) -> dict[str, Tensor]:
    """Return all ranks' rows, one rank's after the other's."""
    if not sharded:
        return rows
    parts = all_gather_objects(rows, world)
    return {name: torch.cat([part[name] for part in parts]) for name in rows}


def furthest(found: Outcome, wanted: Outcome) -> dict[str, float]:
    """By parameter and moment, how far `found` is from `wanted`, in units of its largest element."""
    for kind in ("parameters", "moments"):
        assert found[kind].keys() == wanted[kind].keys()
        assert {n: v.shape for n, v in found[kind].items()} == {n: v.shape for n, v in wanted[kind].items()}
    return {
        name: float((found[kind][name] - value).abs().max()) / max(float(value.abs().max()), 1e-30)
        for kind in ("parameters", "moments")
        for name, value in wanted[kind].items()
        if value.numel()
    }
