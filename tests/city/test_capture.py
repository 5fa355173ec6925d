"""Pictures, cameras, seed points and the cache of a capture."""

import copy
import pickle
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from ns_multigpu.city import City, CityCapture, Pinhole, render_depth, render_rgb
from ns_multigpu.city.cache import TensorCache
from ns_multigpu.city.cameras import look
from ns_multigpu.city.seed_points import moving_range, sample_seed_points
from ns_multigpu.city.shade import radiance
from ns_multigpu.city.trace import SKY, Width, trace


@pytest.fixture(scope="module")
def city() -> City:
    return City(blocks=1, seed=0)


@pytest.fixture(scope="module")
def capture(city: City) -> CityCapture:
    return CityCapture(city, "aerial", views=20, width=72, height=48)


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(-10 * torch.log10(((a.float() - b.float()) / 255).square().mean()))


def test_the_same_arguments_give_the_same_pictures(capture: CityCapture) -> None:
    again = CityCapture(City(blocks=1, seed=0), "aerial", views=20, width=72, height=48)
    for view in (0, 7):
        for one, two in zip(capture.render(view), again.render(view), strict=True):
            assert torch.equal(one, two)
    other = CityCapture(City(blocks=1, seed=1), "aerial", views=20, width=72, height=48)
    assert psnr(capture.image(7), other.image(7)) < 25


@pytest.mark.parametrize("kind", ["aerial", "street"])
def test_chunks_change_nothing(city: City, kind: str) -> None:
    capture = CityCapture(city, kind, views=8, width=72, height=48, samples=2)
    scene, camera = city.scene(), capture.camera(3)
    whole, parts = (render_rgb(scene, camera, 2, chunk) for chunk in (1 << 20, 1111))
    assert torch.equal(whole, parts)
    assert torch.equal(render_depth(scene, camera, 1 << 20), render_depth(scene, camera, 777))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["aerial", "street"])
def test_a_gpu_renders_the_same(city: City, kind: str) -> None:
    capture = CityCapture(city, kind, views=8, width=144, height=96)
    for view in range(3):
        assert psnr(capture.image(view, "cuda"), capture.image(view, "cpu")) > 35
        near = (capture.depth(view, "cuda") - capture.depth(view, "cpu")).abs() < 0.05
        assert near.float().mean() > 0.99


def test_few_samples_approach_many(city: City, capture: CityCapture) -> None:
    """Anti-aliasing: pictures of more samples come closer and closer to one of very many."""
    scene, camera = city.scene(), capture.camera(6)
    many = render_rgb(scene, camera, 64)
    quality = [psnr(render_rgb(scene, camera, samples), many) for samples in (1, 4, 16)]
    assert quality[0] + 3 < quality[1] and quality[1] + 3 < quality[2]
    assert quality[1] > 28


def test_a_small_picture_is_a_large_one_averaged(capture: CityCapture) -> None:
    """Textures are band-limited: detail that a small picture cannot show does not disturb it."""
    small = render_rgb(capture.city.scene(), capture.camera(6), 16)
    large = render_rgb(capture.city.scene(), capture._scaled(6, 4.0), 4).float()
    averaged = large.reshape(48, 4, 72, 4, 3).mean(dim=(1, 3))
    assert psnr(small, averaged) > 26


def test_pictures_have_content(city: City) -> None:
    for kind in ("aerial", "street"):
        image = CityCapture(city, kind, views=8, width=96, height=64).image(4).float()
        assert image.std() > 25
        assert (image[:, 1:] - image[:, :-1]).abs().mean() > 3


def test_depth_is_along_the_axis(city: City) -> None:
    """Looking straight down from high above, the open ground lies at the camera's height in every pixel."""
    pose = look(np.array([[0.0, 0.0, 150.0]]), np.array([[0.0, 0.0, -1.0]]), np.array([[0.0, 1.0, 0.0]]))[0]
    camera = Pinhole(torch.from_numpy(pose).float(), 40.0, 40.0, 40.0, 30.0, 80, 60)
    depth = render_depth(city.scene(), camera)
    assert depth.max() == pytest.approx(150.0, abs=1e-2)
    assert (depth > 149.99).float().mean() > 0.3 and depth.min() < 145


