"""Training state besides the model, read from the training objects and restored into them.

The state has two tables: tensors by name, which the ranks write together, and plain values. Statistics of densification
and generators are saved per rank; everything else is the same on all ranks.

A run that resumes with another batch keeps its clock, which counts images: `convert` adapts each part. Learning rates,
betas and eps are not saved. They follow from the configuration, the batch and the images seen.
"""

import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.model.batch_scaling import BY_ROOT, ScalingRule

Tensors = dict[str, Tensor]
Values = dict[str, Any]

MERGED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grad2d": torch.add,
    "count": torch.add,
    "radii": torch.maximum,
}
"""Merge function of the ranks' statistics, by their name in the densifier's state."""


# ---- optimizers and schedulers ----


def take_optimizers(optimizers: Mapping[str, torch.optim.Optimizer]) -> tuple[Tensors, Values]:
    """Return moments and step counters, as `optimizers/<group>/<number of the parameter>/<name>`."""
    tensors: Tensors = {}
    values: Values = {}
    for group, optimizer in optimizers.items():
        for number, param in enumerate(p for g in optimizer.param_groups for p in g["params"]):
            for name, value in optimizer.state.get(param, {}).items():
                place = tensors if isinstance(value, Tensor) else values
                place[f"optimizers/{group}/{number}/{name}"] = value
    return tensors, values


def put_optimizers(
    optimizers: Mapping[str, torch.optim.Optimizer],
    params: Mapping[str, Sequence[torch.nn.Parameter]],
    saved: Mapping[str, Any],
    ratio: float,
    rule: ScalingRule,
) -> None:
    """Restore optimizers from saved moments, with `params` as their parameters.

    A bias correction 1 - beta^(B t) is unchanged if the counter t is multiplied by `ratio`. Rules BY_ROOT assume
    independent gradients of views; then the second moment of their mean is inverse to B.

    Args:
        params: parameters by group; they may be other objects than the optimizers'.
        saved: both tables of `take_optimizers` in one; its tensors are used up.
        ratio: the batch they were saved with over the present one.
        rule: scaling rule of learning rates with the batch.
    """
    for group, optimizer in optimizers.items():
        new = iter(params[group])
        for table in optimizer.param_groups:
            table["params"] = [next(new) for _ in table["params"]]
        optimizer.state.clear()
        state: dict[int, dict[str, Any]] = {}
        prefix = f"optimizers/{group}/"
        for key in saved:
            if not key.startswith(prefix):
                continue
            value = saved[key]
            number, name = key[len(prefix) :].split("/", 1)
            if ratio != 1 and (name == "step" or (rule in BY_ROOT and name in ("exp_avg_sq", "max_exp_avg_sq"))):
                in_place = isinstance(value, Tensor) and value.is_floating_point()
                value = value.mul_(ratio) if in_place else value * ratio
            state.setdefault(int(number), {})[name] = value
        # The groups are the optimizer's own, so this loads only the state, to the right devices.
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def move_schedulers(schedulers: Mapping[str, Any], counts: Mapping[str, int], otherwise: int) -> None:
    """Advance new schedulers, already scaled to the batch, to `counts` steps.

    Args:
        schedulers, counts: by group.
        otherwise: count of a group without a scheduler in the saved run.
    """
    for group, scheduler in schedulers.items():
        count = counts.get(group, otherwise)
        if count < 1:
            continue
        with warnings.catch_warnings():
            # torch expects optimizer.step() first; the saved run has called it.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            if isinstance(scheduler, LambdaLR):  # its rate depends on the count alone, so it can be set
                scheduler.last_epoch = count - 1
                scheduler.step()
            else:
                for _ in range(count):
                    scheduler.step()


# ---- densification ----


