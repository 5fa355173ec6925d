"""Rays clipped at cells in shapes that do not depend on the rays: each cell has a slot for each ray.

A slot is empty if its ray misses the cell. Occupied slots are packed into lines, with slightly more lines than occupied
slots. Padding lines are computed like the others and count for nothing. A step therefore launches the same work for all
rays that fit the lines, as a CUDA graph requires.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transport import Parts
from ns_multigpu.radiance.exchange import cells_of, gathered
from ns_multigpu.radiance.segments import passage


@dataclass(frozen=True)
class Slots:
    """The slots of a batch of rays. Every rank has all of them.

    Attributes:
        near, far: [cells, R] distances along the rays; an empty slot has those of its whole ray.
        live: [cells, R] bool, True if the ray meets the cell.
        order: [R, cells] int64, the occupied slots (cell * R + ray) of each ray, front to back, padded with
            cells * R.
        counts: [R] int64, number of occupied slots of each ray.
    """

    near: Tensor
    far: Tensor
    live: Tensor
    order: Tensor
    counts: Tensor

    def __len__(self) -> int:
        """Return the number of occupied slots. Waits for the device."""
        return int(self.counts.sum())


@torch.no_grad()
def clip_to_slots(origins: Tensor, directions: Tensor, nears: Tensor, fars: Tensor, boxes: Tensor) -> Slots:
    """Clip rays at cells as `clip` does, without waiting for the device.

    Args:
        origins, directions: [R, 3].
        nears, fars: [R] begin and end of each ray.
        boxes: [cells, 2, 3] as of `Partition.boxes`, on the rays' device; they share no volume.
    """
    enter, exits, hits = passage(origins, directions, nears, fars, boxes)
    rays, cells = hits.shape
    near, far = torch.where(hits, enter, nears[:, None]), torch.where(hits, exits, fars[:, None])
    along = enter.masked_fill(~hits, torch.inf).argsort(dim=1, stable=True)
    number = along * rays + torch.arange(rays, device=along.device)[:, None]
    order = torch.where(hits.gather(1, along), number, cells * rays)
    return Slots(near.t().contiguous(), far.t().contiguous(), hits.t().contiguous(), order, hits.sum(1))


@torch.no_grad()
def packed(live: Tensor, capacity: int) -> Tensor:
    """Return the indices of occupied slots, in order, without waiting for the device.

    Args:
        live: [R] bool, at most `capacity` of them True. capacity: number of lines.

    Returns:
        [capacity] int64, below R; R in padding lines.
    """
    rays = len(live)
    place = torch.where(live, live.cumsum(0) - 1, capacity).clamp_max(capacity)
    numbers = torch.full((capacity + 1,), rays, device=live.device)
    return numbers.scatter(0, place, torch.where(live, torch.arange(rays, device=live.device), rays))[:capacity]


def all_slots(own: Tensor, cells: int, world: World) -> Parts[Tensor]:
    """All-gather the states of all slots: this rank's with gradients, others' without. Every rank calls it. The
    collective is yielded, to be launched between CUDA graphs.

    Args:
        own: [this rank's cells, R, F] the states of its slots.
        cells: number of all ranks' cells. world: the ranks.

    Returns:
        [cells, R, F].

    Raises:
        ValueError: `own` does not match this rank's cells.
    """
    held = [len(cells_of(rank, cells, world.size)) for rank in range(world.size)]
    if len(own) != held[world.rank]:
        raise ValueError(f"states of {len(own)} cells; rank {world.rank} has {held[world.rank]}")
    return gathered(own, held, world)
