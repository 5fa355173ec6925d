"""State of a radiance-field run in its checkpoints, and resume on any number of ranks.

The state folder next to the .ckpt has the cells' parameters under `saved.MODEL`, and each parameter's moments under
`optimizers/<name>/`.
"""

from typing import Any

import torch
from nerfstudio.engine.optimizers import Optimizers
from torch import Tensor

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint.atomic_save import Opened, together
from ns_multigpu.plugin.checkpoint.training_copy import Content
from ns_multigpu.plugin.checkpoint.training_state import move_schedulers
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.radiance.run.pipeline import RadiancePipeline
from ns_multigpu.plugin.radiance.run.saved import MODEL
from ns_multigpu.plugin.run.objective import Resumed

_MOMENTS = "optimizers/"


def field_content(step: int, pipeline: RadiancePipeline, optimizers: Optimizers) -> Content:
    """Return the content of a checkpoint after `step`; see `Objective.content`."""
    model = pipeline.model
    tensors: dict[str, Tensor] = {MODEL + name: p.detach() for name, p in model.own_parameters().items()}
    for name, (optimizer, param) in _places(model, optimizers).items():
        moments = optimizer.state.get(param, {})
        tensors.update({f"{_MOMENTS}{name}/{key}": v for key, v in moments.items() if isinstance(v, Tensor)})
    values: dict[str, Any] = {
        "steps": step + 1,
        "images": step + 1,
        "since_update": model.sampling.since_update,
        "schedulers": {name: int(s.last_epoch) for name, s in optimizers.schedulers.items()},
    }
    return Content(lambda: pipeline.saved_field().state(), tensors, values)


def resume_field(
    opened: Opened, pipeline: RadiancePipeline, optimizers: Optimizers, config: Any, world: World
) -> Resumed:
    """Load parameters, moments and counters; see `Objective.resume`.

    Args:
        config: a `RadianceTrainerConfig`. world: the ranks.
    """
    saved, values, model = opened.tensors, opened.values, pipeline.model
    if saved is None or values.get("method") != config.method_name:
        raise InputError(
            f"{opened.path} is a checkpoint of {values.get('method') or 'nerfstudio'}: {config.method_name} cannot go "
            "on from it."
        )
    steps = int(values["steps"])

    def put() -> None:
        pipeline.config.checkpoints = opened.path.parent
        pipeline.load_pipeline(opened.content["pipeline"], steps - 1)
        names = [name for name in saved.names if name.startswith(_MOMENTS)]
        for name, (optimizer, param) in _places(model, optimizers).items():
            prefix = f"{_MOMENTS}{name}/"
            read = saved.read([key for key in names if key.startswith(prefix)])
            if read:
                state = {key.removeprefix(prefix): value for key, value in read.items()}
                optimizer.state[param] = {
                    key: value if key == "step" else value.to(param.device) for key, value in state.items()
                }

    _, problem = together(put, world, InputError)
    if problem:
        raise InputError(problem)
    model.sampling.since_update = int(values["since_update"])
    if config.load_scheduler:
        move_schedulers(optimizers.schedulers, values["schedulers"], steps)
    line = f"Resuming at step {steps:,} from {opened.path}: {pipeline.described}."
    if values["ranks"] != world.size:
        line += f" It was written by {values['ranks']} worker(s)."
    return Resumed(steps, True, [line])


def _places(model: Any, optimizers: Optimizers) -> dict[str, tuple[torch.optim.Optimizer, torch.nn.Parameter]]:
    """Return each parameter and its optimizer, by the parameter's name."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(param)]: (optimizer, param)
        for optimizer in optimizers.optimizers.values()
        for group in optimizer.param_groups
        for param in group["params"]
    }
