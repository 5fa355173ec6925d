"""A run's checkpoints, seen from its trainer: what goes into them, and how a run goes on from one."""

import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nerfstudio.utils.rich_utils import CONSOLE
from rich.text import Text
from torch import Tensor

import ns_multigpu
from ns_multigpu.core.primitive import Primitive
from ns_multigpu.core.schema import HARMONICS, degree_of
from ns_multigpu.core.world import World
from ns_multigpu.plugin.checkpoint import training_state as state
from ns_multigpu.plugin.checkpoint.background import CheckpointWriter, Content
from ns_multigpu.plugin.checkpoint.kind import check_kind, named
from ns_multigpu.plugin.checkpoint.sharded_state import (
    KNOWLEDGE,
    POINTS,
    OwnMoments,
    put_statistics,
    shapes_in,
    split_state,
    without_points,
)
from ns_multigpu.plugin.checkpoint.verify import step_of
from ns_multigpu.plugin.checkpoint.whole import Opened, open_checkpoint, remove_old, save, to_go_on_from, together
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.agreement import options_of
from ns_multigpu.plugin.launch.run_folder import restarts
from ns_multigpu.plugin.model.optimizers import BatchOptimizers
from ns_multigpu.plugin.train.pipeline import DistributedPipeline

if TYPE_CHECKING:
    from ns_multigpu.plugin.train.config import DistributedTrainerConfig

_OPTIONS = {
    "camera_optimizer": "--pipeline.model.camera-optimizer.mode",
    "bil_grids": "--pipeline.model.use-bilateral-grid",
    "exposures": "--pipeline.model.exposure",
}
"""What decides whether a model has a part."""
_NOT_CARRIED = ("_model.lpips.",)
"""Weights that nerfstudio's Splatfacto saves and ours fetches when it needs them."""


