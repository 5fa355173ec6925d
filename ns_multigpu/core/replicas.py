# torch annotates only part of itself:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""A cheap proof that replicas are still replicas."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from ns_multigpu.core.collectives import all_gather_ints, all_gather_objects
from ns_multigpu.core.world import World

_WEIGHTS = 65521
"""Weights repeat after this many elements (a prime, so that no row length lines up with it)."""


class ReplicaDivergedError(RuntimeError):
    """Replicas that must be identical are not."""


def checksum(x: Tensor) -> Tensor:
    """A 64-bit sum over the bits of `x` that notices changed, swapped and moved elements: [] int64, on x's device.

    Integer arithmetic, so that the order of summation does not matter and equal tensors have equal sums everywhere.
    """
    if x.dtype not in (torch.float32, torch.int32):
        bits = x.detach().contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
    else:
        bits = x.detach().contiguous().reshape(-1).view(torch.int32).to(torch.int64)
    weights = torch.arange(bits.numel(), device=x.device) % _WEIGHTS * 2 + 1
    return (bits * weights).sum()


def assert_identical(tensors: Mapping[str, Tensor], world: World, step: int) -> None:
    """Compares the shapes and bits of `tensors` (the same names on every rank) over all ranks.

    It reads one number a tensor back to the host: call it every so many steps, not in each.

    Raises:
        ReplicaDivergedError: on every rank, naming the step, the tensors and the ranks that differ from rank 0.
    """
    if world.group is None:
        return
    names = sorted(tensors)
    sums: list[int] = []
    if names:
        sums = cast(list[int], torch.stack([checksum(tensors[name]) for name in names]).tolist())
    rows = [len(names), *(v for name, s in zip(names, sums, strict=True) for v in (tensors[name].numel(), s))]
    lengths = [row[0] for row in all_gather_ints([len(rows)], world)]
    if len(set(lengths)) > 1:
        listed = all_gather_objects(names, world)
        raise ReplicaDivergedError(f"step {step}: the ranks hold different parameters: {listed}")
    table = all_gather_ints(rows, world)
    wrong: list[str] = []
    for position, name in enumerate(names):
        columns = slice(1 + 2 * position, 3 + 2 * position)
        ranks = [rank for rank, row in enumerate(table) if row[columns] != table[0][columns]]
        if ranks:
            sizes = {rank: table[rank][columns][0] for rank in (0, *ranks)}
            wrong.append(f"{name} on rank(s) {ranks} (elements by rank: {sizes})")
    if wrong:
        raise ReplicaDivergedError(
            f"step {step}: replicas differ from rank 0 in " + "; ".join(wrong) + ". "
            "The run is stopped because its result would be wrong; continue from the last checkpoint. "
            "Ranks of one job must run the same code on the same kind of GPU."
        )
