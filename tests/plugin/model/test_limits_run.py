"""The far plane and the radius clip of a run: the options apply to all that draws, and bad ones are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.checks import check_far_plane
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.model.options import SplatModelConfig
from ns_multigpu.plugin.model.surfaces import check_primitive
from tests.lib.training_run import follow, write_capture
from tests.locality.test_placing import above

MODEL = "pipeline.model."


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"far_plane": 0.005}, r"far-plane 0.005: give a depth above that of the near plane, 0.01"),
        ({"far_plane": float("nan")}, "far-plane nan"),
        ({"radius_clip": -1.0}, "radius-clip -1.0: give 0 pixels or more"),
        ({"radius_clip": float("inf")}, "radius-clip inf"),
    ],
)
def test_limits_that_are_none_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_primitive(SplatModelConfig(**options), "tile")


def test_a_far_plane_nearer_than_the_scene_is_refused() -> None:
    views = [above(index, 0.0) for index in range(3)] + [above(3, 1e4)]  # from a height of 2; the last sees nothing
    points = torch.tensor([[0.0, 0, 0], [0.1, 0, 0.5], [0, 0, 9]])
    world = World.single()
    check_far_plane(1.6, points, views, world)
    with pytest.raises(InputError, match=r"far-plane 1.4: 3 of 3 training views.*none nearer than 1.5\. Give a larger"):
        check_far_plane(1.4, points, views, world)
    near = [above(index, 0.0, height=1.0) for index in range(3)]
    check_far_plane(1.4, points, [*views, *near], world)  # half of them see some
    check_far_plane(1.4, points, views[3:], world)


def test_a_run_draws_within_its_limits(tmp_path: Path) -> None:
    write_capture(tmp_path / "tiny")
    options = {MODEL + "far_plane": 1.25, MODEL + "radius_clip": 2.0, "fused_steps": "always"}
    run = follow(World.single(), tmp_path / "tiny", tmp_path / "runs", options, 2, 1, double=False)
    model: Any = run.pipeline.model
    for drawn in (model.primitive(depth=True, counted=False), model.primitive(depth=False).kernels()):
        assert (drawn.far, drawn.radius_clip) == (1.25, 2.0)
    with pytest.raises(InputError, match=r"far-plane 0.1: 8 of 8 training views"):
        follow(World.single(), tmp_path / "tiny", tmp_path / "near", {MODEL + "far_plane": 0.1}, 1, 1, double=False)
