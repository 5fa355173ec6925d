"""State of a run of splats in its checkpoints: saving it next to the model, and resuming from it."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.primitive import Primitive
from ns_multigpu.core.schema import HARMONICS, degree_of
from ns_multigpu.plugin.capture.datamanager import DistributedDataManager
from ns_multigpu.plugin.checkpoint import training_state as state
from ns_multigpu.plugin.checkpoint.atomic_save import Opened, together
from ns_multigpu.plugin.checkpoint.objective_kind import check_kind, named
from ns_multigpu.plugin.checkpoint.sharded_state import (
    PLACEMENT_STATE,
    POINTS,
    OwnMoments,
    put_statistics,
    shapes_in,
    split_state,
    without_points,
)
from ns_multigpu.plugin.checkpoint.training_copy import Content
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.model.optimizers import BatchOptimizers
from ns_multigpu.plugin.run.objective import Resumed
from ns_multigpu.plugin.splats.pipeline import DistributedPipeline

if TYPE_CHECKING:
    from ns_multigpu.plugin.splats.config import DistributedTrainerConfig

_OPTIONS = {
    "camera_optimizer": "--pipeline.model.camera-optimizer.mode",
    "bil_grids": "--pipeline.model.use-bilateral-grid",
    "exposures": "--pipeline.model.exposure",
}
"""Options that decide whether a model has a component."""
_NOT_CARRIED = ("_model.lpips.",)
"""Weights that nerfstudio's Splatfacto saves and ours loads on demand."""


