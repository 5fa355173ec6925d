"""Warm-up of rarely launched kernels while a run starts, so that their code is on the GPU.

CUDA loads a kernel's code at its first launch, torch's in large parts: 5 to 35 ms each, 0.2 s for a first refinement
and the first finiteness checks. Otherwise all GPUs would wait for that in the middle of training. While images are
decoded, none does.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from cuda_ext.ops.optim.adam import FusedAdam
from ns_multigpu.core.densifier import Densifier
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.patch_losses import share_of_mse
from ns_multigpu.core.types import Patch, View
from ns_multigpu.plugin.faults.numerics import finite_flags
from ns_multigpu.plugin.model.densifiers import make_densifier
from ns_multigpu.plugin.model.splat_model import SplatModel

_POINTS = 96


def warm_up(model: SplatModel, world: World) -> Callable[[], object]:
    """Start the warm-up in a thread, on a few points of the model's primitive; the model and other ranks are not
    involved.

    Args:
        model: a `SplatModel` with its points.

    Returns:
        a function that waits for the warm-up and raises its error, if any.
    """
    if world.device.type != "cuda":
        return lambda: None
    pool = ThreadPoolExecutor(1, "rehearsal")
    done = pool.submit(_on_device, model, world.device)
    pool.shutdown(wait=False)
    return done.result


def _on_device(model: SplatModel, device: torch.device) -> None:
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)), torch.no_grad():
        _refine(model, device)
        _look(device)
        torch.cuda.current_stream().synchronize()  # its memory is used next by another stream


def _refine(model: SplatModel, device: torch.device) -> None:
    """Refine a throwaway model."""
    options = model.config
    alone = World.single(str(device))
    densifier = make_densifier(options, 1, alone, seed=0)
    params = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(_few(value.detach())) for name, value in model.gauss_params.items()}
    )
    kind = torch.bfloat16 if options.optimizer_state == "compact" else torch.float32
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for name, value in params.items():
        optimizers[name] = FusedAdam([value], lr=1e-3)
        moments = {key: torch.zeros_like(value, dtype=kind) for key in ("exp_avg", "exp_avg_sq")}
        optimizers[name].state[value] = {"step": torch.tensor(1.0), **moments}
    state = densifier.initialize_state()
    # The first refinement, the first that may reorder points, and the first reset of opacities.
    every, taken = options.refine_every, torch.ones((), dtype=torch.bool, device=device)
    begun = options.warmup_length // every
    for image in (every * (begun + 1), 10 * every * (begun // 10 + 1), every * options.reset_alpha_every):
        _count(densifier, params, state)
        if densifier.due_after(image, 1):
            densifier.refine_ahead(params, optimizers, state, image, 1, taken)
            densifier.refine_when_due(params, optimizers, state, image, 1)
    densifier.move(params, 1, 1, 1e-6, taken)


def _few(values: torch.Tensor) -> torch.Tensor:
    """Return `_POINTS` rows of a model's parameter, repeated if there are few; zeros if a rank has none."""
    if len(values) == 0:
        return values.new_zeros(_POINTS, *values.shape[1:])
    return values[torch.arange(_POINTS, device=values.device) % len(values)].contiguous()


def _count(densifier: Densifier, params: Any, state: dict[str, Any]) -> None:
    """Set statistics and points so that some are split, some duplicated, some pruned."""
    sums = densifier.statistics(params, state)
    for name, value in sums.items():
        value.fill_(1.0 if name == "count" else 0.0)
        if name == "grad2d":
            value[::4] = 1.0
    if "scales" in params:
        params["scales"].data[::8] = 2.0
        params["scales"].data[4::8] = -10.0
    if "opacities" in params:
        params["opacities"].data[1::16] = -10.0


def _look(device: torch.device) -> None:
    """Compute a step's error, its `taken` flag and finiteness flags once."""
    view = View(torch.eye(4, device=device), torch.eye(3, device=device), 4, 4)
    image = torch.zeros(4, 4, 3, device=device)
    for target in (image, image.byte()):
        share_of_mse([image], [target], [Patch.whole(0, view)], [view])
    places = torch.zeros(2, 4, dtype=torch.int32, device=device)
    torch._foreach_copy_(list(places), [places[0].clone()] * 2)  # pyright: ignore
    numbers = torch.cat([image.flatten(), torch.stack(finite_flags([image])).flatten()])
    ((0 * numbers).sum(dtype=torch.float32) + (places.long()[0, 0] == 0)).item()
