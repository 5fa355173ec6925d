"""Densification of sharded Gaussians: together, the ranks hold the same points as one rank with `morton`, for any
placement.

A point's statistics and decision are on its owner. Other ranks matter only for the order, and for the random numbers of
splits, indexed by global split number.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ns_multigpu.core.dist.collectives import gather_on_device
from ns_multigpu.core.random import keyed_generator
from ns_multigpu.primitives.densify.densifier import ReplicatedDensifier
from ns_multigpu.primitives.densify.gathering import zeros_there
from ns_multigpu.primitives.densify.regroup import Fates, decide, edit_children, regroup
from ns_multigpu.primitives.densify.reshard import Resharding, ShardedPoints


@dataclass
class ShardedDensifier(ShardedPoints, ReplicatedDensifier):
    """Adaptive density control for shards. See `ReplicatedDensifier`; parameters, moments, statistics and the rows of
    `info` are those of this rank's points, and every rank calls all methods together.

    The work of a point is `refine_every`, for being there, and `seen_cost` for every image that it was seen in since
    the last refinement.

    Attributes:
        seen_cost: see above; 0 for equal numbers.
    """

    seen_cost: int = 4

    def refine_ahead(self, *_: Any) -> bool:
        """See `Densifier`: nothing, because ranks exchange counts when the refinement is due."""
        return False

    @torch.no_grad()
    def _refine(self, params: Any, optimizers: Any, state: dict[str, Any], image: int) -> None:
        world = self.world
        statistics = self.statistics(params, state)
        device = params["means"].device
        count = len(params["means"])
        gathered: list[list[int]] = []

        def read(sums: Tensor) -> list[int]:
            """Return this rank's sums, and all-gather those of all ranks."""
            seen = statistics["count"].sum(dtype=torch.float64).long()
            gathered.extend(gather_on_device(torch.cat([sums, torch.stack([seen, seen.new_full((), count)])]), world))
            return gathered[world.rank][:-2]

        wanted = decide(self, params, state, image, self.split_rule, read)
        now = sum(row[-1] for row in gathered)
        each = [Fates.of(wanted.masks[:, :0], row[:-2]) for row in gathered]  # by rank, numbers alone
        fates = self.within_cap(wanted, now, sum(one.total for one in each))
        grows = fates is wanted
        splits = [one.n_split if grows else 0 for one in each]
        del wanted
        if grows:
            pruned = now + sum(one.pruned for one in each)
            self._note_changes(sum(one.n_duplicate for one in each), sum(splits), pruned)
        else:
            self._note_changes(0, 0, now - sum(one.n_unpruned for one in each))
        categories, points = fates.listed()
        drawn = None
        if sum(splits) > 0:
            # What one rank draws for all splits, of which these are some.
            generator = keyed_generator(self.seed, "densify", image, device=device)
            drawn = torch.randn(
                self.split_rule.num_children, sum(splits), self.split_rule.draws, device=device, generator=generator
            )
            drawn = drawn.index_select(1, self.shard_index.among(points[fates.total :], count, splits, world))
        index_map = regroup(params, fates, drawn, self.split_rule)
        work = partial(self._work, statistics["count"], index_map.source)
        edit = partial(edit_children, self, split_rule=self.split_rule)
        resharding = Resharding(self.shard_index, self.threshold, world)
        if self._orders(image):
            # A key holds four categories: of more than two children at one place, the later ones are ordered by their
            # parents.
            categories = categories[: fates.total].clamp_(max=3)
            del fates, drawn, points
            self.reordering = resharding.in_order(params, optimizers, index_map, categories, work, edit)
        else:
            after = [one.total if grows else one.n_unpruned for one in each]
            works = [self.refine_every * row[-1] + self.seen_cost * row[-2] for row in gathered]  # of the old ones
            del fates, drawn, categories, points
            done = resharding.place(params, optimizers, index_map, after, works, work, edit)
            self.reordering = done or self.reordering
        for name, value in statistics.items():
            state[name] = zeros_there(value, len(params["means"]))

    def _work(self, seen: Tensor, source: Tensor) -> Tensor:
        """Return the work of new points, [T] int64, from the view counts of the old ones."""
        return self.refine_every + self.seen_cost * seen.long()[source]