def take_densifier(state: Mapping[str, Any], rank: int) -> tuple[Tensors, Values]:
    """Return this rank's statistics, as `rank<r>/densifier/<name>`, and the plain values."""
    tensors = {f"rank{rank}/densifier/{k}": v for k, v in state.items() if isinstance(v, Tensor)}
    return tensors, {k: v for k, v in state.items() if v is None or isinstance(v, (bool, int, float, str))}


def put_densifier(
    state: dict[str, Any],
    names: Sequence[str],
    read: Callable[[list[str]], Tensors],
    saved_ranks: int,
    world: World,
    device: torch.device,
) -> None:
    """Load the statistics of `saved_ranks` ranks on the ranks of `world`. Every rank calls it.

    With equally many ranks each loads its own. Otherwise they are distributed round-robin and merged. The result of
    densification is the same, since it uses the sum (or maximum) over all ranks.

    Raises:
        InputError: a statistic without a merge rule differs between the ranks.
    """
    names_of_state = sorted({name.split("/densifier/")[1] for name in names if "/densifier/" in name})
    for kind in names_of_state:
        of_rank = {r: f"rank{r}/densifier/{kind}" for r in range(saved_ranks)}
        of_rank = {r: name for r, name in of_rank.items() if name in names}
        if saved_ranks == world.size:
            mine = [world.rank] if world.rank in of_rank else []
        elif kind in MERGED:
            mine = [r for r in of_rank if r % world.size == world.rank]
        else:
            mine = list(of_rank)
        tables = list(read([of_rank[r] for r in mine]).values())
        if not tables:
            some = read([next(iter(of_rank.values()))])
            state[kind] = torch.zeros_like(next(iter(some.values())), device=device)
            continue
        merged = tables[0]
        for table in tables[1:]:
            if kind in MERGED:
                merged = MERGED[kind](merged, table)
            elif not torch.equal(merged, table):
                raise InputError(
                    f"The densifier's {kind!r} differs between the {saved_ranks} workers that wrote the checkpoint, "
                    f"and cannot be carried to {world.size}. Resume with {saved_ranks} workers."
                )
        state[kind] = merged.to(device)


# ---- generators ----


def take_generators(world: World) -> Tensors:
    """Return the states of this process's default generators, as `rank<r>/generators/<name>`."""
    _, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - nerfstudio draws from it
    assert name == "MT19937"
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),  # pyright: ignore
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if world.device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(world.device)
    return {f"rank{world.rank}/generators/{name}": value for name, value in tensors.items()}


def put_generators(names: Sequence[str], read: Callable[[list[str]], Tensors], world: World) -> None:
    """Restore the states of this process's default generators; a new rank takes rank 0's.

    Older checkpoints of radiance fields have none: their runs draw from seeds alone.
    """
    prefix = f"rank{world.rank}/generators/"
    if f"{prefix}torch" not in names:
        prefix = "rank0/generators/"
    if f"{prefix}torch" not in names:
        return
    state = {k[len(prefix) :]: v for k, v in read([name for name in names if name.startswith(prefix)]).items()}
    torch.set_rng_state(state["torch"])
    gauss = float(state["python_gauss"].item())
    random.setstate((3, tuple(state["python"].tolist()), None if gauss != gauss else gauss))
    words = state["numpy"].tolist()
    keys = np.array(words[:-2], dtype=np.uint32)
    np.random.set_state(("MT19937", keys, words[-2], words[-1], float(state["numpy_gauss"].item())))  # noqa: NPY002
    if world.device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], world.device)


# ---- the clock ----


@dataclass(frozen=True)
class Clock:
    """Position of a run.

    Attributes:
        steps: number of finished steps.
        batch: images per step.
    """

    steps: int
    batch: int

    @property
    def images(self) -> int:
        """Number of images seen."""
        return self.steps * self.batch

    def convert(self, batch: int) -> "Clock":
        """Return the same position for another batch. A step that lies across it is run completely: no view is omitted,
        and up to `batch - 1` are seen twice.
        """
        return self if batch == self.batch else Clock(self.images // batch, batch)
