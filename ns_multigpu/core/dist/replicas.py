"""Equal replicas: broadcast of their values, and a cheap check that they are still equal."""

import hashlib
from collections.abc import Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from ns_multigpu.core.dist.collectives import all_gather_ints, all_gather_objects
from ns_multigpu.core.dist.world import World

_WEIGHTS = 65521
"""Weights repeat after this many elements (a prime, so that no row length lines up with it)."""
_AT_ONCE = 128 * _WEIGHTS
"""Elements that are converted to 64 bits at once: 64 MiB."""


class ReplicaDivergedError(RuntimeError):
    """Replicas that must be identical are not."""


def broadcast_in_place(x: Tensor, world: World) -> None:
    """Overwrite `x` with rank 0's values."""
    if world.group is not None and x.numel():
        dist.broadcast(x, 0, group=world.group)


def checksum(x: Tensor) -> Tensor:
    """Return a 64-bit sum over the bits of `x` that detects changed, swapped and moved elements: [] int64, on x's
    device.

    Integer arithmetic makes the order of summation irrelevant: equal tensors have equal sums on every device.
    """
    kind = torch.int32 if x.dtype in (torch.float32, torch.int32) else torch.uint8
    bits = x.detach().contiguous().reshape(-1).view(kind)
    # Elements of one weight are summed first: one pass, and no weight for each element.
    sums = torch.zeros(_WEIGHTS, dtype=torch.int64, device=x.device)
    for part in bits.split(_AT_ONCE):
        whole = part.numel() // _WEIGHTS * _WEIGHTS
        if whole:
            sums += part[:whole].view(-1, _WEIGHTS).sum(0, dtype=torch.int64)
        sums[: part.numel() - whole] += part[whole:]
    return (sums * torch.arange(1, 2 * _WEIGHTS, 2, device=x.device)).sum()


def assert_identical(tensors: Mapping[str, Tensor], world: World, step: int) -> None:
    """Compare the shapes and bits of `tensors` (the same names on every rank) over all ranks.

    Reads one number for each tensor back to the host: call it every so many steps, not in each.

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
    shapes = {name: tuple(tensors[name].shape) for name in names}
    digest = int.from_bytes(
        hashlib.blake2b(repr((names, rows, shapes)).encode(), digest_size=8).digest(), "big", signed=True
    )
    if len({row[0] for row in all_gather_ints([digest], world)}) == 1:
        return
    everyones = all_gather_objects(shapes, world)
    if any(list(others) != names for others in everyones):
        raise ReplicaDivergedError(f"step {step}: the ranks hold different parameters: {[*map(list, everyones)]}")
    table = all_gather_ints(rows, world)
    wrong: list[str] = []
    for position, name in enumerate(names):
        columns = slice(1 + 2 * position, 3 + 2 * position)
        found = [(shapes[name], row[columns]) for shapes, row in zip(everyones, table, strict=True)]
        ranks = [rank for rank, one in enumerate(found) if one != found[0]]
        if ranks:
            sizes = {rank: list(everyones[rank][name]) for rank in (0, *ranks)}
            wrong.append(f"{name} on rank(s) {ranks} (shapes by rank: {sizes})")
    if wrong:
        raise ReplicaDivergedError(
            f"step {step}: replicas differ from rank 0 in " + "; ".join(wrong) + ". "
            "The run is stopped because its result would be wrong; continue from the last checkpoint. "
            "Ranks of one job must run the same code on the same kind of GPU."
        )