class SplatState:
    """Saving and loading of a run of splats. Every rank calls each method.

    Args:
        config: a `DistributedTrainerConfig`. world: the ranks.
        pipeline, optimizers: saved and loaded; optimizers are already scaled for the batch.
    """

    def __init__(
        self, config: "DistributedTrainerConfig", world: World, pipeline: DistributedPipeline,
        optimizers: BatchOptimizers,
    ) -> None:  # fmt: skip
        self._config, self._world = config, world
        self._pipeline, self._optimizers = pipeline, optimizers

    def content(self, step: int) -> Content:
        """See `Objective.content`."""
        tensors, values = self._take(step)
        model = self._pipeline.model
        pipeline = partial(named, self._pipeline.state_dict, model.config.primitive)
        if not model.sharded:
            return Content(pipeline, tensors, values)
        rows, marker = split_state(tensors, dict(model.gauss_params.items()), self._world, model.shard_index)
        values["gaussians"] = sum(marker["counts"])
        return Content(lambda: without_points(pipeline(), marker), rows, values)

    def _take(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model, world, data = self._pipeline.model, self._world, self._pipeline.datamanager
        moments, plain = state.take_optimizers(self._optimizers.optimizers)
        statistics, settings = state.take_densifier(model.densifier_state, world.rank)
        clock = state.Clock(step + 1, self._pipeline.batch_size)
        values = {
            "strategy": self._pipeline.config.strategy,
            "primitive": model.config.primitive,
            "batch": clock.batch,
            "steps": clock.steps,
            "images": clock.images,
            "gaussians": model.num_points,
            "optimizer_state": model.config.optimizer_state,
            "seed": model.seed,
            "views": _views(data),
            "assignment": self._pipeline.strategy.assignment.state(),
            "optimizers": plain,
            "schedulers": {name: int(s.last_epoch) for name, s in self._optimizers.schedulers.items()},
            "scaler": {},  # older versions read it
            "densifier": {"kind": model.densifier.kind, "values": settings},
        }
        known = {PLACEMENT_STATE + name: value for name, value in self._pipeline.strategy.placement.state().items()}
        return {**moments, **statistics, **known}, values

    def resume(self, opened: Opened) -> Resumed:
        """See `Objective.resume`."""
        present = self._pipeline.state_dict()
        check_kind(opened.content["pipeline"], self._pipeline.model.config.primitive, str(opened.path))
        loaded = fitting(opened, present, str(self._config.method_name), self._pipeline.model.primitive(depth=False))
        _, problem = together(lambda: self._put(opened, loaded), self._world, InputError)
        if problem:
            raise InputError(problem)
        clock = _clock(opened).convert(self._pipeline.batch_size)
        return Resumed(clock.steps, clock == _clock(opened), self._report(opened, clock))

    def _put(self, opened: Opened, loaded: dict[str, Any]) -> None:
        pipeline, model, values = self._pipeline, self._pipeline.model, opened.values
        before = _clock(opened)
        now = before.convert(pipeline.batch_size)
        pipeline.config.checkpoints = opened.path.parent
        pipeline.load_pipeline(loaded, now.steps - 1)
        model.step = now.images
        own = pipeline.own_rows(loaded)
        plain: Mapping[str, Any] = {}
        if opened.tensors is None:
            saved, counts = _plain_optimizers(opened.content)
        else:
            saved, plain, counts = opened.tensors, values["optimizers"], values["schedulers"]
        saved = OwnMoments(saved, plain, list(model.gauss_params), own.total, own.rows, model.device)
        ratio, rule = before.batch / now.batch, self._optimizers.rate_schedule.rule
        state.put_optimizers(self._optimizers.optimizers, pipeline.get_param_groups(), saved, ratio, rule)
        if self._config.load_scheduler:
            counts = {name: state.Clock(count, before.batch).convert(now.batch).steps for name, count in counts.items()}
            state.move_schedulers(self._optimizers.schedulers, counts, now.steps)
        if opened.tensors is None:
            return
        model.prepare_densifier(self._world, int(values["seed"]))
        # Each strategy has rows of its own.
        if (values["views"], values["strategy"]) == (_views(pipeline.datamanager), pipeline.config.strategy):
            pipeline.strategy.assignment.load_state(values.get("assignment", []))
        read = opened.tensors.read
        if values["densifier"]["kind"] == model.densifier.kind:
            model.densifier_state.update(values["densifier"]["values"])
            left = put_statistics(
                model.densifier_state, opened.tensors, own.total, own.rows, model.sharded, self._world, model.device
            )
            state.put_densifier(model.densifier_state, left, read, values["ranks"], self._world, model.device)

    def _report(self, opened: Opened, now: state.Clock) -> list[str]:
        values, before = opened.values, _clock(opened)
        lines = [
            f"Resuming at step {now.steps:,} from {opened.path}: {before.images:,} images seen, "
            f"{self._pipeline.model.total_points:,} Gaussians, {_per_step(now.batch)}."
        ]
        if not values:
            lines.append("It was written by nerfstudio's own trainer.")
        elif (values["ranks"], before.batch) != (self._world.size, now.batch):
            lines.append(f"It was written by {values['ranks']} worker(s) with {_per_step(before.batch)}.")
        if now.images != before.images:
            lines.append(f"Its last {before.images - now.images} images begin the next step, and are seen twice.")
        kept, keeps = values.get("optimizer_state", "full"), self._pipeline.model.config.optimizer_state
        if kept != keeps:
            how = "rounded to bfloat16, once" if keeps == "compact" else "exactly what they were, as float32"
            lines.append(f"Its optimizer's state is {kept}, and is {keeps} from now on: Adam's moments are {how}.")
        if not values:
            lines.append("It has no statistics of densification: they are gathered again.")
        else:
            kind = self._pipeline.model.densifier.kind
            if values["densifier"]["kind"] != kind:
                lines.append(f"It was densified by {values['densifier']['kind']}, and is by {kind} from now on.")
            if values["views"] != _views(self._pipeline.datamanager):
                lines.append("Its training views, or the way they are drawn, were others: their order is new.")
        return lines


def fitting(opened: Opened, present: Mapping[str, Any], method: str, primitive: Primitive) -> dict[str, Any]:
    """Return the checkpoint's pipeline state after checking that it fits this run's.

    Args:
        present: this run's pipeline state.
        method: this run's method. primitive: its primitive.

    Raises:
        InputError: it is of another method, or of a model with other options; the message names the differences.
    """
    saved = {
        key.removeprefix("module.").replace("_model.module.", "_model.", 1): value
        for key, value in opened.content["pipeline"].items()
        if not key.startswith(_NOT_CARRIED)
    }
    writer = opened.values.get("method")
    whose = f"a checkpoint of {writer}" if writer else "a checkpoint of nerfstudio's own"
    shapes = shapes_in(saved)
    if not any(key.startswith(POINTS) for key in shapes):
        raise InputError(
            f"{opened.path} is {whose}, whose model is not made of {type(primitive).__name__}: {method} cannot go on "
            f"from it. Give a checkpoint of {method}."
        )
    by_degree = {POINTS + one.name: one.shape.index(HARMONICS) for one in primitive.schema if HARMONICS in one.shape}
    differences = [f"it has no {_short(key)}{_by(key)}" for key in present.keys() - shapes.keys()]
    differences += [f"it has {_short(key)}, which this run has not{_by(key)}" for key in shapes.keys() - present.keys()]
    for key in shapes.keys() & present.keys():
        there, here = shapes[key], tuple(present[key].shape)
        if key.startswith(POINTS):  # any number of points fits
            there, here = there[1:], here[1:]
        if there != here and key in by_degree:
            was, now = (degree_of(int(shape[by_degree[key]])) for shape in (there, here))
            differences.append(f"its harmonics are of degree {was}, here {now} (--pipeline.model.sh-degree {was})")
        elif there != here:
            differences.append(f"its {_short(key)} is of shape {list(there)}, here {list(here)}{_by(key)}")
    if differences:
        raise InputError(
            f"{opened.path} ({whose}) does not fit this run: {'; '.join(sorted(differences))}. Use the options and the "
            "capture that it was trained with (its run folder's config.yml has them)."
        )
    return saved


def _by(key: str) -> str:
    """Return the option that decides about a component of the model, in brackets; "" if there is none."""
    return next((f" ({option})" for part, option in _OPTIONS.items() if part in key), "")


def _short(key: str) -> str:
    return key.removeprefix("_model.").removeprefix("gauss_params.")


def _per_step(batch: int) -> str:
    return f"{batch} image{'' if batch == 1 else 's'} per step"


def _clock(opened: Opened) -> state.Clock:
    if opened.values:
        return state.Clock(int(opened.values["steps"]), int(opened.values["batch"]))
    return state.Clock(int(opened.content["step"]) + 1, 1)


def _plain_optimizers(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the moments, and the counts of the schedulers, in a checkpoint that nerfstudio's trainer wrote."""
    moments = {
        f"optimizers/{group}/{number}/{name}": value
        for group, table in content["optimizers"].items()
        for number, entry in table["state"].items()
        for name, value in entry.items()
    }
    return moments, {group: int(table["last_epoch"]) for group, table in content.get("schedulers", {}).items()}


def _views(datamanager: DistributedDataManager) -> list[Any]:
    """Return the properties that determine the order of the views."""
    config = datamanager.config
    return [
        len(datamanager.train_dataset),
        config.train_cameras_sampling_seed,
        config.train_cameras_sampling_strategy,
    ]
