"""`benchmarks.captures.depth_error`: what it calls an error."""

from dataclasses import replace

import torch

from benchmarks.captures.depth_error import errors_of
from ns_multigpu.core.step.depth_loss import depth_loss, keypoints
from ns_multigpu.core.types import Patch, Pixels
from tests.core.step.test_depth_loss import HEIGHT, SCALE, WIDTH, make_depth, make_view


def test_errors_are_those_that_the_loss_is_the_mean_of() -> None:
    view, depth = make_view(), make_depth()
    covered = torch.ones_like(depth)
    covered[3:6, 4:9] = 0  # where nothing is drawn, pictures show some depth
    found = errors_of(depth, covered, view, SCALE)
    drawn = Pixels(Patch.whole(0, view), depth, covered, depth * covered)
    torch.testing.assert_close(found.mean(), depth_loss(drawn, view))
    assert len(found) == int(keypoints(view).inside.sum()) > 20
    nothing = errors_of(depth, torch.zeros(HEIGHT, WIDTH, 1).double(), view, 1.0)
    torch.testing.assert_close(nothing, 1 / keypoints(view).depths[keypoints(view).inside])
    assert len(errors_of(depth, covered, replace(view, width=1, height=1), SCALE)) <= 1
