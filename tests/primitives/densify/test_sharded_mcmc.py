"""MCMC over shards gives, bit for bit, the Gaussians and moments that one rank with Morton order has."""

from typing import Any

import pytest
from torch import Tensor

from ns_multigpu.core.assign.placement import Sharded
from ns_multigpu.core.assign.shard_index import ShardIndex
from ns_multigpu.core.dist.collectives import all_gather_ints
from ns_multigpu.core.dist.world import World
from ns_multigpu.primitives.densify.mcmc import McmcDensifier
from ns_multigpu.primitives.densify.sharded_mcmc import ShardedMcmc
from ns_multigpu.primitives.sharded_order import Reordering
from tests.lib.ranks import on_gpus, run_ranks
from tests.primitives.shards import assert_same, bounds_of, lines, shard, take_step, together, whole_model

COUNT, IMAGES = 301, 40
RULES: dict[str, Any] = {
    "cap_max": 340, "noise_lr": 1.0, "refine_start_iter": 5, "refine_stop_iter": 40, "refine_every": 6,
    "min_opacity": 0.1, "seed": 3, "order_every": 2,
}  # fmt: skip
CASES = (
    "even",
    "few places",
    "a rank owns nothing",
    "a rank owns all",
    "a rank is dead",
    "most are dead",
    "none is dead",
    "all are dead",
    "picked by gradients",
    "picked by both",
)
Outcome = tuple[dict[str, Tensor], list[Reordering], list[int]]


def initial(case: str) -> dict[str, Tensor]:
    """Return the whole model that a run starts from."""
    values = whole_model(COUNT)
    if case == "a rank is dead":
        values["opacities"][: COUNT // 3 + 20] = -9.0
    elif case == "most are dead":  # so that copies of one Gaussian go to several ranks
        values["opacities"] -= 9.0
        values["opacities"][::30] += 18.0
    elif case == "none is dead":
        values["opacities"] += 9.0
    elif case == "all are dead":
        values["opacities"].fill_(-40.0)
    return values


def train(world: World, case: str, sharded: bool, shard_index: ShardIndex | None = None) -> Outcome:
    """Step of one to eleven images: the last refines more than once. `shard_index` is changed."""
    values = initial(case)
    held = ShardIndex(Sharded()) if shard_index is None else shard_index
    where: dict[str, Any] = {"world": world, "shard_index": held} if sharded else {}
    picks: Any = {"picked by gradients": "gradient", "picked by both": "both"}.get(case, "opacity")
    densifier = (ShardedMcmc if sharded else McmcDensifier)(**RULES, **where, morton=True, picks=picks)
    state: dict[str, Any] = {}
    bounds = bounds_of(case, COUNT, world)
    model = shard({name: value.to(world.device) for name, value in values.items()}, bounds, world.rank, held.places)
    step, records, totals = 0, list[Reordering](), list[int]()
    for images in (1, 5, 4, 7, 6, 11, 6):
        counts = [row[0] for row in all_gather_ints([len(model[0]["means"])], world)]
        take_step(model, sum(counts[: world.rank]), sum(counts), step, case, held.places)
        # What of a point's gradients is known follows from where it is: the same wherever it is held.
        sums = densifier.statistics(model[0], state)
        if sums:
            sums["grad2d"].add_(0.01 * model[0]["means"].detach()[:, 0].abs())
            sums["count"].add_(1.0)
        densifier.step_post_backward(*model, step=step, images=images, rate=1e-2, state=state)
        step += images
        totals.append(sum(row[0] for row in all_gather_ints([len(model[0]["means"])], world)))
        if isinstance(densifier, ShardedMcmc) and densifier.reordering is not None:
            records.append(densifier.reordering)
            densifier.reordering = None
    assert step == IMAGES
    return lines(model), records, totals


def train_all(world: World) -> dict[str, Outcome]:
    return {case: train(world, case, sharded=True) for case in CASES}


@pytest.mark.parametrize(("size", "device"), [(1, "cpu"), (3, "cpu"), on_gpus(2), on_gpus(4)])
def test_equals_one_rank(size: int, device: str) -> None:
    outcomes = run_ranks(train_all, size, device=device)
    for case in CASES:
        expected, _, totals = train(World.single(device), case, sharded=False)
        assert_same(together([outcome[case][0] for outcome in outcomes]), expected, f"{case}, {size} ranks")
        assert outcomes[0][case][2] == totals and totals[-1] == (COUNT if case == "all are dead" else 340), totals
        records = outcomes[0][case][1]
        # After images 6, 12 and 18 it grows; after 12, 24 and 36 it is ordered; out of balance, distributed at once.
        uneven = size > 1 and case in ("a rank owns all", "a rank owns nothing")
        assert len(records) == 3 + uneven
        if case != "few places":  # of which each is on one rank
            assert all(record.imbalance_after < 1.11 for record in records)
        if size > 1:
            assert any(record.moved for record in records)


def test_a_model_replaced_behind_its_back_is_noticed() -> None:
    densifier = ShardedMcmc()
    values = whole_model(20)
    densifier.step_post_backward(*shard(values, [0, 20], 0), step=0, images=1, rate=1e-3)
    with pytest.raises(RuntimeError, match=r"has 12 points, not the 20 .* ShardIndex\.hold"):
        densifier.step_post_backward(*shard(values, [0, 12], 0), step=1, images=1, rate=1e-3)
    densifier.shard_index.hold(None, values["means"][:12])
    densifier.step_post_backward(*shard(values, [0, 12], 0), step=1, images=1, rate=1e-3)


def test_unordered_points_are_refused() -> None:
    with pytest.raises(ValueError, match="ranges of an order"):
        ShardedMcmc(morton=False)
