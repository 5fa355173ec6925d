"""Errors of float16 on the wire: pixels, loss and gradients compared with float32, for one step of a scene.

`pytest -s` prints the table of docs/methods/tile.md.
"""

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.exchanged_rows import ExchangedRows
from strategies import STRATEGIES
from tests.lib.ranks import on_gpus, run_ranks
from tests.strategies.test_law import Outcome, stitch, take_step
from tests.strategies.test_law_steps import KERNELS, LANDSCAPE, POINTS, step_of

UNIT = 2.0**-11
"""Half a unit in the last place of float16, relative."""


def differences(found: list[Outcome], wanted: list[Outcome]) -> dict[str, tuple[float, float]]:
    """Return the largest and the mean error of pixels (which are 0 to 1), and of each parameter's gradients, relative
    to its point's gradient."""
    images, right = (stitch([piece for o in outcomes for piece in o["images"]]) for outcomes in (found, wanted))
    pixels = torch.cat([(images[k] - right[k]).abs().flatten() for k in right])
    table = {"pixels": (float(pixels.max()), float(pixels.mean()))}
    for name in wanted[0]["gradients"]:
        value, expected = (
            torch.cat([o["gradients"][name] for o in outcomes]).flatten(1) for outcomes in (found, wanted)
        )
        size = expected.norm(dim=1)
        error = (value - expected).norm(dim=1)[size > 1e-3 * size.max()] / size[size > 1e-3 * size.max()]
        table[name] = (float(error.max()), float(error.mean()))
    return table


@pytest.mark.parametrize(
    ("mode", "ranks", "device"),
    [("step", 1, "cpu"), ("step", 3, "cpu"), ("captured", 2, "cpu"), on_gpus("step", 2), on_gpus("step", 4)],
)
def test_half_a_wire_is_nearly_a_whole_one(mode: str, ranks: int, device: str) -> None:
    given = "tile", KERNELS[0], LANDSCAPE, mode, False
    whole, half = (run_ranks(step_of, ranks, *given, h, device=device) for h in (False, True))
    check(half, whole, ranks)


def autograd_step(world: World, strategy: str, half: bool) -> Outcome:
    """Return `take_step`, through autograd."""
    spread = STRATEGIES[strategy](world)
    assert isinstance(spread.rows, ExchangedRows)
    spread.rows.half = half
    return take_step(spread, KERNELS[0], 11, POINTS, torch.float32, LANDSCAPE)


def test_half_a_wire_is_nearly_a_whole_one_through_autograd() -> None:
    whole, half = (run_ranks(autograd_step, 3, "tile", h) for h in (False, True))
    check(half, whole, 3)


def check(half: list[Outcome], whole: list[Outcome], ranks: int) -> None:
    table = differences(half, whole)
    print(
        f"{ranks} ranks",
        *(f"{name}: max {most:.1e}, mean {mean:.1e}" for name, (most, mean) in table.items()),
        sep="; ",
    )
    if ranks == 1:
        assert all(most == 0 for most, _ in table.values()), "local rows are not rounded"
        return
    most, mean = table.pop("pixels")
    # A splat's alpha counts from 1/255 on: where rounding takes it across, a pixel changes by so much at most.
    assert 0 < most < 1 / 255 + 2 * UNIT and mean < UNIT / 8
    for name, (most, mean) in table.items():
        assert 0 < mean < 6 * UNIT and most < 128 * UNIT, name
    loss = [torch.stack([o["loss"] for o in outcomes]).sum() for outcomes in (half, whole)]
    torch.testing.assert_close(loss[0], loss[1], rtol=UNIT / 4, atol=0)
