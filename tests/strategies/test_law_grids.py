"""The law for bilateral grids: fused steps equal ordinary steps of one rank, in each mode."""

import pytest
import torch
from nerfstudio.model_components.lib_bilagrid import BilateralGrid, slice, total_variation_loss

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.bilateral_grids import mapped, variation
from strategies import STRATEGIES
from tests.lib.ranks import run_ranks, skip_without_gpus
from tests.strategies.scene import make_grids
from tests.strategies.test_law import LIKE_SINGLE, Outcome, points_of, take_step
from tests.strategies.test_law_steps import MODES, POINTS, PORTRAIT, check_outcomes, count_of, take_one


def fused(world: World, strategy: str, mode: str, layered: bool) -> Outcome:
    kind, whole = points_of("gaussians", POINTS, torch.float32, world.device)
    spread, count = STRATEGIES[strategy](world), count_of(strategy)
    return take_one(spread, kind, count, PORTRAIT, mode, whole=whole, layered=layered, grids=True)


def check_fused(outcomes: list[Outcome], strategy: str, layered: bool) -> None:
    """Check that ranks together did what one rank does through autograd."""
    single, count = STRATEGIES["single"](World.single()), count_of(strategy)
    kind = points_of("gaussians", POINTS, torch.float32)
    expected = take_step(
        single, "gaussians", count, POINTS, torch.float32, PORTRAIT, kind=kind, layered=layered, grids=True
    )
    by_grids = expected["poses"]["grids"]
    assert float(by_grids.abs().flatten(1).amax(1).min()) > 0, "also views that are not in the batch have variation"
    assert min(float(image.min()) for _, image in expected["images"]) < -0.03, "colours leave [0, 1]"
    for outcome in outcomes:
        found = outcome["gradients"].pop("grids")
        torch.testing.assert_close(found, by_grids, rtol=1e-4, atol=2e-5 * float(by_grids.abs().max()))
        assert torch.equal(found, outcomes[0].setdefault("grids", found)), "each rank takes the same step"
    replicated = STRATEGIES[strategy](World.single()).placement.replicated
    check_outcomes(outcomes, expected, count, PORTRAIT, replicated=replicated)


@pytest.mark.parametrize(
    ("strategy", "ranks", "mode"),
    [
        ("single", 1, "captured"), ("tile", 3, "captured"), ("batch", 2, "several"),
        *((name, 2, "step" if name == "batch" else "captured") for name in [*LIKE_SINGLE, "pixel"]),
    ],
)  # fmt: skip
def test_a_fused_step_equals_single(strategy: str, ranks: int, mode: str) -> None:
    layered = strategy == "tile"  # photographs with alpha and masks
    check_fused(run_ranks(fused, ranks, strategy, mode, layered), strategy, layered)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", [*LIKE_SINGLE, "pixel"])
def test_a_fused_step_equals_single_on_gpus(strategy: str, mode: str, ranks: int) -> None:
    skip_without_gpus(ranks)
    check_fused(run_ranks(fused, ranks, strategy, mode, True, device="cuda"), strategy, True)


def test_maps_and_variation_are_nerfstudios() -> None:
    grids = make_grids(1, torch.float64)
    theirs = BilateralGrid(len(grids), 3, 4, 2).double()
    theirs.grids.data.copy_(grids)
    rgb = torch.rand(20, 30, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ys, xs = torch.meshgrid(torch.linspace(0, 1, 20).double(), torch.linspace(0, 1, 30).double(), indexing="ij")
    expected = slice(theirs, torch.stack([xs, ys], -1)[None], rgb[None], torch.tensor(2))["rgb"][0]
    found = mapped(grids[2], rgb[5:15, 3:], (3, 5, 30, 15), (30, 20))
    torch.testing.assert_close(found, expected[5:15, 3:], rtol=0, atol=1e-6)
    torch.testing.assert_close(variation(grids), total_variation_loss(grids))
    assert float(variation(grids[:, :, :1, :1, :1])) == 0, "one map has no variation"
