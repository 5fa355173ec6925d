"""Start of a run from the Gaussians of a PLY file."""

from typing import Any

import torch
from nerfstudio.utils.rich_utils import CONSOLE

from ns_multigpu.core.assign.placement import Placement
from ns_multigpu.core.dist.collectives import all_gather_objects
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint.atomic_save import together
from ns_multigpu.plugin.checkpoint.own_rows import rows_at_start
from ns_multigpu.plugin.checkpoint.ply_points import PlyPoints
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.model.splat_model import SplatModel


def begin_from_ply(model: SplatModel, outputs: Any, placement: Placement, world: World) -> None:
    """Replace the points of a model by those of the file that its options name. Every rank reads its rows.

    Args:
        outputs: the dataparser's, with the transform from the capture's frame to the run's.
        placement: assigns points to ranks.

    Raises:
        InputError: the file cannot be used, or differs between ranks.
    """
    options, file = model.config, model.config.load_ply
    assert file is not None
    is_of_capture = options.load_ply_frame == "capture"
    frame = (outputs.dataparser_transform, float(outputs.dataparser_scale)) if is_of_capture else None
    opened, problem = together(lambda: PlyPoints(file, options.primitive, options.sh_degree, frame), world, InputError)
    if problem or opened is None:
        raise InputError(problem)
    if len(set(all_gather_objects((len(opened), opened.degree), world))) > 1:
        raise InputError(f"--load-ply {file}: the machines have different files. Copy one to all of them.")
    rows, places, counts = range(len(opened)), None, [len(opened)]
    if not placement.replicated:
        own = rows_at_start(rows, opened.positions, placement, world)
        rows, places, counts = own.rows, own.places, own.counts
    params, problem = together(lambda: opened.read(rows, device=model.device), world, InputError)
    if problem or params is None:
        raise InputError(problem)
    if placement.replicated:
        model.gauss_params.update({name: torch.nn.Parameter(value) for name, value in params.items()})
    else:
        places = None if places is None else places.to(model.device)
        model.hold_rows(params, placement, places, counts, world)
    CONSOLE.print(
        f"Training begins from {len(opened):,} Gaussians of {file} (harmonics of degree {opened.degree}, here of "
        f"{options.sh_degree}).",
        soft_wrap=True,
    )
