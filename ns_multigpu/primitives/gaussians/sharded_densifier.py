"""Growing and pruning of Gaussians that are spread over the ranks: together, the ranks then hold the points that one
rank with `morton` would have, whatever placement says which rank owns which.

A point's statistics are on its owner, and so is the decision; what the points of the other ranks have to do with it is
the numbers that a split draws, which go by its place among all splits, and the order.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ns_multigpu.core.collectives import all_gather_ints_on_device
from ns_multigpu.core.holding import Holding
from ns_multigpu.core.placement import Sharded
from ns_multigpu.core.random import keyed_generator
from ns_multigpu.primitives.gaussians.densifier import ReplicatedDensifier
from ns_multigpu.primitives.gaussians.regroup import decide, edit_children, regroup
from ns_multigpu.primitives.gaussians.sharded_rows import move_rows
from ns_multigpu.primitives.sharded_order import Reordering, clock, order_keys, plan_move


@dataclass
class ShardedDensifier(ReplicatedDensifier):
    """Adaptive density control for shards. See `ReplicatedDensifier`; parameters, moments, statistics and the rows of
    `info` are those of this rank's points, and every rank calls all methods together.

    The work of a point is `refine_every`, for being there, and `seen_cost` for every image that it was seen in since
    the last refinement.

    Attributes:
        holding: what this rank holds, and who says which rank owns what; ranges of equal work by default.
        threshold: points are dealt out anew where a rank's work is more than this times the mean.
        seen_cost: see above; 0 for equal numbers.
        reordering: what the last refinement did; whoever logs it sets it to None.
    """

    morton: bool = True
    holding: Holding = field(default_factory=lambda: Holding(Sharded()))
    threshold: float = 1.1
    seen_cost: int = 4
    reordering: Reordering | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.morton:
            raise ValueError("shards are ranges of an order, or parts of one: a sharded densifier cannot do without it")

    @torch.no_grad()
    def _refine(self, params: Any, optimizers: Any, state: dict[str, Any], image: int) -> None:
        world = self.world
        statistics = self.statistics(params, state)
        device = params["means"].device
        started = clock(device)
        wanted = decide(self, params, state, image, self.halves)
        count = len(params["means"])
        told = all_gather_ints_on_device(
            [count, wanted.total, wanted.n_split, wanted.n_duplicate, wanted.pruned, count - wanted.n_stays], world
        )
        now, after, split, duplicated, pruned, pruned_only = (sum(column) for column in zip(*told, strict=True))
        fates = self.within_cap(wanted, now, after)
        splits = [row[2] if fates is wanted else 0 for row in told]
        self._note_changes(*((duplicated, split, pruned) if fates is wanted else (0, 0, pruned_only)))
        del wanted
        drawn = None
        if sum(splits) > 0:
            # What one rank draws for all splits, of which these are some.
            generator = keyed_generator(self.seed, "densify", image, device=device)
            drawn = torch.randn(self.halves.births, sum(splits), self.halves.draws, device=device, generator=generator)
            drawn = drawn.index_select(1, self.holding.among(fates.split.nonzero().flatten(), count, world))
        listing = regroup(params, fates, drawn, self.halves)
        # A key has room for four categories: of more halves than two at one place, the later go by their parents.
        categories = fates.listed()[0][: fates.total].clamp_(max=3)
        keys = order_keys(listing.positions(params["means"]), categories, world)
        del fates, drawn
        keys, order = torch.sort(keys, stable=True)
        source = listing.source[order]
        weights = self.refine_every + self.seen_cost * statistics["count"].long()[source]
        move = plan_move(
            keys, weights, world, self.threshold, self.holding.placement,
            partial(listing.positions, params["means"], order), partial(self.holding.places_of, source, count, world),
        )  # fmt: skip
        del keys, weights, source
        regrouping = listing.ordered(move.leaving(order))
        del listing, order
        edit = partial(edit_children, self, halves=self.halves)
        row_bytes = move_rows(params, optimizers, regrouping, move, world, edit)
        self.holding.hold(move.places, params["means"])
        for name, value in statistics.items():
            state[name] = value.new_zeros(len(params["means"]))
        self.reordering = move.record(started, row_bytes)
