"""Counts of what views show: of groups, and of each patch from each rank, are those of each point by itself."""

from dataclasses import replace

import numpy as np
import torch

from ns_multigpu.core.step.step_settings import HALO
from ns_multigpu.core.types import View
from ns_multigpu.locality import counting
from ns_multigpu.locality.counting import PatchCounter
from ns_multigpu.locality.groups import Groups, cube_around, z_codes
from ns_multigpu.locality.patches import patches_of
from tests.locality.towns import HEIGHT, WIDTH, cameras, town

VIEWS, FACTOR, FAR = 9, 3, 60.0


def test_counts_are_those_of_each_point(monkeypatch: object) -> None:
    means = town(4000)[0]
    poses, Ks = cameras(VIEWS, seed=3)
    sizes = [(WIDTH, HEIGHT), (WIDTH, 30), (20, 12)]
    views = [View(poses[v], Ks[v], *sizes[v % 3], v) for v in range(VIEWS)]
    groups = Groups.along(means, z_codes(means, *cube_around(means)).argsort(), 40)
    counter = PatchCounter(groups, means, FAR)
    owners = np.arange(len(groups)) % 4
    of_group, of_rank = np.zeros((VIEWS, len(groups)), int), np.zeros((VIEWS, FACTOR * FACTOR, 4), int)
    for v, view in enumerate(views):
        x, y, z = (view.viewmat[:3, :3] @ means.T + view.viewmat[:3, 3:]).double()
        u, w = view.K[0, 0] * x / z + view.K[0, 2], view.K[1, 1] * y / z + view.K[1, 2]
        group = groups.order.argsort() // groups.size
        deep = (z >= 0.01) & (z <= FAR)

        def within(rectangle: tuple[int, ...], u=u, w=w, deep=deep) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return deep & (u >= rectangle[0]) & (u < rectangle[2]) & (w >= rectangle[1]) & (w < rectangle[3])

        of_group[v] = torch.bincount(group[within((0, 0, view.width, view.height))], minlength=len(groups)).numpy()
        for number, patch in patches_of(view, 0, FACTOR):
            drawn = replace(patch, halo=HALO if patch.halo else 0)
            shown = torch.from_numpy(owners)[group[within(drawn.rendered(view))]]
            of_rank[v, number] = torch.bincount(shown, minlength=4).numpy()
    assert (of_group.sum(1) > 20).sum() >= 3
    for at_once in (counting._AT_ONCE, 1):  # one view after the other
        monkeypatch.setattr(counting, "_AT_ONCE", at_once)  # type: ignore[attr-defined]
        found = counter.by_group(views)
        assert found.dtype == np.int64 and np.abs(found.toarray() - of_group).sum() <= 2, "rounding at borders"
        needed = counter.by_rank(views, FACTOR, owners, 4)
        assert needed.dtype == np.float32 and np.abs(needed - of_rank).sum() <= 2
