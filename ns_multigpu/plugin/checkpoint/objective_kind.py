"""Which kind of point a checkpoint is of: it names it, and is refused where another kind is wanted."""

from collections.abc import Callable, Mapping
from typing import Any

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.primitives.registry import FIRST, titled

PRIMITIVE = "ns_multigpu.primitive"
"""Key of the pipeline's state in a .ckpt that names the kind of its points (see `primitives.registry`). A state without
it is of 3D Gaussians: what nerfstudio's own Splatfacto wrote, and versions of ours that knew no other kind."""


def named(pipeline: Callable[[], Mapping[str, Any]], kind: str) -> dict[str, Any]:
    """A pipeline's state with the name of its points' kind, to be saved."""
    return {**pipeline(), PRIMITIVE: kind}


def kind_in(pipeline: Mapping[str, Any]) -> str:
    """The kind of the points in a pipeline's saved state."""
    return str(pipeline.get(PRIMITIVE, FIRST))


def without_kind(pipeline: Mapping[str, Any]) -> dict[str, Any]:
    """A pipeline's saved state as the pipeline itself has it."""
    return {name: value for name, value in pipeline.items() if name != PRIMITIVE}


def check_kind(pipeline: Mapping[str, Any], wanted: str, where: str) -> None:
    """Whether a pipeline's saved state has points of the kind `wanted`. `where` is the file that it is from.

    Raises:
        InputError: it has others; the message names both kinds.
    """
    found = kind_in(pipeline)
    if found != wanted:
        raise InputError(
            f"{where} is a checkpoint of {titled(found)}, and this run is of {titled(wanted)}: one cannot go on as the "
            f"other. Use --pipeline.model.primitive {found}, or give a checkpoint of {titled(wanted)}."
        )
