"""Placements for tests, whose owners do not hold ranges of the order."""

from collections.abc import Callable

import torch
from torch import Tensor

from ns_multigpu.core.assign.placement import NewPoints, Placement, PlacementResult, Sharded, Shares, shares_of
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.world import World


class HalfSpaces(Placement):
    """Slabs of space along x, as many as ranks, whatever work there is in each."""

    replicated = False
    in_ranges = False

    def owners(self, positions: Tensor, ranks: int) -> Tensor:
        edges = torch.linspace(-0.5, 0.5, ranks + 1)[1:-1].to(positions)
        return torch.bucketize(positions[:, 0].contiguous(), edges)

    def views_to_splat(self, plan: Plan, world: World) -> list[int]:
        return plan.views()

    def shares(self, count: int, positions: Callable[[], Tensor], ranks: int) -> Shares:
        return shares_of(self.owners(positions(), ranks), ranks)

    def place(self, new: NewPoints, world: World) -> PlacementResult:
        return PlacementResult(self.owners(new.positions(), world.size))


class Scattered(HalfSpaces):
    """Any point on any rank: the halves of a split, and points of equal keys, are not on the same."""

    def place(self, new: NewPoints, world: World) -> PlacementResult:
        number = torch.arange(len(new.keys), device=new.keys.device) + world.rank
        return PlacementResult((number * 7 + new.keys % 11) % world.size)


class Backwards(HalfSpaces):
    """Ranges of equal work, the first for the last rank."""

    def place(self, new: NewPoints, world: World) -> PlacementResult:
        placed = Sharded().place(new, world)
        return PlacementResult(world.size - 1 - placed.owners, placed.redistributed)


class Wrong(HalfSpaces):
    """Names an owner that is no rank, on the last rank only; or one owner too many."""

    def __init__(self, owner: int | None) -> None:
        self._owner = owner

    def place(self, new: NewPoints, world: World) -> PlacementResult:
        owners = torch.zeros_like(new.keys)
        if world.rank == world.size - 1 and self._owner is None:
            owners = owners.new_zeros(len(owners) + 1)
        elif world.rank == world.size - 1:
            owners[0] = self._owner
        return PlacementResult(owners)


TOYS = {"half-spaces": HalfSpaces(), "scattered": Scattered(), "backwards": Backwards()}
