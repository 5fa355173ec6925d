"""Options of `splatfacto-locality` that are out of range are named before anything is read."""

import copy
from pathlib import Path
from typing import Any

import pytest

from ns_multigpu.methods import splatfacto_locality, splatfacto_tile
from ns_multigpu.plugin.faults.errors import InputError


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("patches", 9, r"^--pipeline\.locality\.patches 9: give 1 to 8"),
        ("group_size", 7, r"^--pipeline\.locality\.group-size 7: give 32 to 16384"),
        ("place_again_at", 1.0, r"^--pipeline\.locality\.place-again-at 1\.0: give a factor above 1"),
    ],
)
def test_an_option_out_of_range_is_named(tmp_path: Path, option: str, value: Any, words: str) -> None:
    config: Any = copy.deepcopy(splatfacto_locality.config.pipeline)
    setattr(config.locality, option, value)
    config.datamanager.data = tmp_path / "nowhere"
    with pytest.raises(InputError, match=words):
        config.setup(device="cpu")


def test_only_locality_has_them() -> None:
    config: Any = copy.deepcopy(splatfacto_locality.config.pipeline)
    assert config.options is config.locality
    config.strategy = "tile"
    assert config.options is None, "as one may ask for with --pipeline.strategy"
    assert splatfacto_tile.config.pipeline.options is None  # type: ignore[attr-defined]
