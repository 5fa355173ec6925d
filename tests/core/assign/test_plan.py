"""A plan is found again by what it says."""

from dataclasses import replace

import torch

from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import Patch, View
from strategies import STRATEGIES


def test_equal_plans_compare_equal() -> None:
    top, bottom, other = Patch(0, 0, 0, 8, 16, 5), Patch(0, 0, 16, 8, 32, 5), Patch(2, 0, 0, 8, 32)
    plan = Plan.of([[top, other], [bottom]])
    assert plan == Plan.of(iter([(top, other), (bottom,)])) and hash(plan) == hash(Plan.of([[top, other], [bottom]]))
    assert plan.owned == plan.drawn == ((top, other), (bottom,))
    assert plan.views() == [0, 2] and plan.views_of(0) == [0, 2] and plan.views_of(1) == [0]
    others = [Plan.of([[top], [bottom]]), Plan.of([[bottom], [top, other]]), Plan.of([[top, other], [bottom], []])]
    assert len({plan, *others}) == 4


def test_patch_owner_may_differ_from_its_renderer() -> None:
    one, two = Patch(0, 0, 0, 8, 16), Patch(1, 0, 0, 8, 16)
    plan = Plan.of([[one, two], [one]], [[], [one, two]])
    assert plan.drawn == ((one, two), (one,)) and plan.owned == ((), (one, two))
    assert plan.views_of(1) == [0], "of what it draws"
    assert plan != Plan.of([[one, two], [one]])


def test_plans_that_depend_on_sizes_only_are_cached() -> None:
    """And never taken for those of views of other sizes."""
    batch = STRATEGIES["batch"](replace(World.single(), size=2))

    def plan(*sizes: tuple[int, int]) -> Plan:
        return batch.plan_alike([View(torch.eye(4), torch.eye(3), *size, k) for k, size in enumerate(sizes)])

    one = plan((64, 48), (32, 48))
    assert plan((64, 48), (32, 48)) is one
    other = plan((32, 48), (64, 48))
    assert [patch.x1 for of in one.drawn for patch in of] == [64, 32]
    assert [patch.x1 for of in other.drawn for patch in of] == [32, 64]
