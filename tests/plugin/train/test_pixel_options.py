"""Options of `splatfacto-pixel` that are out of range, or do not fit the workers, are named."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from ns_multigpu.core.dist.world import World
from ns_multigpu.methods import splatfacto_pixel
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.train import strategy


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("cells", -1, r"^--pipeline\.pixel\.cells -1: give at least one for each GPU"),
        ("cells", 1, r"^--pipeline\.pixel\.cells 1: each of the 2 GPUs wants a cell at least\. Give 2 or more"),
        ("imbalance", 1.0, r"^--pipeline\.pixel\.imbalance 1\.0: give a factor above 1"),
    ],
)
def test_unsupported_combinations_are_refused(option: str, value: Any, said: str) -> None:
    config: Any = copy.deepcopy(splatfacto_pixel.config.pipeline)
    assert config.options is config.pixel
    setattr(config.pixel, option, value)
    with pytest.raises(InputError, match=said):
        strategy.strategy_of(config, replace(World.single(), size=2))


def test_requested_parts_are_made() -> None:
    config: Any = copy.deepcopy(splatfacto_pixel.config.pipeline)
    config.pixel.cells, config.pixel.wire, config.pixel.hide = 3, "half", True
    made: Any = strategy.strategy_of(config, replace(World.single(), size=2))
    assert made.placement.cells == 3 and made.pixels.half and made.pixels.feedback == made.assignment.learn
    config.strategy = "tile"
    assert config.options is None


def test_boundary_splats_are_exchanged_unless_switched_off() -> None:
    config: Any = copy.deepcopy(splatfacto_pixel.config.pipeline)
    pair = replace(World.single(), size=2)
    assert strategy.strategy_of(config, pair).rows.is_exchanged
    config.pixel.crossing = "none"
    assert not strategy.strategy_of(config, pair).rows.is_exchanged
