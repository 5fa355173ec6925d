"""Options of `splatfacto-pixel` that are out of range, or do not fit the workers, are named."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.core.composable import why_no_step
from ns_multigpu.core.crossing import RowsCross
from ns_multigpu.core.world import World
from ns_multigpu.methods import splatfacto_pixel, splatfacto_tile
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.train import strategy
from strategies.pixel import pixel


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("cells", -1, r"^--pipeline\.pixel\.cells -1: give at least one for each GPU"),
        ("cells", 1, r"^--pipeline\.pixel\.cells 1: each of the 2 GPUs wants a cell at least\. Give 2 or more"),
        ("imbalance", 1.0, r"^--pipeline\.pixel\.imbalance 1\.0: give a factor above 1"),
    ],
)
def test_what_cannot_be_had_is_refused(option: str, value: Any, said: str) -> None:
    config: Any = copy.deepcopy(splatfacto_pixel.config.pipeline)
    assert config.options is config.pixel
    setattr(config.pixel, option, value)
    with pytest.raises(InputError, match=said):
        strategy.strategy_of(config, replace(World.single(), size=2))


def test_what_is_asked_for_is_made() -> None:
    config: Any = copy.deepcopy(splatfacto_pixel.config.pipeline)
    config.pixel.cells, config.pixel.wire, config.pixel.hide = 3, "half", True
    made: Any = strategy.strategy_of(config, replace(World.single(), size=2))
    assert made.placement.cells == 3 and made.pixels.half and made.pixels.told == made.assignment.learn
    config.strategy = "tile"
    assert config.options is None


@pytest.mark.parametrize("exchange", ["splats", "mixed", "auto"])
def test_what_travels(exchange: str) -> None:
    config: Any = copy.deepcopy(splatfacto_pixel.config.pipeline)
    pair = replace(World.single(), size=2)
    before: Any = strategy.strategy_of(config, pair).rows
    assert config.exchange == "pixels" and isinstance(before, RowsCross) and not before.planned
    config.exchange = exchange
    made: Any = strategy.strategy_of(config, pair)
    assert isinstance(made.rows, RowsCross) and made.rows.planned and made.assignment._exchange._ghosts
    config.pixel.crossing = "none"
    made = strategy.strategy_of(config, pair)
    assert made.rows.travels and made.pixels.cells is made.rows.layers
    assert not strategy.strategy_of(config, World.single()).rows.travels, "one rank sends nothing"
    config.pixel.hide = True
    with pytest.raises(InputError, match=rf"^--pipeline\.pixel\.hide True: .* --pipeline\.exchange is {exchange}"):
        strategy.strategy_of(config, pair)
    tile: Any = copy.deepcopy(splatfacto_tile.config.pipeline)
    tile.exchange = exchange
    with pytest.raises(InputError, match=rf"^--pipeline\.exchange {exchange}: .* the strategy is tile\. Leave it out"):
        strategy.strategy_of(tile, pair)


def test_more_labels_than_a_splat_has_bits_for() -> None:
    made = pixel(replace(World.single(), size=2), PixelOptions(cells=8, crossing="none"), "auto")
    assert why_no_step(made, 64) is None
    assert "65 views times 4 cells are more" in (why_no_step(made, 65) or "")
