"""Primitive of a checkpoint: it is saved by name, and another primitive is refused on loading."""

from collections.abc import Callable, Mapping
from typing import Any

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.primitives.registry import FIRST, titled

PRIMITIVE = "ns_multigpu.primitive"
"""Key of the primitive's name (see `primitives.registry`) in the pipeline's state of a .ckpt. Without it the points are
3D Gaussians: the file is from nerfstudio's Splatfacto, or from an early version of this package.
"""


def named(pipeline: Callable[[], Mapping[str, Any]], kind: str) -> dict[str, Any]:
    """Return a pipeline's state with the name of its primitive, to be saved."""
    return {**pipeline(), PRIMITIVE: kind}


def kind_in(pipeline: Mapping[str, Any]) -> str:
    """Return the primitive of a pipeline's saved state."""
    return str(pipeline.get(PRIMITIVE, FIRST))


def without_kind(pipeline: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pipeline's saved state without the name of the primitive, as the pipeline loads it."""
    return {name: value for name, value in pipeline.items() if name != PRIMITIVE}


def check_kind(pipeline: Mapping[str, Any], wanted: str, where: str) -> None:
    """Check that a pipeline's saved state has the primitive `wanted`. `where` is its file.

    Raises:
        InputError: its primitive differs; the message names both.
    """
    found = kind_in(pipeline)
    if found != wanted:
        raise InputError(
            f"{where} is a checkpoint of {titled(found)}, and this run is of {titled(wanted)}: one cannot go on as the "
            f"other. Use --pipeline.model.primitive {found}, or give a checkpoint of {titled(wanted)}."
        )
