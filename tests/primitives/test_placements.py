"""Whatever placement says which rank owns which point, the ranks together train the model of one rank, bit for bit."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ns_multigpu.core.assign.placement import AllHere, Placement, Replicated, Sharded
from ns_multigpu.core.dist.world import World
from ns_multigpu.primitives.densify.sharded_densifier import ShardedDensifier
from ns_multigpu.primitives.densify.sharded_mcmc import ShardedMcmc
from ns_multigpu.primitives.sharded_order import plan_move
from tests.lib.placements import TOYS, HalfSpaces, Wrong
from tests.lib.ranks import on_gpus, run_ranks
from tests.primitives.densify import test_sharded_densifier, test_sharded_mcmc
from tests.primitives.shards import assert_same, by_place, shard_index_of

DENSIFIERS: dict[str, ModuleType] = {"densifier": test_sharded_densifier, "mcmc": test_sharded_mcmc}
CASES = {
    "densifier": ("even", "few places", "a rank owns all", "a rank is pruned", "revised opacity", "capped"),
    "mcmc": ("even", "few places", "a rank owns nothing", "a rank is dead", "none is dead", "all are dead"),
}


def train_all(world: World, kind: str) -> dict[tuple[str, str], tuple[dict[str, Tensor], Tensor, list[int]]]:
    """Everything that a point has, its place, and how many points moved at each refinement."""
    found: dict[Any, Any] = {}
    for name, toy in TOYS.items():
        for case in CASES[kind]:
            values = {key: value.to(world.device) for key, value in DENSIFIERS[kind].initial(case).items()}
            shard_index = shard_index_of(toy, case, values, world)
            lines, records, _ = DENSIFIERS[kind].train(world, case, True, shard_index)
            assert shard_index.places is not None and shard_index.places.device.type == world.device.type
            found[name, case] = (lines, shard_index.places.cpu(), [record.moved for record in records])
    return found


@pytest.mark.parametrize(("size", "device"), [(3, "cpu"), on_gpus(2)])
@pytest.mark.parametrize("kind", DENSIFIERS)
def test_any_owners_train_the_model_of_one_rank(kind: str, size: int, device: str) -> None:
    outcomes = run_ranks(train_all, size, kind, device=device)
    for case in CASES[kind]:
        expected = DENSIFIERS[kind].train(World.single(device if device == "cpu" else "cuda:0"), case, False)[0]
        for name in TOYS:
            some = [outcome[name, case] for outcome in outcomes]
            found = by_place([lines for lines, _, _ in some], [places for _, places, _ in some])
            assert_same(found, expected, f"{kind}, {name}, {case}, {size} ranks")
            assert size == 1 or sum(some[0][2]) > 0, "no point changed ranks"
            ranges = [len(places) == 0 or int(places[-1] - places[0]) == len(places) - 1 for _, places, _ in some]
            assert size == 1 or name == "backwards" or not all(ranges), "ranges would need no places"


def owned(world: World, kind: str) -> bool:
    """Return whether each rank has what the placement gives it, when a refinement is done."""
    module = DENSIFIERS[kind]
    shard_index = shard_index_of(HalfSpaces(), "even", module.initial("even"), world)
    seen: list[bool] = []
    sharded, name = (ShardedMcmc, "refine_when_due") if kind == "mcmc" else (ShardedDensifier, "_refine")
    refine = getattr(sharded, name)

    def watched(self: Any, params: Any, *rest: Any) -> None:
        refine(self, params, *rest)
        if kind == "mcmc" and not self.due_after(*rest[-2:]):
            return
        owners = HalfSpaces().owners(params["means"].detach(), world.size)
        seen.append(bool((owners == world.rank).all()) and len(owners) > 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, name, watched)
        patch.setitem(test_sharded_mcmc.RULES, "cap_max", test_sharded_mcmc.COUNT)  # so that it never grows,
        patch.setitem(test_sharded_mcmc.RULES, "order_every", 1000)  # and is never sorted
        module.train(world, "even", True, shard_index)
    return len(seen) >= test_sharded_densifier.REFINED and all(seen)


@pytest.mark.parametrize("kind", DENSIFIERS)
def test_owners_are_those_that_the_placement_names(kind: str) -> None:
    """MCMC's also behind refinements that only relocate."""
    assert all(run_ranks(owned, 3, kind))


def test_replicas_are_not_moved() -> None:
    for placement in (AllHere(), Replicated()):
        keys = torch.arange(5)
        move = plan_move(keys, torch.ones_like(keys), [5], World.single(), 1.1, placement)
        assert move.send == [5] and move.moved == 0 and move.places is None and move.send_order is None
        assert placement.shares(5, lambda: torch.zeros(5, 3), 1) == [range(5)] and placement.kind is None
    assert Sharded().kind is None and HalfSpaces().kind == "HalfSpaces"


def misplaced(world: World) -> list[str]:
    """Return a rank's errors if its own placement, or another rank's, is wrong."""
    keys, errors = torch.arange(4) + world.rank, list[str]()
    placements: list[Placement] = [Wrong(owner) for owner in (-1, world.size, None)]
    for placement in placements:
        with pytest.raises(ValueError) as error:
            plan_move(keys, torch.ones_like(keys), [4] * world.size, world, 1.1, placement, parents=lambda: keys)
        errors.append(str(error.value))
    return errors


def test_owners_that_are_no_ranks() -> None:
    """Every rank raises, not only the sender."""
    for errors in run_ranks(misplaced, 2):
        outside = "Wrong names owners for the points of rank 1: 1 of them are not among the 2 ranks"
        assert errors == [outside, outside, "Wrong names owners for the points of rank 1: that is +1 owners"]
