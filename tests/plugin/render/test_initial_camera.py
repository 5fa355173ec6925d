"""Pages of the viewer open at the first training view: upright, at the distance of the scene."""

import math
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.configs.base_config import ViewerConfig
from nerfstudio.data.scene_box import SceneBox
from nerfstudio.viewer.utils import CameraState
from nerfstudio.viewer.viewer import Viewer
from torch.nn.functional import normalize

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.launch.process_world import set_world
from ns_multigpu.plugin.render.initial_camera import initial_camera
from ns_multigpu.plugin.render.viewer import PageRenderer
from ns_multigpu.plugin.run.config import read_config
from ns_multigpu.plugin.tools.models import load_model
from tests.lib.processes import free_port
from tests.lib.rendering import make_pipeline, write_capture
from tests.plugin.radiance.run.test_radiance_tools import write_run
from tests.plugin.render.test_viewer import Visitor

UP = torch.tensor([0.3, -0.1, 1.0], dtype=torch.float64)


def poses(rolls: list[float], tilt: float = 0.4) -> torch.Tensor:
    """Return [N, 3, 4] poses of a ring around the origin, whose axis is `UP`, each rolled by an angle in radians.

    Args:
        tilt: angle in radians by which each camera looks down.
    """
    axis = normalize(UP, dim=0)
    start = normalize(torch.linalg.cross(axis, torch.tensor([1.0, 0, 0]).double()), dim=0)
    side = torch.linalg.cross(axis, start)
    found = []
    for k, roll in enumerate(rolls):
        angle = 2 * math.pi * k / len(rolls)
        back = math.cos(tilt) * (math.cos(angle) * start + math.sin(angle) * side) + math.sin(tilt) * axis
        right = normalize(math.cos(angle) * side - math.sin(angle) * start, dim=0)
        up = torch.linalg.cross(back, right)
        right, up = math.cos(roll) * right + math.sin(roll) * up, math.cos(roll) * up - math.sin(roll) * right
        found.append(torch.stack([right, up, back, 3 * back], 1))
    return torch.stack(found)


def capture(camera_to_worlds: torch.Tensor, points: torch.Tensor | None = None) -> Any:
    """Return the parts of a dataset that determine a page's camera: images of 60x40, focal length 50."""
    cameras = Cameras(camera_to_worlds.float(), 50.0, 50.0, 30.0, 20.0, width=60, height=40)
    box = SceneBox(torch.tensor([[-1.0, -1, -1], [1, 1, 1]]))
    return SimpleNamespace(cameras=cameras, metadata={} if points is None else {"points3D_xyz": points}, scene_box=box)


def test_a_rolled_view_is_shown_upright() -> None:
    rolls = [0.35, *(0.05 * (-1) ** k for k in range(23))]
    views = poses(rolls)
    found = initial_camera(capture(views))
    back = views[0, :, 2]
    assert torch.allclose(found.position, views[0, :, 3], atol=1e-5)
    assert torch.allclose(normalize(found.position - found.look_at, dim=0), back, atol=1e-5)
    degrees = math.degrees(math.acos(float(found.up @ normalize(UP, dim=0))))
    assert degrees < 3, "the first view's own roll is 20 degrees"
    assert found.fov == pytest.approx(2 * math.atan(20 / 50))


def test_views_of_one_side_do_not_tilt_the_scene() -> None:
    found = initial_camera(capture(poses([0.0] * 24)[:8]))
    assert math.degrees(math.acos(float(found.up @ normalize(UP, dim=0)))) < 1, "the mean up direction is 10 off"


def test_views_that_look_straight_down_keep_their_own_up() -> None:
    views = poses([0.0] * 4, tilt=math.pi / 2 - 0.01)
    found = initial_camera(capture(views))
    assert torch.allclose(found.up, views[0, :, 1], atol=1e-5)


def test_the_distance_is_that_of_the_points_before_the_view() -> None:
    views = poses([0.0] * 6)
    right, _, back, position = views[0].unbind(1)
    before = position - torch.linspace(1.5, 2.5, 101).double()[:, None] * back
    side, behind = position - 9 * back + 5 * right, position + 7 * back
    points = torch.cat([before, side.expand(300, 3), behind.expand(300, 3)]).float()
    found = initial_camera(capture(views, points))
    assert float((found.look_at - position).norm()) == pytest.approx(2.0, abs=1e-4)
    for none in (None, torch.empty(0, 3), behind[None].float()):
        found = initial_camera(capture(views, none))
        assert float((found.look_at - position).norm()) == pytest.approx(3.0, abs=1e-4), "the box is 3 away"
    inside = capture(views - torch.cat([torch.zeros(3, 3), position[:, None]], 1))
    found = initial_camera(inside)
    assert float((found.look_at - found.position).norm()) == pytest.approx(0.1), "a view at the box's centre"


def splats(folder: Path) -> Any:
    pipeline = make_pipeline(World.single(), write_capture(folder / "capture"), strategy="single")
    pipeline.model.gauss_params["opacities"].data += 3.0
    return pipeline.eval()


def field(folder: Path) -> Any:
    run = write_run(folder)
    (checkpoint,) = (run.parent / "nerfstudio_models").glob("*.ckpt")
    set_world(World.single())
    try:
        return load_model(read_config(run), checkpoint, World.single(), "test")
    finally:
        set_world(None)


def view_of(pipeline: Any, aspect: float) -> CameraState:
    """Return the first training view as nerfstudio's viewer describes it. All views of this capture are upright."""
    camera = pipeline.datamanager.train_dataset.cameras[0]
    fov = 2 * math.atan(int(camera.height) / 2 / float(camera.fy))
    return CameraState(fov, aspect, camera.camera_to_worlds.double(), CameraType.PERSPECTIVE)


@pytest.fixture(params=[splats, field])
def viewer(request: Any, tmp_path: Path) -> Any:
    pipeline = request.param(tmp_path)
    made = Viewer(
        ViewerConfig(websocket_port=free_port(), max_num_display_images=1), tmp_path / "viewer.log", tmp_path, pipeline,
        train_lock=threading.Lock(),
    )  # fmt: skip
    yield made
    made.viser_server.stop()
    for thread in threading.enumerate():  # a thread that draws while the process ends aborts it
        if isinstance(thread, PageRenderer):
            thread.running = False
            thread.join(60)


def test_the_first_image_is_of_the_first_view(viewer: Any) -> None:
    states: list[CameraState] = []
    usual: Callable[..., Any] = viewer.get_camera_state
    viewer.get_camera_state = lambda client: states.append(usual(client)) or states[-1]
    page = Visitor(viewer)
    page.look(5.0)
    assert page.sees()
    expected = view_of(viewer.pipeline, 1.5)
    assert torch.allclose(states[0].c2w[:, 2:], expected.c2w[:, 2:], atol=1e-5)
    assert torch.allclose(states[0].c2w, expected.c2w, atol=0.01), "upright"
    assert states[0].fov == pytest.approx(expected.fov, abs=1e-6)
    page.vanish()
