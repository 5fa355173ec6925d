"""A run's checkpoints, and how it goes on from one with any number of ranks."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nerfstudio.engine.optimizers import Optimizers
from nerfstudio.utils.rich_utils import CONSOLE
from rich.text import Text
from torch import Tensor

import ns_multigpu
from ns_multigpu.core.world import World
from ns_multigpu.plugin.checkpoint.training_state import move_schedulers
from ns_multigpu.plugin.checkpoint.whole import open_checkpoint, remove_old, save, to_go_on_from, together
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.agreement import options_of
from ns_multigpu.plugin.launch.run_folder import restarts
from ns_multigpu.plugin.radiance.pipeline import RadiancePipeline
from ns_multigpu.plugin.radiance.saved import MODEL

if TYPE_CHECKING:
    from ns_multigpu.plugin.radiance.config import RadianceTrainerConfig

_MOMENTS = "optimizers/"


class RadianceCheckpoints:
    """Writes a run's checkpoints and goes on from one. All methods are called by every rank.

    Args:
        config: the run's. models: its `nerfstudio_models` folder. world: this process's.
    """

    def __init__(self, config: "RadianceTrainerConfig", models: Path, world: World) -> None:
        self._config, self._models, self._world = config, models, world
        self._saved = -1

    def find(self) -> Path | None:
        """The .ckpt to go on from, as the flags or a restart by the launcher say; None for a new run.

        Raises:
            InputError: there is none where a flag points.
        """
        return to_go_on_from(self._config, self._models, restarts(), self._world, _tell)

    def save(self, step: int, pipeline: RadiancePipeline, optimizers: Optimizers) -> str:
        """Writes a checkpoint after `step`, unless there is one, and removes the oldest.

        Returns:
            "" if there is one now; otherwise what the disk said, and the earlier ones are as they were.
        """
        if step < 0 or step == self._saved:
            return ""
        model = pipeline.model
        tensors: dict[str, Tensor] = {MODEL + name: p.detach() for name, p in model.own_parameters().items()}
        for name, state in _states(model, optimizers).items():
            tensors.update({f"{_MOMENTS}{name}/{key}": v for key, v in state.items() if isinstance(v, Tensor)})
        values: dict[str, Any] = {
            "method": self._config.method_name,
            "version": ns_multigpu.__version__,
            "ranks": self._world.size,
            "steps": step + 1,
            "images": step + 1,
            "options": options_of(self._config),
            "since_update": model.sampling.since_update,
            "schedulers": {name: int(s.last_epoch) for name, s in optimizers.schedulers.items()},
        }
        problem = save(self._models, step, lambda: pipeline.saved_field().state(), tensors, values, self._world)
        if not problem:
            remove_old(self._models, self._config.checkpoints_to_keep(), self._world)
            self._saved = step
        return problem

    def resume(self, path: Path, pipeline: RadiancePipeline, optimizers: Optimizers) -> int:
        """Goes on from a checkpoint: parameters, moments and counters.

        Returns:
            the first step to take.

        Raises:
            InputError: it is damaged, another method's, or does not fit this run.
        """
        opened = open_checkpoint(path, self._world)
        saved, values, model = opened.tensors, opened.values, pipeline.model
        if saved is None or values.get("method") != self._config.method_name:
            raise InputError(
                f"{path} is a checkpoint of {values.get('method') or 'nerfstudio'}: {self._config.method_name} cannot "
                "go on from it."
            )

        def put() -> None:
            pipeline.config.checkpoints = path.parent
            pipeline.load_pipeline(opened.content["pipeline"], int(values["steps"]) - 1)
            names = [name for name in saved.names if name.startswith(_MOMENTS)]
            for name, (optimizer, param) in _places(model, optimizers).items():
                prefix = f"{_MOMENTS}{name}/"
                read = saved.read([key for key in names if key.startswith(prefix)])
                if read:
                    state = {key.removeprefix(prefix): value for key, value in read.items()}
                    optimizer.state[param] = {
                        key: value if key == "step" else value.to(param.device) for key, value in state.items()
                    }

        _, problem = together(put, self._world, InputError)
        if problem:
            raise InputError(problem)
        model.sampling.since_update = int(values["since_update"])
        steps = int(values["steps"])
        if self._config.load_scheduler:
            move_schedulers(optimizers.schedulers, values["schedulers"], steps)
        assert model.partition is not None
        _tell(
            f"Resumed from {path}: {steps} steps, {model.partition.cells} cells, written by {values['ranks']} "
            f"worker(s). Going on with step {steps} on {self._world.size}."
        )
        if path.parent.resolve() == self._models.resolve():
            self._saved = steps - 1
        return steps


def _places(model: Any, optimizers: Optimizers) -> dict[str, tuple[torch.optim.Optimizer, torch.nn.Parameter]]:
    """By a parameter's name, the optimizer that has it, and it."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(param)]: (optimizer, param)
        for optimizer in optimizers.optimizers.values()
        for group in optimizer.param_groups
        for param in group["params"]
    }


def _states(model: Any, optimizers: Optimizers) -> dict[str, dict[str, Any]]:
    """By a parameter's name, the moments that its optimizer keeps."""
    return {name: o.state[p] for name, (o, p) in _places(model, optimizers).items() if p in o.state}


def _tell(line: str, style: str = "") -> None:
    CONSOLE.print(Text(line, style), soft_wrap=True)
