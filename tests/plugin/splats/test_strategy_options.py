"""Options of `locality` and `pixel` that are out of range, or do not fit the workers, are named."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ns_multigpu import methods
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.splats.pipeline import strategy_of

PAIR = replace(World.single(), size=2)


def options_of(name: str) -> Any:
    return copy.deepcopy(getattr(methods, f"splatfacto_{name}").config.pipeline)


@pytest.mark.parametrize(
    ("name", "option", "value", "said"),
    [
        ("locality", "patches", 9, r"9: give 1 to 8"),
        ("locality", "group_size", 7, r"7: give 32 to 16384"),
        ("locality", "place_again_at", 1.0, r"1\.0: give a factor above 1"),
        ("pixel", "cells", -1, r"-1: give at least one for each GPU"),
        ("pixel", "cells", 1, r"1: each of the 2 GPUs wants a cell at least\. Give 2 or more"),
        ("pixel", "imbalance", 1.0, r"1\.0: give a factor above 1"),
    ],
)
def test_an_option_out_of_range_is_named(name: str, option: str, value: Any, said: str) -> None:
    config = options_of(name)
    setattr(config.options, option, value)
    with pytest.raises(InputError, match=rf"^--pipeline\.{name}\.{option.replace('_', '-')} {said}"):
        strategy_of(config, PAIR)


def test_exchange_options_are_the_row_legs() -> None:
    config = options_of("tile")
    for wire, lists in (("full", "gather"), ("half", "gather"), ("full", "sort")):
        config.wire, config.tile_lists = wire, lists
        rows = strategy_of(config, PAIR).rows
        assert (rows.half, rows.slots) == (wire == "half", lists == "sort")


def test_it_is_named_before_anything_is_read(tmp_path: Path) -> None:
    config = options_of("locality")
    config.locality.patches, config.datamanager.data = 9, tmp_path / "nowhere"
    with pytest.raises(InputError, match=r"^--pipeline\.locality\.patches 9"):
        config.setup(device="cpu")


@pytest.mark.parametrize("name", ["locality", "pixel"])
def test_only_their_strategy_has_them(name: str) -> None:
    config = options_of(name)
    assert config.options is getattr(config, name)
    config.strategy = "tile"
    assert config.options is None, "as one may ask for with --pipeline.strategy"
    assert options_of("tile").options is None


def test_requested_parts_are_made() -> None:
    config = options_of("pixel")
    config.pixel.cells, config.pixel.wire, config.pixel.hide = 3, "half", True
    made: Any = strategy_of(config, PAIR)
    assert made.placement.cells == 3 and made.pixels.half and made.pixels.feedback == made.assignment.learn


def test_boundary_splats_are_exchanged_unless_switched_off() -> None:
    config = options_of("pixel")
    assert strategy_of(config, PAIR).rows.is_exchanged
    config.pixel.crossing = "none"
    assert not strategy_of(config, PAIR).rows.is_exchanged
