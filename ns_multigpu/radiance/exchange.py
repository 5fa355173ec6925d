"""The one exchange of a step: every rank learns the integrals of all segments (NeRF-XL, section 4.3).

Each rank then joins the same segments to the same rays and has the same loss; its own segments alone are part of its
graph, so that nothing travels backwards. Gradients of what all cells share are summed at the end of a step.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ns_multigpu.core.assign.placement import even_bounds
from ns_multigpu.core.dist.collectives import all_gather_into, sum_in_place
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transport import Collective, Parts, launched
from ns_multigpu.radiance.segments import Segments


def cells_of(rank: int, cells: int, ranks: int) -> range:
    """The cells of a rank: as many as others have, or one more.

    Raises:
        ValueError: there are fewer cells than ranks.
    """
    if cells < ranks:
        raise ValueError(f"{cells} cells for {ranks} ranks: each rank wants a cell at least")
    bounds = even_bounds(cells, ranks)
    return range(bounds[rank], bounds[rank + 1])


def all_segments(own: Tensor, segments: Segments, world: World) -> Tensor:
    """The states of all segments, this rank's with their gradients and others' without. Every rank calls it.

    All ranks know all segments: no sizes need be told. Ranks send as much as the one with most, in one collective.

    Args:
        own: [m, F] the states of this rank's segments, in their order.
        segments: those of all cells.
        world: the ranks.

    Returns:
        [M, F].

    Raises:
        ValueError: `own` has not as many rows as this rank has segments.
    """
    bounds = segments_of_ranks(segments, world.size)
    first, last = bounds[world.rank], bounds[world.rank + 1]
    if len(own) != last - first:
        raise ValueError(f"{len(own)} states for {last - first} segments of rank {world.rank}")
    if world.group is None:
        return own
    longest = max(b - a for a, b in pairwise(bounds))
    if longest == 0:
        return own
    sent = own.new_zeros(longest, own.shape[1])
    sent[: len(own)] = own.detach()
    table = own.new_empty(world.size, *sent.shape)
    all_gather_into(table, sent, world)
    parts = [table[rank, : bounds[rank + 1] - bounds[rank]] for rank in range(world.size)]
    parts[world.rank] = own
    return torch.cat(parts)


def segments_of_ranks(segments: Segments, ranks: int) -> list[int]:
    """[ranks + 1] the first segment of each rank, and how many there are."""
    cells = len(segments.begins) - 1
    return [segments.begins[bound] for bound in even_bounds(cells, ranks)]


@torch.no_grad()
def sum_gradients(shared: Iterable[Tensor], world: World) -> None:
    """Sums the gradients of what all cells share over the ranks, in one collective. Every rank calls it.

    A rank whose cells no ray has met has none, and counts as zero.

    Args:
        shared: the same parameters on every rank, in the same order.
    """
    launched(sum_gradients_in_parts(shared, world))


def sum_gradients_in_parts(shared: Iterable[Tensor], world: World) -> Parts[None]:
    """As `sum_gradients`, with its collective to be launched between what a CUDA graph holds."""
    params = list(shared)
    if world.group is None or not params:
        return
    graded = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    flat = torch.cat([grad.reshape(-1) for grad in graded])
    yield Collective(lambda: sum_in_place(flat, world))
    for param, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.grad = part.view_as(param).clone()


def bytes_a_ray(rays: int, segments: int, samples: int, width: int, value_bytes: int = 4) -> tuple[float, float]:
    """What a ray sends, on average: all of its samples (section 4.2), and its segments (section 4.3).

    Args:
        rays: how many. segments, samples: of all rays together, in all cells. width: numbers a segment.
        value_bytes: of a number.

    Returns:
        bytes of samples, each with its density, colour, and two ends; and of segments.
    """
    return samples * 6 * value_bytes / max(rays, 1), segments * width * value_bytes / max(rays, 1)


def balance(counts: Sequence[int]) -> float:
    """The most that a rank has over the mean; 1 where all have equally much, or nothing."""
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0
