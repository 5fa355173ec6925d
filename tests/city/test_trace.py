"""The traversal against brute force, shadows, and the grid's bounds."""

import numpy as np
import pytest
import torch

from ns_multigpu.city import City
from ns_multigpu.city.grid import CELL, FAR, Frame, clear_height, make_layer
from ns_multigpu.city.shapes import entry
from ns_multigpu.city.sky import SUN
from ns_multigpu.city.solids import Material, Pile, Shape
from ns_multigpu.city.trace import GROUND, SKY, Geometry, Width, reciprocal, surface_normal, trace


@pytest.fixture(scope="module")
def city() -> City:
    return City(blocks=1, seed=3)


def random_rays(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rays from within, above and outside the city, in all directions, some along an axis."""
    g = torch.Generator().manual_seed(seed)
    o = (torch.rand(3, n, generator=g) - 0.5) * torch.tensor([[200.0], [200.0], [160.0]])
    o[2] = o[2].abs() + 0.1
    d = torch.randn(3, n, generator=g)
    d[2] *= 0.6
    d[:, :6] = torch.cat([torch.eye(3), -torch.eye(3)], dim=1)
    return o, d / d.norm(dim=0)


def brute_force(scene: Geometry, o: torch.Tensor, d: torch.Tensor, ground: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Every ray against every solid."""
    inv = reciprocal(d)
    best = torch.full((o.shape[1],), FAR)
    number = torch.full((o.shape[1],), SKY)
    if ground:
        t = -o[2] * inv[2]
        hit = (t > 0) & (d[2] < 0)
        best, number = torch.where(hit, t, best), torch.where(hit, GROUND, number)
    for layer in scene.layers:
        n = layer.geometry.shape[1]
        for solid in range(n):
            g = [layer.geometry[k, solid].expand(o.shape[1]) for k in range(layer.shape.fields)]
            t, hit = entry(layer.shape, g, list(o), list(d), list(inv))
            closer = hit & (t < best)
            best, number = torch.where(closer, t, best), torch.where(closer, layer.first + solid, number)
    return best, number


def test_grid_equals_brute_force(city: City) -> None:
    scene = city.scene().geometry
    o, d = random_rays(3000)
    t, number = trace(scene, o, d)
    expected_t, expected = brute_force(scene, o, d, ground=True)
    assert torch.equal(t, expected_t)
    assert torch.equal(number, expected)
    classes = {int(k) for k in (number >= 0).long() + 2 * (number == GROUND).long()}
    assert classes == {0, 1, 2}, "the rays must meet sky, solids and ground"


def test_shadow_rays_equal_brute_force(city: City) -> None:
    scene = city.scene().geometry
    o, _ = random_rays(4000, seed=1)
    o[2] *= 0.4
    d = torch.from_numpy(SUN).float()[:, None].expand(3, o.shape[1]).contiguous()
    blocked = trace(scene, o, d, shadow=True)[0] < FAR
    expected = brute_force(scene, o, d, ground=False)[0] < FAR
    assert torch.equal(blocked, expected)
    assert 0.02 < blocked.float().mean() < 0.9


def one_solid(shape: Shape, geometry: list[float]) -> Geometry:
    pile = Pile()
    pile.add(shape, geometry, Material.PLAIN, np.array([0.5, 0.5, 0.5]))
    frame = Frame.around(30.0)
    layer = make_layer(pile.solids(shape), 0, frame)
    top = layer.top.clamp_min(0)
    clear = torch.from_numpy(clear_height(top.numpy(), frame, SUN, 0.0))
    return Geometry(frame, (layer,), top, float(top.max()) + 1e-3, clear)


@pytest.mark.parametrize(
    ("shape", "geometry", "origin", "direction", "t", "normal"),
    [
        (Shape.BOX, [-2, -3, 0, 2, 3, 5], [10, 0, 1], [-1, 0, 0], 8.0, [1, 0, 0]),
        (Shape.BOX, [-2, -3, 0, 2, 3, 5], [0, 0, 9], [0, 0, -1], 4.0, [0, 0, 1]),
        (Shape.BLOB, [1, 1, 5, 2, 2, 3, 0], [1, 1, 20], [0, 0, -1], 12.0, [0, 0, 1]),
        (Shape.BLOB, [1, 1, 5, 2, 2, 3, 0], [-9, 1, 5], [1, 0, 0], 8.0, [-1, 0, 0]),
        # A gable with its ridge along x at z = 4: half-way down its slope of 1 in y, the height is 3.
        (Shape.ROOF, [-5, -2, 2, 5, 2, 4, 0, 1, 4], [0, 1, 10], [0, 0, -1], 7.0, [0, 2**-0.5, 2**-0.5]),
        (Shape.ROOF, [-5, -2, 2, 5, 2, 4, 0, 1, 4], [9, 0.5, 3], [-1, 0, 0], 4.0, [1, 0, 0]),
        # The same, cut flat at 3.
        (Shape.ROOF, [-5, -2, 2, 5, 2, 3, 0, 1, 4], [0, 0.2, 10], [0, 0, -1], 7.0, [0, 0, 1]),
    ],
)
def test_known_places(
    shape: Shape, geometry: list[float], origin: list[float], direction: list[float], t: float, normal: list[float]
) -> None:
    scene = one_solid(shape, geometry)
    o, d = torch.tensor(origin).float()[:, None], torch.tensor(direction).float()[:, None]
    found, number = trace(scene, o, d)
    assert number.item() == 0
    assert found.item() == pytest.approx(t, abs=1e-4)
    n = surface_normal(scene, o, d, found, number)
    torch.testing.assert_close(n[:, 0], torch.tensor(normal).float(), atol=1e-5, rtol=0)


def test_rays_miss_what_they_pass() -> None:
    scene = one_solid(Shape.ROOF, [-5, -2, 2, 5, 2, 4, 0, 1, 4])
    over = torch.tensor([[0.0], [1.9], [3.0]])  # above the low end of the slope, below the ridge
    t, number = trace(scene, over, torch.tensor([[1.0], [0.0], [0.0]]))
    assert number.item() == SKY and t.item() == pytest.approx(FAR)
    t, number = trace(scene, torch.tensor([[9.0], [9.0], [4.0]]), torch.tensor([[0.0], [0.0], [-1.0]]))
    assert number.item() == GROUND and t.item() == pytest.approx(4.0)


def test_narrow_rays_pass_between_leaves_and_wide_ones_do_not() -> None:
    scene = one_solid(Shape.BLOB, [0, 0, 5, 3, 3, 3, 0.45])
    y, z = torch.meshgrid(torch.linspace(-2, 2, 60), torch.linspace(3, 7, 60), indexing="ij")
    o = torch.stack([torch.full((3600,), -10.0), y.reshape(-1), z.reshape(-1)])
    d = torch.tensor([[1.0], [0.0], [0.0]]).expand(3, 3600)
    met = [(trace(scene, o, d, Width(torch.full((3600,), at), 0.0))[1] == 0).float().mean().item() for at in (0.0, 0.2)]
    assert 0.3 < met[0] < 0.95
    assert met[1] == 1.0


def test_clear_height_is_never_too_low(city: City) -> None:
    """Rays that start above their cell's clear height meet nothing on their way to the sun."""
    scene = city.scene().geometry
    o, _ = random_rays(4000, seed=5)
    column = ((o[0] - scene.frame.low) / CELL).long().clamp(0, scene.frame.n - 1)
    row = ((o[1] - scene.frame.low) / CELL).long().clamp(0, scene.frame.n - 1)
    o[2] = scene.clear[row * scene.frame.n + column] + 0.01
    d = torch.from_numpy(SUN).float()[:, None].expand(3, o.shape[1]).contiguous()
    assert (brute_force(scene, o, d, ground=False)[0] == FAR).all()


def test_a_solid_beyond_the_grid_is_refused() -> None:
    pile = Pile()
    pile.add(Shape.BOX, [50.0, 0.0, 0.0, 51.0, 1.0, 1.0], Material.PLAIN, np.zeros(3))
    with pytest.raises(ValueError, match="beyond the grid"):
        make_layer(pile.solids(Shape.BOX), 0, Frame.around(20.0))
