"""A plan is found again by what it says."""

from ns_multigpu.core.plan import Plan
from ns_multigpu.core.types import Patch


def test_plans_that_say_the_same_are_the_same() -> None:
    top, bottom, other = Patch(0, 0, 0, 8, 16, 5), Patch(0, 0, 16, 8, 32, 5), Patch(2, 0, 0, 8, 32)
    plan = Plan.of([[top, other], [bottom]])
    assert plan == Plan.of(iter([(top, other), (bottom,)])) and hash(plan) == hash(Plan.of([[top, other], [bottom]]))
    assert plan.owned == plan.drawn == ((top, other), (bottom,))
    assert plan.views() == [0, 2] and plan.views_of(0) == [0, 2] and plan.views_of(1) == [0]
    others = [Plan.of([[top], [bottom]]), Plan.of([[bottom], [top, other]]), Plan.of([[top, other], [bottom], []])]
    assert len({plan, *others}) == 4


def test_who_owns_a_patch_may_be_another_than_who_draws_it() -> None:
    one, two = Patch(0, 0, 0, 8, 16), Patch(1, 0, 0, 8, 16)
    plan = Plan.of([[one, two], [one]], [[], [one, two]])
    assert plan.drawn == ((one, two), (one,)) and plan.owned == ((), (one, two))
    assert plan.views_of(1) == [0], "of what it draws"
    assert plan != Plan.of([[one, two], [one]])
