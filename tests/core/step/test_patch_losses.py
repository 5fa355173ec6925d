"""The loss of a rank's patches, with bilateral grids that change nothing and without any."""

import torch

from ns_multigpu.core.exchange.pixel_operators import OwnedPixels
from ns_multigpu.core.step.bilateral_grids import StepGrids
from ns_multigpu.core.step.patch_losses import PatchLosses
from ns_multigpu.core.step.step_settings import StepSettings
from ns_multigpu.core.types import Patch, View

WIDTH, HEIGHT, BANDS = 40, 64, ((0, 32), (32, 64))


def test_maps_that_change_nothing() -> None:
    g = torch.Generator().manual_seed(2)
    view = View(torch.eye(4), torch.eye(3), WIDTH, HEIGHT, 0)
    patches = [Patch(0, 0, first, WIDTH, end, halo=16) for first, end in BANDS]
    sides = [patch.rendered(view) for patch in patches]
    sizes = [(y1 - y0) * (x1 - x0) for x0, y0, x1, y1 in sides]
    settings = StepSettings(WIDTH, HEIGHT, 1, 0.2, 8, 8, 8)
    color, alpha = torch.rand(sum(sizes), 3, generator=g), torch.rand(sum(sizes), generator=g)
    photographs = [torch.rand(y1 - y0, x1 - x0, 3, generator=g) for x0, y0, x1, y1 in sides]
    identity = torch.eye(3, 4).flatten()[:, None, None, None].repeat(1, 1, 2, 3, 2)
    found = []
    for maps in (False, True):
        report, last = torch.zeros(2), torch.full((sum(sizes),), 7, dtype=torch.int32)
        grids = StepGrids(identity, *[torch.zeros(1)] * 2, 1)
        grids.begin()
        losses = PatchLosses(settings, torch.full((1, 3), 0.2), report, None, grids if maps else None)
        drawn = OwnedPixels(0.9 * color, alpha, last)
        rgbs, v_color, v_alpha = losses.add(drawn, patches, [view], photographs)
        found.append([*rgbs, v_color, v_alpha, report, last])
    for without, with_maps in zip(*found, strict=True):
        torch.testing.assert_close(with_maps, without, rtol=1e-4, atol=1e-6)
    assert int((found[1][-1] == -1).sum()) == sum(sizes) - WIDTH * HEIGHT, "the way back looks at no pixel of a halo"