class RunCheckpoints:
    """Writes a run's checkpoints and goes on from one. All methods are called by every rank.

    Args:
        config: the run's.
        models: its `nerfstudio_models` folder.
        world: this process's.
        pipeline, optimizers, grad_scaler: what is saved and restored; optimizers already scaled for the batch.

    Attributes:
        writer: writes them.
    """

    def __init__(
        self,
        config: "DistributedTrainerConfig",
        models: Path,
        world: World,
        pipeline: DistributedPipeline,
        optimizers: BatchOptimizers,
        grad_scaler: Any,
    ) -> None:
        self._config, self._models, self._world = config, models, world
        self._pipeline, self._optimizers, self._scaler = pipeline, optimizers, grad_scaler
        self._thread = threading.get_ident()
        if config.keep_checkpoints < 0:
            raise InputError(f"--keep-checkpoints {config.keep_checkpoints}: give how many, or 0 for all.")
        self.writer = CheckpointWriter(
            models, config.checkpoints_to_keep(), world, lambda line: _tell(line, "bold yellow")
        )

    # ---- saving ----

    def save(self, step: int, *, background: bool = False) -> bool:
        """Writes a checkpoint after `step`, unless there is one, and removes the oldest.

        Args:
            background: return when the state has been copied, where there is memory for that: `checkpoint.background`.

        Returns:
            whether there is one now, or one is on its way. If the disk would not take it, the earlier ones are as they
            were, and the user is told.
        """
        if threading.get_ident() != self._thread:  # the button of nerfstudio's legacy viewer, on rank 0 alone
            _tell(f"Checkpoints are written by all workers, every {self._config.steps_per_save} steps: not on request.")
            return False
        return step >= 0 and self.writer.save(step, lambda: self._content(step), background=background)

    def begin(self, step: int) -> None:
        """Begins to write a checkpoint after `step`, unless there is one, for `write` to wait for. Until then nobody
        may change what training has come to."""
        self.writer.finish()
        if step != self.writer.saved_step:
            self.writer.begin(step, self._content(step))

    def write(self, step: int, elsewhere: Path | None = None) -> str:
        """Writes a checkpoint after `step`, unless there is one, and waits for it.

        Args:
            elsewhere: the folder for it, where it is not to be the run's.

        Returns:
            "" if there is one now; otherwise what the disk said.
        """
        self.writer.finish()
        if elsewhere is None and step == self.writer.saved_step:
            return ""
        content = self._content(step)
        models = elsewhere or self._models
        problem = save(models, step, content.pipeline, content.tensors, content.values, self._world)
        if not problem and elsewhere is None:
            remove_old(models, self._config.checkpoints_to_keep(), self._world)
            self.writer.saved_step = step
        return problem

    def _content(self, step: int) -> Content:
        tensors, values = self._take(step)
        model = self._pipeline.model
        pipeline = partial(named, self._pipeline.state_dict, model.config.primitive)
        if not model.sharded:
            return Content(pipeline, tensors, values)
        rows, marker = split_state(tensors, dict(model.gauss_params.items()), self._world, model.holding)
        values["gaussians"] = sum(marker["counts"])
        return Content(lambda: without_points(pipeline(), marker), rows, values)

    def _take(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model, world, data = self._pipeline.model, self._world, self._pipeline.datamanager
        moments, plain = state.take_optimizers(self._optimizers.optimizers)
        statistics, settings = state.take_densifier(model.densifier_state, world.rank)
        clock = state.Clock(step + 1, self._pipeline.batch_size)
        values = {
            "method": self._config.method_name,
            "strategy": self._pipeline.config.strategy,
            "primitive": model.config.primitive,
            "version": ns_multigpu.__version__,
            "ranks": world.size,
            "batch": clock.batch,
            "steps": clock.steps,
            "images": clock.images,
            "gaussians": model.num_points,
            "optimizer_state": model.config.optimizer_state,
            "options": options_of(self._config),
            "seed": model.seed,
            "views": _views(data),
            "assignment": self._pipeline.strategy.assignment.knowledge(),
            "optimizers": plain,
            "schedulers": {name: int(s.last_epoch) for name, s in self._optimizers.schedulers.items()},
            "scaler": self._scaler.state_dict(),
            "densifier": {"kind": model.densifier.kind, "values": settings},
        }
        known = {KNOWLEDGE + name: value for name, value in self._pipeline.strategy.placement.knowledge().items()}
        return {**moments, **statistics, **known, **state.take_generators(world)}, values

    # ---- going on ----

    def resume(self) -> int:
        """Goes on from the checkpoint that the flags, or a restart by the launcher, ask for.

        Returns:
            the first step to take: 0 if there is none to go on from.

        Raises:
            InputError: it is missing, damaged, another method's, or does not fit this run.
        """
        config = self._config
        path = to_go_on_from(config, self._models, restarts(), self._world, _tell)
        if path is None:
            return 0
        opened = open_checkpoint(path, self._world)
        present = self._pipeline.state_dict()
        check_kind(opened.content["pipeline"], self._pipeline.model.config.primitive, str(opened.path))
        loaded = fitting(opened, present, str(config.method_name), self._pipeline.model.primitive(depth=False))
        _, problem = together(lambda: self._put(opened, loaded), self._world, InputError)
        if problem:
            raise InputError(problem)
        clock = _clock(opened).convert(self._pipeline.batch_size)
        self._report(opened, clock)
        if path.parent.resolve() == self._models.resolve() and clock == _clock(opened):
            self.writer.saved_step = step_of(path)
        return clock.steps

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
        ratio, rule = before.batch / now.batch, self._optimizers.course.rule
        state.put_optimizers(self._optimizers.optimizers, pipeline.get_param_groups(), saved, ratio, rule)
        if self._config.load_scheduler:
            counts = {name: state.Clock(count, before.batch).convert(now.batch).steps for name, count in counts.items()}
            state.move_schedulers(self._optimizers.schedulers, counts, now.steps)
        if opened.tensors is None:
            return
        model.prepare_densifier(self._world, int(values["seed"]))
        if values["views"] == _views(pipeline.datamanager):
            pipeline.strategy.assignment.learn_again(values.get("assignment", []))
        read, names = opened.tensors.read, opened.tensors.names
        if values["densifier"]["kind"] == model.densifier.kind:
            model.densifier_state.update(values["densifier"]["values"])
            left = put_statistics(
                model.densifier_state, opened.tensors, own.total, own.rows, model.sharded, self._world, model.device
            )
            state.put_densifier(model.densifier_state, left, read, values["ranks"], self._world, model.device)
        if self._scaler.is_enabled() and values["scaler"]:
            self._scaler.load_state_dict(values["scaler"])
        state.put_generators(names, read, self._world)

    def _report(self, opened: Opened, now: state.Clock) -> None:
        values, before = opened.values, _clock(opened)
        origin = f"{values['ranks']} worker(s), {before.batch} images a step" if values else "nerfstudio's own trainer"
        lines = [
            f"Resumed from {opened.path}: {before.images} images seen, {self._pipeline.model.total_points} Gaussians, "
            f"written by {origin}. Going on with step {now.steps} at {now.batch} images a step."
        ]
        if now.images != before.images:
            lines.append(f"Its last {before.images - now.images} images begin the next step, and are seen twice.")
        kept, keeps = values.get("optimizer_state", "full"), self._pipeline.model.config.optimizer_state
        if kept != keeps:
            how = "rounded to bfloat16, once" if keeps == "compact" else "exactly what they were, as float32"
            lines.append(f"Its optimizer's state is {kept}, and is {keeps} from now on: Adam's moments are {how}.")
        if not values:
            lines.append("It has no statistics of densification: they are gathered anew.")
        else:
            kind = self._pipeline.model.densifier.kind
            if values["densifier"]["kind"] != kind:
                lines.append(f"It was densified by {values['densifier']['kind']}, and is by {kind} from now on.")
            if values["views"] != _views(self._pipeline.datamanager):
                lines.append("Its training views, or the way they are drawn, were others: their order is new.")
            lines += changed_options(values.get("options", {}), options_of(self._config))
        for line in lines:
            _tell(line)


def changed_options(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A line for each option that a run has otherwise than the one that it goes on from, behind one that says so.

    Args:
        before, now: as `options_of` has them; of older checkpoints nothing is known.
    """
    changed = [name for name in now if name in before and before[name] != now[name]]
    if not changed:
        return []
    return ["Options that differ from the checkpoint's:", *(f"  {n} {now[n]} (was {before[n]})" for n in changed)]


def fitting(opened: Opened, present: Mapping[str, Any], method: str, primitive: Primitive) -> dict[str, Any]:
    """The checkpoint's pipeline state, once it is known to fit this run's.

    Args:
        present: this run's pipeline state.
        method: this run's method. primitive: what its points are.

    Raises:
        InputError: it is of another method, or of a model with other options; the message names what differs.
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
        if key.startswith(POINTS):  # any number of points will do
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
    """The option that decides about a part of the model, where there is one."""
    return next((f" ({option})" for part, option in _OPTIONS.items() if part in key), "")


def _short(key: str) -> str:
    return key.removeprefix("_model.").removeprefix("gauss_params.")


def _clock(opened: Opened) -> state.Clock:
    if opened.values:
        return state.Clock(int(opened.values["steps"]), int(opened.values["batch"]))
    return state.Clock(int(opened.content["step"]) + 1, 1)


def _plain_optimizers(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """The moments, and the counts of the schedulers, in a checkpoint that nerfstudio's trainer wrote."""
    moments = {
        f"optimizers/{group}/{number}/{name}": value
        for group, table in content["optimizers"].items()
        for number, entry in table["state"].items()
        for name, value in entry.items()
    }
    return moments, {group: int(table["last_epoch"]) for group, table in content.get("schedulers", {}).items()}


def _views(datamanager: Any) -> list[Any]:
    """What the order of the views follows from."""
    config = datamanager.config
    return [
        len(datamanager.train_dataset),
        config.train_cameras_sampling_seed,
        config.train_cameras_sampling_strategy,
    ]


def _tell(line: str, style: str = "") -> None:
    CONSOLE.print(Text(line, style))
