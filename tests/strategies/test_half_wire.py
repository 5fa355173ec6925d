"""Errors of float16 on the wire: pixels, loss and gradients compared with float32, for one step of a scene.

`pytest -s` prints the table of docs/methods/tile.md.
"""

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.exchanged_rows import ExchangedRows
from ns_multigpu.core.exchange.fp16_rows import HalfGradients, HalfRows
from strategies import STRATEGIES
from tests.lib.ranks import run_ranks, skip_without_gpus
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


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("mode", ["step", "captured"])
def test_half_a_wire_is_nearly_a_whole_one(mode: str, ranks: int) -> None:
    whole, half = (run_ranks(step_of, ranks, "tile", KERNELS[0], LANDSCAPE, mode, False, h) for h in (False, True))
    check(half, whole, ranks)


def autograd_step(world: World, strategy: str, half: bool) -> Outcome:
    """Return `take_step`, through autograd."""
    spread = STRATEGIES[strategy](world)
    assert isinstance(spread.rows, ExchangedRows)
    spread.rows.half = half
    return take_step(spread, KERNELS[0], 11, POINTS, torch.float32, LANDSCAPE)


@pytest.mark.parametrize("ranks", [1, 3])
def test_half_a_wire_is_nearly_a_whole_one_through_autograd(ranks: int) -> None:
    whole, half = (run_ranks(autograd_step, ranks, "tile", h) for h in (False, True))
    check(half, whole, ranks)


def test_numbers_of_any_size_keep_their_bits() -> None:
    """As `cuda_ext.ops.exchange.row_wire`: what is not rounded is bit-identical; zero, NaN and infinity stay."""
    g = torch.Generator().manual_seed(1)
    rows = torch.randn(4000, 10, generator=g) * 10.0 ** torch.randint(-37, 37, (4000, 1), generator=g)
    needle = torch.tensor([[1.0, 0.99999994, 1.0], [1e4, 99.0, 1.0], [0.0, 0.0, 0.0]])
    rows[:3, 2:5], rows[3, 5:9] = needle, 0.0
    rows[4, 6], rows[5, 7] = torch.inf, torch.nan
    names, widths = ("means2d", "conics", "opacities", "features", "depths"), (2, 3, 1, 3, 1)
    code = HalfRows(names, widths)
    written = code.write(rows)
    assert written.dtype == torch.uint8 and written.shape[1] == 8 + 7 + 3 + 7 + 4
    back = code.read(written, rows)
    assert torch.equal(back[:, :2], rows[:, :2]) and torch.equal(back[:, 9], rows[:, 9])
    torch.testing.assert_close(back[6:, 5], rows[6:, 5], rtol=UNIT, atol=0)
    size = rows[6:, 6:9].abs().amax(1, keepdim=True)
    assert ((back[6:, 6:9] - rows[6:, 6:9]).abs() <= UNIT * rows[6:, 6:9].abs() + size * 2.0**-38).all()
    assert (back[3, 5:9] == 0).all() and back[4, 6] == torch.inf and back[5, 7].isnan()
    conics = back[:3, 2:5]
    assert (conics[:, 0] * conics[:, 2] - conics[:, 1] ** 2 >= 0).all(), "however long, an ellipse"
    torch.testing.assert_close(conics, needle, rtol=4 * UNIT, atol=0)
    grads = HalfGradients(widths)
    returned = grads.read(grads.write(rows), rows.double())
    assert returned.dtype == torch.float64
    torch.testing.assert_close(returned[6:, 9], rows[6:, 9].double(), rtol=UNIT, atol=0)
    for few in (rows[:0], rows[9:10]):
        assert torch.equal(code.read(code.write(few), few), back[9 : 9 + len(few)])
        assert grads.write(few).shape == (len(few), 2 * 10 + 5)


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


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_half_a_wire_is_nearly_a_whole_one_on_gpus(ranks: int) -> None:
    skip_without_gpus(ranks)
    runs = [run_ranks(step_of, ranks, "tile", KERNELS[0], LANDSCAPE, "step", False, h, device="cuda") for h in (0, 1)]
    check(runs[1], runs[0], ranks)