def test_sky_has_no_depth(city: City) -> None:
    pose = look(np.array([[0.0, 0.0, 90.0]]), np.array([[1.0, 0.0, 1.0]]), np.array([[0.0, 0.0, 1.0]]))[0]
    camera = Pinhole(torch.from_numpy(pose).float(), 80.0, 80.0, 10.0, 10.0, 20, 20)
    assert (render_depth(city.scene(), camera) == 0).all()
    blue = render_rgb(city.scene(), camera, 1).float().mean(dim=(0, 1))
    assert blue[2] > blue[0]


def test_shadows_darken_the_ground(city: City, capture: CityCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    with_shadows = render_rgb(city.scene(), capture.camera(5), 1).float()

    def sunlit(scene, origin, direction, width=None, *, shadow=False):
        t, number = trace(scene, origin, direction, width)
        return (torch.full_like(t, 1e9), torch.full_like(number, SKY)) if shadow else (t, number)

    monkeypatch.setattr("ns_multigpu.city.shade.trace", sunlit)
    without = render_rgb(city.scene(), capture.camera(5), 1).float()
    darker = (without - with_shadows).mean(dim=2)
    assert (darker >= 0).all()
    assert 0.05 < (darker > 20).float().mean() < 0.7


def test_held_out_views(capture: CityCapture) -> None:
    train, test = capture.split("train"), capture.split("test")
    assert test.tolist() == [0, 8, 16] and len(train) == 17
    assert sorted([*train, *test]) == list(range(20))
    every = CityCapture(capture.city, views=20, width=72, height=48, eval_interval=0)
    assert len(every.split("train")) == len(every.split("test")) == 20


@pytest.mark.parametrize("kind", ["aerial", "street"])
@pytest.mark.parametrize("interval", [4, 5, 8, 10])
def test_held_out_views_look_in_all_directions(city: City, kind: str, interval: int) -> None:
    capture = CityCapture(city, kind, views=400, eval_interval=interval)
    forward = -capture.c2w[capture.split("test"), :, 2]
    level = forward[:, 2] > -0.9
    sectors = (torch.atan2(forward[level, 1], forward[level, 0]) / (torch.pi / 2)).round().long() % 4
    assert set(sectors.tolist()) == {0, 1, 2, 3}
    assert (~level).any() == (kind == "aerial")


@pytest.mark.parametrize("kind", ["aerial", "street"])
def test_poses_are_rotations_and_cover_the_city(city: City, kind: str) -> None:
    capture = CityCapture(city, kind, views=50)
    rotation = capture.c2w[:, :, :3]
    torch.testing.assert_close(rotation @ rotation.transpose(1, 2), torch.eye(3).expand(50, 3, 3), atol=1e-5, rtol=0)
    assert (torch.linalg.det(rotation) > 0).all()
    back = torch.linalg.inv(capture.viewmats())
    torch.testing.assert_close(back[:, :3, 3], capture.c2w[:, :, 3], atol=1e-3, rtol=0)
    torch.testing.assert_close(back[:, :3, 2], -capture.c2w[:, :, 2], atol=1e-5, rtol=0)
    position = capture.c2w[:, :2, 3]
    assert position.min() < -0.3 * city.half and position.max() > 0.3 * city.half
    if kind == "street":
        assert (capture.c2w[:, 2, 3] < 3).all() and (position.abs() < city.half + 1).all()


def test_views_overlap(city: City) -> None:
    """Surface points of a view, projected into the other views, are mostly visible there."""
    capture = CityCapture(city, views=60, width=72, height=48)
    points = capture.seed_points(400, noise=0.0).xyz
    viewmats = capture.viewmats()
    local = torch.einsum("vij,nj->vni", viewmats[:, :3, :3], points) + viewmats[:, None, :3, 3]
    u = capture.fx * local[..., 0] / local[..., 2] + capture.cx
    v = capture.fy * local[..., 1] / local[..., 2] + capture.cy
    inside = (local[..., 2] > 1) & (u > 0) & (u < capture.width) & (v > 0) & (v < capture.height)
    assert inside.sum(dim=0).float().median() >= 8


def test_seed_points_lie_on_surfaces(capture: CityCapture) -> None:
    """Rays from the cameras to points without noise end at the points; with noise, about as far off as the noise."""
    exact, noisy = capture.seed_points(600, noise=0.0), capture.seed_points(600, noise=0.05)
    assert exact.xyz.shape == (600, 3) and exact.rgb.dtype == torch.uint8
    off = (noisy.xyz - exact.xyz).norm(dim=1)
    assert torch.equal(noisy.rgb, exact.rgb) and 0.04 < off.square().mean().sqrt() / 3**0.5 < 0.06
    scene = capture.city.scene()
    nearest = torch.full((600,), 1e9)
    for view in range(len(capture)):
        o = capture.c2w[view, :, 3]
        d = exact.xyz - o
        distance = d.norm(dim=1)
        width = Width(torch.zeros(600), 1.0 / capture.fx)
        t, _ = trace(scene.geometry, o[:, None].expand(3, 600), (d / distance[:, None]).t().contiguous(), width)
        nearest = torch.minimum(nearest, (t - distance).abs())
    assert (nearest < 0.05).float().mean() > 0.99
    assert exact.rgb.float().std() > 20
    again = CityCapture(capture.city, "aerial", views=20, width=72, height=48).seed_points(600, noise=0.0)
    assert torch.equal(again.xyz, exact.xyz) and torch.equal(again.rgb, exact.rgb)


@pytest.mark.parametrize("time_varying", [False, True])
def test_seed_points_know_nothing_of_held_out_views(city: City, time_varying: bool) -> None:
    """Wherever these look, the points are the same."""
    options: dict[str, Any] = {"views": 20, "width": 72, "height": 48, "time_varying": time_varying}
    one, other = CityCapture(city, **options), CityCapture(city, **options)
    held_out = torch.from_numpy(other.split("test"))
    other.c2w[held_out] = other.c2w[held_out.roll(1)]
    other.times[held_out] = other.times[held_out.roll(1)]
    for a, b in zip(one.seed_points(200), other.seed_points(200), strict=True):
        assert torch.equal(a, b)
    assert not set(held_out.tolist()) & {1, 2}
    other.c2w[1] = other.c2w[2]
    moved = sample_seed_points(other, 200, 0.0, torch.device("cpu"))
    assert not torch.equal(one.seed_points(200, noise=0.0).xyz, moved.xyz), "training views do count"


def test_only_cars_move(city: City) -> None:
    """Between two moments, light changes only along rays that end on or next to a car (in its shadow, say)."""
    capture = CityCapture(city, views=10, width=144, height=96, time_varying=True)
    assert capture.times[0] == 0 and capture.times[-1] == 1 and (capture.times.diff() > 0).all()
    camera = capture.camera(0)
    ys, xs = torch.meshgrid(torch.arange(96), torch.arange(144), indexing="ij")
    origin, direction, _ = camera.rays(xs.reshape(-1) + 0.5, ys.reshape(-1) + 0.5)
    scenes = [city.scene(time) for time in (0.0, 0.5)]
    one, two = (radiance(scene, origin, direction, 1 / camera.fx) for scene in scenes)
    changed = (one - two).abs().amax(dim=0) > 0
    assert 0.0005 < changed.float().mean() < 0.2
    near_car = torch.zeros_like(changed)
    for scene in scenes:
        cars = scene.geometry.layers[-1]
        assert moving_range(scene, city) == (cars.first, cars.first + cars.geometry.shape[1])
        t, _ = trace(scene.geometry, origin, direction)
        p = origin + direction * t
        moving = cars.geometry[:, torch.from_numpy(city.cars.speed != 0).repeat(2)]
        low, high = moving[:2, None] - 2.5, moving[3:5, None] + 2.5
        near_car |= ((p[:2, :, None] > low) & (p[:2, :, None] < high)).all(dim=0).any(dim=1)
    assert near_car[changed].all() and not near_car.all()
    assert (CityCapture(city, views=10).times == 0).all()


def test_seed_points_of_a_time_varying_capture_exclude_cars(city: City) -> None:
    still = CityCapture(city, "street", views=12, width=72, height=48)
    moving = CityCapture(city, "street", views=12, width=72, height=48, time_varying=True)
    low, high = (torch.from_numpy(corner.copy()) for corner in city.cars.solids(0.0).bounds())
    parked = torch.from_numpy(city.cars.speed == 0).repeat(2)
    low, high = low[parked] - 1e-3, high[parked] + 1e-3
    on_cars = []
    for capture in (still, moving):
        xyz = capture.seed_points(1500, noise=0.0).xyz[:, None]
        on_cars.append(int(((xyz > low) & (xyz < high)).all(dim=2).any(dim=1).sum()))
    assert on_cars[0] > 20 and on_cars[1] == 0


def test_sixty_thousand_views_cost_next_to_nothing() -> None:
    city = City(blocks=6, seed=0)
    tracemalloc.start()
    begin = time.process_time()
    capture = CityCapture(city, "street", views=60_000, width=1920, height=1080)
    seconds, (_, peak) = time.process_time() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 3.0 and peak < 100 << 20
    assert capture.image(59_999, scale=0.05).shape == (54, 96, 3)
    assert len(capture.cache) == 1


def test_cache_is_bounded_and_keeps_the_latest() -> None:
    cache = TensorCache(limit=1000)
    calls: list[int] = []

    def get(key: int) -> torch.Tensor:
        return cache.get(key, lambda: calls.append(key) or torch.full((300,), key, dtype=torch.uint8))

    for key in (0, 1, 2, 0, 3):  # 3 pushes out 1, the one not used for longest
        assert (get(key) == key).all()
        assert cache.bytes <= 1000
    assert calls == [0, 1, 2, 3] and len(cache) == 3
    get(0), get(1)
    assert calls == [0, 1, 2, 3, 1]
    cache.get("large", lambda: torch.zeros(5000, dtype=torch.uint8))
    assert "large" not in cache._kept and cache.bytes <= 1000


def test_a_capture_is_copied_by_reference_and_pickled_by_its_arguments(capture: CityCapture) -> None:
    assert copy.deepcopy({"capture": capture})["capture"] is capture
    data = pickle.dumps(capture)
    assert len(data) < 2000
    assert torch.equal(pickle.loads(data).image(1), capture.image(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"views": 1}, "views is 1"), ({"width": 2}, "width is 2"), ({"samples": 0}, "samples is 0"),
        ({"kind": "submarine"}, "submarine"), ({"eval_interval": 1}, "eval_interval is 1"),
        ({"altitude": -3.0}, "altitude is -3"), ({"altitude": 10.0}, "roofs"), ({"cache_bytes": -1}, "limit is -1"),
    ],
)  # fmt: skip
def test_bad_captures_are_refused(city: City, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CityCapture(city, **arguments)


def test_bad_cities_are_refused() -> None:
    for arguments, message in (
        ({"blocks": 0}, "blocks is 0"), ({"seed": -1}, "seed is -1"), ({"car_density": -1}, "car_density")
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            City(**arguments)


def test_cities_of_every_size_have_a_bit_of_everything() -> None:
    for blocks in (1, 2, 3):
        for seed in range(4):
            city = City(blocks, seed)
            assert len(city.still[0]) > 40 * blocks and len(city.still[1]) >= 1 and len(city.still[2]) > 50
            assert {1, 2, 3, 4, 5} <= set(city.plan.lots.use.tolist())
