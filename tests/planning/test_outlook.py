"""Comparison with other strategies that a run on several GPUs prints at its start."""

from dataclasses import replace

import pytest
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType

from ns_multigpu.planning import rates
from ns_multigpu.planning.outlook import described, outlook
from ns_multigpu.planning.pace import pace
from ns_multigpu.planning.work import VISIBLE, Workload
from ns_multigpu.plugin.splats.capacity import Capacity, expectations, visible_fraction

RUN = Workload(1000, 1920, 1080, views=1, gpus=2)
SMALL = replace(RUN, width=640, height=480)
MEMORY = float(139 << 30)


def test_small_steps_take_what_the_host_does() -> None:
    speeds = outlook("tile", SMALL, 10_000, MEMORY).speeds
    assert speeds["single"] == pytest.approx(1e3 / rates.HOST)
    assert speeds["batch"] == pytest.approx(2e3 / rates.HOST_OF_MANY)
    assert speeds["tile"] == pytest.approx(1e3 / rates.HOST_OF_MANY)
    assert "locality" not in speeds, "no advantage on one machine"


def test_large_steps_take_what_the_kernels_do() -> None:
    speeds = outlook("tile", RUN, 8_000_000, MEMORY).speeds
    large = replace(RUN, points=8_000_000)
    assert speeds["tile"] == pytest.approx(pace("tile", large).images_per_second)
    assert speeds["single"] == pytest.approx(pace("single", replace(large, gpus=1)).images_per_second)
    assert speeds["batch"] == pytest.approx(pace("batch", replace(large, views=2)).images_per_second)


def test_batch_of_the_run_applies_to_its_own_strategy() -> None:
    four = outlook("tile", replace(RUN, views=4), 10_000, MEMORY).speeds
    assert four["tile"] > 2 * outlook("tile", RUN, 10_000, MEMORY).speeds["tile"]
    assert four["batch"] == outlook("tile", RUN, 10_000, MEMORY).speeds["batch"]


def test_plans_beyond_memory_are_not_offered() -> None:
    assert set(outlook("tile", RUN, 150_000_000, MEMORY).speeds) == {"tile"}
    assert set(outlook("tile", RUN, 150_000_000, None).speeds) == {"single", "batch", "tile"}


@pytest.mark.parametrize(
    ("mine", "points", "said"),
    [
        ("tile", 300_000, "With 300,000 Gaussians splatfacto-batch would be 1.6 times as fast as this."),
        ("batch", 1_000_000, None),
        ("tile", 8_000_000, None),
    ],
)
def test_another_strategy_is_named_where_it_is_much_faster(mine: str, points: int, said: str | None) -> None:
    run = replace(RUN, views=2 if mine == "batch" else 1)
    lines = described([outlook(mine, run, size, MEMORY) for size in (1000, points)], mine, 2)
    assert lines[0].startswith("Planned, images a second on 2 GPUs") and f"{points:,} Gaussians: one GPU " in lines[2]
    assert lines[3:] == ([said] if said else [])


def test_one_gpu_may_be_faster_than_several() -> None:
    slow = replace(RUN, gpus=4, machines=4)
    lines = described([outlook("tile", slow, 100_000, MEMORY)], "tile", 4)
    assert "batch" in lines[1] and "locality" in lines[1]
    alone = outlook("tile", SMALL, 1000, MEMORY)
    only = replace(alone, speeds={name: alone.speeds[name] for name in ("single", "tile")})
    assert described([only], "tile", 2)[-1] == (
        "With 1,000 Gaussians one GPU (--machine.num-devices 1) would be 1.3 times as fast as this."
    )


def test_expectations_need_a_choice_of_strategies() -> None:
    found = Capacity(20_000, 10**8, 139 << 30, RUN, on_gpu=True)
    lines = expectations(found, "tile", 10**8, "default")
    assert "20,000 Gaussians" in lines[1] and "1,000,000 Gaussians" in lines[2]
    assert "300,000 Gaussians" in expectations(found, "tile", 300_000, "mcmc")[2]
    assert len(expectations(replace(found, now=1_000_000), "batch", None, "default")) == 2
    much, little = (expectations(found, "tile", 6 * 10**7, "mcmc", part)[2] for part in (0.2, 0.05))
    assert int(little.rpartition(" ")[2]) > 2 * int(much.rpartition(" ")[2]), "views that show less"
    assert expectations(replace(found, on_gpu=False), "tile", None, "default") == []
    assert expectations(replace(found, workload=replace(RUN, gpus=1)), "tile", None, "default") == []
    assert expectations(found, "a strategy of a user", None, "default") == []


def test_visible_fraction_is_that_of_the_seed_points() -> None:
    """A view shows a quarter of a plane in front of it, and nothing of the half behind it."""
    steps = torch.linspace(-0.99, 0.99, 40)
    x, y = torch.meshgrid(steps, steps, indexing="ij")
    plane = torch.stack([x, y, torch.full_like(x, -1.0)], -1).reshape(-1, 3)
    seeds = torch.cat([plane, plane * torch.tensor([1, 1, -1])])
    poses = torch.eye(4)[None, :3].repeat(3, 1, 1)

    def cameras(kind: CameraType) -> Cameras:
        return Cameras(poses, fx=100.0, fy=100.0, cx=50.0, cy=50.0, width=100, height=100, camera_type=kind)

    assert visible_fraction((seeds, seeds), cameras(CameraType.PERSPECTIVE)) == pytest.approx(1 / 8, rel=0.05)
    assert visible_fraction((seeds[:1600], seeds), cameras(CameraType.PERSPECTIVE)) == pytest.approx(1 / 4, rel=0.05)
    assert visible_fraction((seeds, seeds), cameras(CameraType.EQUIRECTANGULAR)) > 0.2
    assert visible_fraction((-10 * seeds[:1600], seeds), cameras(CameraType.PERSPECTIVE)) == 1 / 1600
    assert visible_fraction(None, cameras(CameraType.PERSPECTIVE)) == VISIBLE
