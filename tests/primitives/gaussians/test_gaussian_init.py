"""The first Gaussians: from seed points or from nowhere."""

import pytest
import torch

from ns_multigpu.primitives.gaussians.init import SH_C0, initial_gaussians


def make(seeds: tuple[torch.Tensor, torch.Tensor] | None, **changes: int) -> dict[str, torch.Tensor]:
    options = {"sh_degree": 3, "count": 500, "extent": 4.0, **changes}
    return initial_gaussians(seeds, generator=torch.Generator().manual_seed(0), **options)  # type: ignore[arg-type]


def test_from_seed_points() -> None:
    g = torch.Generator().manual_seed(1)
    xyz, rgb = torch.rand(50, 3, generator=g), torch.randint(0, 256, (50, 3), generator=g, dtype=torch.uint8)
    params = make((xyz, rgb))
    assert torch.equal(params["means"], xyz) and params["means"].data_ptr() != xyz.data_ptr()
    distances = torch.cdist(xyz, xyz).sort(dim=1).values[:, 1:4].mean(1)
    torch.testing.assert_close(params["scales"].exp(), distances[:, None].repeat(1, 3), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(params["features_dc"] * SH_C0 + 0.5, rgb / 255)
    assert params["features_rest"].shape == (50, 15, 3) and not params["features_rest"].any()
    torch.testing.assert_close(params["opacities"].sigmoid(), torch.full((50, 1), 0.1))
    torch.testing.assert_close(params["quats"].norm(dim=-1), torch.ones(50))


def test_plain_colours_are_logits() -> None:
    rgb = torch.tensor([[0, 128, 255]], dtype=torch.uint8)
    params = make((torch.zeros(1, 3), rgb), sh_degree=0)
    assert params["features_rest"].shape == (1, 0, 3)
    assert bool(torch.isfinite(params["features_dc"]).all())
    torch.testing.assert_close(params["features_dc"].sigmoid(), rgb / 255, rtol=0, atol=1e-5)


def test_random_ones_fill_the_cube_alike_everywhere() -> None:
    params, again = make(None), make(None)
    assert all(torch.equal(params[name], again[name]) for name in params)
    assert len(params["means"]) == 500 and 1.9 < float(params["means"].abs().max()) <= 2.0
    assert float(params["features_dc"].min()) >= 0 and float(params["features_dc"].max()) <= 1


def test_points_without_colours_coincident_points_and_a_single_point() -> None:
    no_colour = torch.zeros(0, 3)
    assert make((torch.rand(9, 3), no_colour))["features_dc"].shape == (9, 3)
    assert bool(torch.isfinite(make((torch.ones(9, 3), no_colour))["scales"]).all())
    assert bool(torch.isfinite(make((torch.ones(1, 3), no_colour))["scales"]).all())


def test_no_points() -> None:
    with pytest.raises(ValueError, match="use random initialisation"):
        make((torch.zeros(0, 3), torch.zeros(0, 3)))
