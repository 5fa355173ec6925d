"""Densification of shards gives, bit for bit, the points and moments that one rank with Morton order has."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ns_multigpu.core.assign.placement import Sharded
from ns_multigpu.core.assign.shard_index import ShardIndex
from ns_multigpu.core.dist.collectives import all_gather_ints
from ns_multigpu.core.dist.world import World
from ns_multigpu.primitives.densify.densifier import ReplicatedDensifier
from ns_multigpu.primitives.densify.sharded_densifier import ShardedDensifier
from ns_multigpu.primitives.morton import MortonGrid, census, interleaved_codes
from ns_multigpu.primitives.sharded_order import Reordering
from tests.lib.ranks import on_gpus, run_ranks
from tests.primitives.shards import assert_same, bounds_of, lines, shard, take_step, together, whole_model

COUNT, IMAGES, BATCH = 301, 60, 4
RULES: dict[str, Any] = {
    "prune_opa": 0.1, "grow_grad2d": 0.5, "grow_scale3d": 0.3, "grow_scale2d": 0.9, "prune_scale3d": 3.0,
    "prune_scale2d": 0.97, "refine_scale2d_stop_iter": 40, "refine_start_iter": 5, "refine_stop_iter": 60,
    "reset_every": 24, "refine_every": 8, "pause_refine_after_reset": 6, "absgrad": True,
    "order_every": 2,
}  # fmt: skip
REFINED = 4  # at images 8, 16, 32 and 40, then 56, but after a reset all is pruned that is faint
ORDERED = 2  # at 16 and 32; at the others children follow their parents
CASES: dict[str, dict[str, Any]] = {
    "even": {},
    "few places": {},
    "a rank owns nothing": {},
    "a rank owns all": {},
    "a rank is pruned": {},
    "no splits": {"grow_scale3d": 1e9, "refine_scale2d_stop_iter": 0},
    "revised opacity": {"revised_opacity": True},
    "capped": {"cap": COUNT + 60},
}
Outcome = tuple[dict[str, Tensor], list[Reordering], dict[str, int]]


def seen(image: int, count: int) -> dict[str, Tensor]:
    """Return an image's visible points: three quarters of its part of the model, with random gradients and radii."""
    g = torch.Generator().manual_seed(100 + image)
    ids = torch.randperm(count, generator=g)[: 3 * count // 4].sort().values
    ids = ids[ids < count // 3] if image % 3 else ids
    return {
        "ids": ids, "gradients": torch.rand(len(ids), generator=g), "radii": torch.rand(len(ids), generator=g),
        "visible": (torch.rand(len(ids), generator=g) > 0.2).float(),
    }  # fmt: skip


def initial(case: str) -> dict[str, Tensor]:
    """Return the whole model that a run starts from."""
    values = whole_model(COUNT)
    values["opacities"] += 2.0
    if case == "a rank is pruned":
        values["opacities"][: COUNT // 3 + 20] = -9.0
    return values


def train(world: World, case: str, sharded: bool, shard_index: ShardIndex | None = None) -> Outcome:
    """Train through IMAGES images, a step of Adam for each batch, and densifies. `shard_index` is changed."""
    values = initial(case)
    kind = ShardedDensifier if sharded else ReplicatedDensifier
    held = ShardIndex(Sharded()) if shard_index is None else shard_index
    where: dict[str, Any] = {"shard_index": held} if sharded else {}
    densifier = kind(**(RULES | CASES[case]), **where, world=world, seed=7, morton=True)
    bounds = bounds_of(case, COUNT, world)
    values = {name: value.to(world.device) for name, value in values.items()}
    params, optimizers = shard(values, bounds, world.rank, held.places)
    state, records = densifier.initialize_state(scene_scale=1.1), list[Reordering]()
    for step in range(0, IMAGES, BATCH):
        counts = [row[0] for row in all_gather_ints([len(params["means"])], world)]
        first, end = sum(counts[: world.rank]), sum(counts[: world.rank + 1])
        take_step((params, optimizers), first, sum(counts), step, case, held.places)
        rows = [seen(image, sum(counts)) for image in range(step, step + BATCH)]
        info = {name: torch.cat([one[name] for one in rows]) for name in rows[0]}
        places = torch.arange(first, end) if held.places is None else held.places.cpu()
        rows = torch.full((sum(counts),), -1).scatter_(0, places, torch.arange(len(places)))[info["ids"]]
        info = {name: value[rows >= 0].to(world.device) for name, value in (info | {"ids": rows}).items()}
        assert densifier.due_after(step, BATCH) == any(i % 8 == 0 or i % 24 == 0 for i in range(step, step + BATCH))
        densifier.step_post_backward(params, optimizers, state, step, {"n_cameras": BATCH, **info})
        for name in ("grad2d", "count"):
            assert len(state[name]) == len(params["means"])
        if sharded:
            held.of_ranks(len(params["means"]), world)  # an error if the shard index is wrong
        if isinstance(densifier, ShardedDensifier) and densifier.reordering is not None:
            records.append(densifier.reordering)
            densifier.reordering = None
    return lines((params, optimizers)), records, densifier.changes


def train_all(world: World) -> dict[str, Outcome]:
    return {case: train(world, case, sharded=True) for case in CASES}


@pytest.mark.parametrize(("size", "device"), [(1, "cpu"), (3, "cpu"), on_gpus(2), on_gpus(4)])
def test_equals_one_rank(size: int, device: str) -> None:
    outcomes = run_ranks(train_all, size, device=device)
    for case in CASES:
        expected, _, changes = train(World.single(device), case, sharded=False)
        assert len(expected["means"]) == COUNT + changes["duplicated"] + changes["split"] - changes["pruned"]
        assert all(outcome[case][2] == changes for outcome in outcomes)
        assert len(expected["means"]) > 50 and len(expected) == 4 * 6
        assert_same(together([outcome[case][0] for outcome in outcomes]), expected, f"{case}, {size} ranks")
        records = outcomes[0][case][1]
        # Unbalanced shards are distributed at other refinements, too.
        assert len(records) >= ORDERED and (size > 1 or len(records) == ORDERED)
        for k, record in enumerate(records):
            assert len({(o[case][1][k].counts_after, o[case][1][k].moved) for o in outcomes}) == 1
            assert case == "few places" or record.imbalance_after <= max(record.imbalance_before, 1.15)
            assert record.rebalanced == (record.imbalance_before > 1.1)
        if size > 1:
            assert any(record.rebalanced for record in records) and any(record.moved for record in records)


def test_ends_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "order_every", 1)
    expected, _, _ = train(World.single(), "even", sharded=False)
    means = expected["means"]
    codes = interleaved_codes(means, MortonGrid.of(census(means).tolist()))
    assert float((codes.diff() >= 0).double().mean()) > 0.75  # but for the steps since the last refinement


def test_unordered_points_are_refused() -> None:
    with pytest.raises(ValueError, match="ranges of an order"):
        ShardedDensifier(morton=False)
