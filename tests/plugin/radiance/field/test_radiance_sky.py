"""The sky behind radiance cells: colours by direction, the same on every rank, and trained once."""

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.radiance.field.backgrounds import Sky, mean_colour
from tests.lib.radiance_scene import model


def _directions(count: int) -> torch.Tensor:
    drawn = torch.randn(count, 3, generator=torch.Generator().manual_seed(3))
    return torch.nn.functional.normalize(drawn, dim=1)


def test_sky_depends_on_the_seed_and_uses_its_own_generator() -> None:
    torch.manual_seed(1)
    one, state = Sky(7), torch.get_rng_state()
    torch.rand(5)
    again, other = Sky(7), Sky(8)
    pairs = [(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True)]
    assert pairs and all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(one(_directions(9)), other(_directions(9)))
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state), "making one leaves the generator as it was"


def test_colours_are_colours_and_differ_by_direction() -> None:
    seen = Sky(7)(_directions(200))
    assert seen.shape == (200, 3) and bool(((seen > 0) & (seen < 1)).all())
    assert float(seen.std(0).min()) > 1e-3


def test_it_learns_a_horizon() -> None:
    torch.manual_seed(0)
    sky, directions = Sky(7), _directions(400)
    wanted = torch.where(directions[:, 2:] > 0, torch.tensor([0.4, 0.6, 0.9]), torch.tensor([0.3, 0.25, 0.2]))
    optimizer = torch.optim.Adam(sky.parameters(), 1e-2)
    losses = list[float]()
    for _ in range(150):
        loss = (sky(directions) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]


def test_its_gradient_is_rank_0s() -> None:
    """All ranks have the loss of all rays, and gradients are summed."""
    sky = Sky(7)
    for rank, learns in ((0, True), (1, False)):
        colours = sky.behind(_directions(4), World(rank, 2, rank, 2, torch.device("cpu")))
        assert torch.equal(colours.detach(), sky(_directions(4)).detach())
        assert colours.requires_grad == learns


@pytest.mark.parametrize("background", ["sky", "mean"])
def test_behind_transparent_photographs_what_is_no_colour_is_black(background: str) -> None:
    """As is nerfacto's last sample: nerfstudio knows no colour of that name."""
    photograph = torch.rand(3, 2, 4)
    seen = model(World.single(), 2, background_color=background).renderer_rgb.blend_background(photograph)
    torch.testing.assert_close(seen, photograph[..., :3] * photograph[..., 3:])


def test_a_ray_s_mean_colour_has_gradients_that_do_not_explode() -> None:
    colour = torch.tensor([[1e-4, 2e-4, 0.0], [0.2, 0.1, 0.05]], requires_grad=True)
    through = torch.tensor([[0.9999], [0.5]], requires_grad=True)
    seen = mean_colour(colour, through)
    torch.testing.assert_close(seen, torch.tensor([[0.005, 0.01, 0.0], [0.4, 0.2, 0.1]]))
    seen.sum().backward()
    assert colour.grad is not None and through.grad is not None
    assert float(colour.grad.max()) == pytest.approx(50) and through.grad[0] == 0 and through.grad[1] > 0
