"""Cameras of training views as steps take them: nerfstudio's numbers, read once."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.cameras.camera_optimizers import CameraOptimizer, CameraOptimizerConfig
from nerfstudio.cameras.cameras import Cameras

from ns_multigpu.plugin.blocks.host_cameras import HostCameras
from ns_multigpu.plugin.blocks.signatures import Signatures
from ns_multigpu.plugin.model.cameras import view_from_camera, views_of


@pytest.mark.parametrize("times", [False, True])
def test_they_are_those_of_one_camera_after_another(times: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    g, count = torch.Generator().manual_seed(0), 7
    sides = {name: 900 * torch.rand(count, 1, generator=g) for name in ("fx", "fy", "cx", "cy")}
    sizes = {name: torch.randint(5, 2000, (count, 1), generator=g) for name in ("width", "height")}
    moments = torch.rand(count, 1, generator=g) if times else None
    cameras = Cameras(torch.randn(count, 3, 4, generator=g), **sides, **sizes, times=moments)
    singles = [cameras[index : index + 1] for index in range(count)]
    expected = {
        (index, factor): view_from_camera(one, one.camera_to_worlds[0], index, factor)
        for index, one in enumerate(singles)
        for factor in (1, 4)
    }
    monkeypatch.setattr(Cameras, "__getitem__", lambda *_: pytest.fail("a camera is slow to take out"))
    found = HostCameras(SimpleNamespace(train_dataset=SimpleNamespace(cameras=cameras)))
    for (index, factor), wanted in expected.items():
        view, numbers = found(index, factor)
        assert found(index, factor)[0] is view
        for one in (view, views_of(cameras)[index]) if factor == 1 else (view,):
            assert torch.equal(one.viewmat, wanted.viewmat) and torch.equal(one.K, wanted.K)
            assert (one.width, one.height, one.index) == (wanted.width, wanted.height, wanted.index)
            assert one.time == wanted.time and (one.time > 0) == times
        assert np.array_equal(numbers, torch.cat([wanted.viewmat.flatten(), wanted.K.flatten()]).numpy())


@pytest.mark.parametrize("mode", ["SO3xR3", "SE3"])
def test_they_follow_corrections(mode: Any) -> None:
    g = torch.Generator().manual_seed(1)
    places = torch.cat([torch.linalg.qr(torch.randn(3, 3, 3, generator=g))[0], torch.randn(3, 3, 1, generator=g)], 2)
    places[:, :, :3] *= torch.linalg.det(places[:, :, :3])[:, None, None]
    cameras = Cameras(places, fx=50.0, fy=50.0, cx=20.0, cy=15.0, width=40, height=30)
    found = HostCameras(SimpleNamespace(train_dataset=SimpleNamespace(cameras=cameras)))
    given, numbers = found(1, 2)
    optimizer = CameraOptimizer(CameraOptimizerConfig(mode=mode), 3, "cpu")
    optimizer.pose_adjustment.data = 0.1 * torch.randn(3, 6, generator=g)
    found.correct(optimizer.pose_adjustment, mode)
    view, same = found(1, 2)
    one = cameras[1:2]
    one.metadata = {"cam_idx": 1}
    wanted = view_from_camera(one, optimizer.apply_to_camera(one)[0], 1, 2)
    torch.testing.assert_close(view.viewmat, wanted.viewmat.detach(), rtol=0, atol=1e-5)
    assert float((view.viewmat - given.viewmat).abs().max()) > 0.01 and same is numbers
    assert torch.equal(view.K, given.K) and view.index == 1
    optimizer.pose_adjustment.data.zero_()
    found.correct(optimizer.pose_adjustment, mode)
    torch.testing.assert_close(found(1, 2)[0].viewmat, given.viewmat, rtol=0, atol=1e-6)


def test_image_size_distinguishes_a_step_from_its_predecessor() -> None:
    options = SimpleNamespace(
        num_downscales=2,
        resolution_schedule=8,
        depth_loss=0.0,
        depth_loss_start=0,
        normal_map_loss=0.0,
        primitive="3dgs",
    )
    model: Any = SimpleNamespace(config=options, counts=lambda images: images < 6, degree=lambda images: images // 10)
    found = Signatures(SimpleNamespace(model=model, batch_size=2))
    assert [found(step)[:3] for step in (0, 3, 4, 8)] == [(0, 4, True), (0, 4, False),
                                                        (0, 2, False), (1, 1, False)]  # fmt: skip
    assert [step for step in range(20) if found.enlarges(step)] == [4, 8]
    model.config.num_downscales = 0
    assert found(0)[1] == 4, "it is the block's"
    found.forget()
    assert found(0)[1] == 1 and not found.enlarges(4)
