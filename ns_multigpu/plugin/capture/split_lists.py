"""Lists of training and held-out views of a capture: "val" and "test" replace each other if one is missing.

Training evaluates "val", and every later command evaluates "test". nerfstudio's parsers raise if a list is missing.
"""

from collections.abc import Callable
from typing import Any

from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.data.dataparsers.nerfstudio_dataparser import Nerfstudio
from nerfstudio.utils.io import load_from_json

_HELD_OUT = {"val": ("val", "validation", "test"), "test": ("test", "val", "validation")}
"""Lists of a split's views, in order of preference."""


def listed_split(split: str, is_listed: Callable[[str], bool]) -> str:
    """Return the name of the list to read for a split: its own, or that of the other held-out split."""
    return next((name for name in _HELD_OUT.get(split, ()) if is_listed(name)), split)


def missing_list(is_listed: Callable[[str], bool], file: str) -> str | None:
    """Return a description of the list that is missing; None if none is missing.

    Args:
        file: format of a list's name, such as "{}_list.txt".
    """
    train, held_out = is_listed("train"), any(map(is_listed, _HELD_OUT["val"]))
    if train == held_out:
        return None
    have, missing, views = ("train", "val", "held-out") if train else ("val or test", "train", "training")
    return f"{file.format(have)} and no list of {views} views. Add {file.format(missing)}"


class ListedNerfstudio(Nerfstudio):
    """nerfstudio's parser of transforms.json that reads the list of `listed_split`."""

    def _generate_dataparser_outputs(self, split: str = "train") -> DataparserOutputs:
        data = self.config.data
        meta: Any = load_from_json(data if data.suffix == ".json" else data / "transforms.json")
        return super()._generate_dataparser_outputs(listed_split(split, lambda name: f"{name}_filenames" in meta))
