"""Properties of a model whose points are sharded over the ranks."""

from collections.abc import Mapping

import torch
from nerfstudio.models.splatfacto import SplatfactoModel
from torch import Tensor

from ns_multigpu.core.assign.placement import Placement, checked_shares, rows_of
from ns_multigpu.core.assign.shard_index import ShardIndex
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.schema import POSITION
from ns_multigpu.primitives.morton import interleaved_order


class ShardedPoints(SplatfactoModel):
    """Base of `SplatModel` with information on the points that other ranks hold.

    A sharded model's parameters are rows of the whole model's, which is in the order of `primitives.morton`: those at
    the places that its placement assigns to this rank.

    Attributes:
        shard_index: shard index of a sharded model: the owners of rows, and this rank's places.
        shard_counts: number of points on each rank of a sharded model; None if this process holds all.
        shard_world: the ranks.
    """

    shard_index: ShardIndex | None = None
    shard_counts: list[int] | None = None
    shard_world: World | None = None

    @property
    def sharded(self) -> bool:
        """True if this process holds only its rank's shard of the points."""
        return self.shard_counts is not None

    @property
    def total_points(self) -> int:
        """Number of points of the whole model."""
        return self.num_points if self.shard_counts is None else sum(self.shard_counts)

    @property
    def most_points(self) -> int:
        """Number of points of the largest shard: the same on all ranks."""
        return self.num_points if self.shard_counts is None else max(self.shard_counts)

    @torch.no_grad()
    def hold_shard(self, placement: Placement, world: World) -> None:
        """Reorder the whole model, which every rank holds, and keep this rank's shard by the placement.

        Raises:
            ValueError: the placement does not assign these points to these ranks.
        """
        means = self.gauss_params[POSITION].detach()
        order = interleaved_order(means)
        shares = placement.shares(len(order), lambda: means[order], world.size)
        shares = checked_shares(placement, shares, len(order), world.size)
        own = shares[world.rank]
        mine = rows_of(order, own)
        places = None
        if not placement.in_ranges:
            places = torch.arange(own.start, own.stop) if isinstance(own, range) else own
            places = places.to(means.device)
        rows = {name: value.detach()[mine] for name, value in self.gauss_params.items()}
        self.hold_rows(rows, placement, places, [len(share) for share in shares], world)

    def hold_rows(
        self, params: Mapping[str, Tensor], placement: Placement, places: Tensor | None, counts: list[int], world: World
    ) -> None:
        """Replace the points by this rank's shard.

        Args:
            params: parameters of this rank's points.
            places: [N] int64, their places in the whole model; None if each rank holds a range.
            counts: points of each rank.
        """
        self.gauss_params.update({name: torch.nn.Parameter(value) for name, value in params.items()})
        self.shard_index, self.shard_world = ShardIndex(placement), world
        self.shard_index.hold(places, self.gauss_params[POSITION], counts)
        self.count_shards()

    def count_shards(self) -> None:
        """Update how many points each rank of a sharded model has now. Every rank calls it."""
        if self.shard_index is not None and self.shard_world is not None:
            self.shard_counts = list(self.shard_index.of_ranks(self.num_points, self.shard_world))

    def replicated_parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters that are the same on every rank: all, or all but a sharded model's points."""
        points = {id(param) for param in self.gauss_params.values()} if self.sharded else set[int]()
        return [param for param in self.parameters() if id(param) not in points]

    def spread_parameters(self) -> dict[str, World]:
        """Return the sharded parameters, and the ranks."""
        return {} if self.shard_world is None else dict.fromkeys(self.gauss_params.keys(), self.shard_world)

    def share_of_points(self, world: World) -> float:
        """Return this rank's weight of a mean over its points, so that the sum over ranks is the global mean."""
        return self.num_points / max(self.total_points, 1) if self.sharded else 1 / world.size


def mean_of(values: Tensor) -> Tensor:
    """Return the mean [], with gradients; 0 for an empty shard."""
    return values.mean() if values.numel() else values.sum()
