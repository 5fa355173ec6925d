"""Lists of training and held-out views: each list is used, and each missing or wrong one is named before training."""

import re
from pathlib import Path
from typing import Any, Literal

import pytest
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig

from ns_multigpu.plugin.capture.datamanager import DistributedDataManagerConfig
from ns_multigpu.plugin.capture.first_look import first_look
from tests.lib import captures, colmap_files

Layout = Literal["colmap", "transforms"]


def config_of(folder: Path, layout: Layout, lists: dict[str, list[int]], unknown: str = "") -> Any:
    """Write a capture of ten views with lists of views by number. `unknown` is a list with one more, made-up name."""
    listed = {part: list(map(str, views)) + ["99"] * (part == unknown) for part, views in lists.items()}
    if layout == "transforms":
        meta = {f"{part}_filenames": [f"images/photo_{int(k):02d}.png" for k in some] for part, some in listed.items()}
        captures.write_capture(folder, 10, **meta)
        parser: Any = NerfstudioDataParserConfig(data=folder, load_3D_points=False, downscale_factor=1)
    else:
        shots = colmap_files.shots(10)
        colmap_files.write_capture(folder, shots)
        names = {str(k): shot.name for k, shot in enumerate(sorted(shots, key=lambda shot: shot.name))}
        for part, some in listed.items():
            (folder / f"{part}_list.txt").write_text("".join(f"{names.get(k, 'unknown.png')}\n" for k in some))
        parser = ColmapDataParserConfig(data=folder, colmap_path=Path("sparse/0"), downscale_factor=1)
    return DistributedDataManagerConfig(dataparser=parser)


def held_out(config: Any, test_mode: Literal["test", "val"]) -> list[int]:
    """Return the places of the views that training ("val") or a later command ("test") evaluates."""
    data = captures.read_by(config.dataparser, mode=test_mode)
    files = sorted({*data.train_dataset.image_filenames, *data.eval_dataset.image_filenames})
    assert len(files) == 10
    return [files.index(file) for file in data.eval_dataset.image_filenames]


LISTS = [
    ("transforms", "val"), ("transforms", "test"), ("colmap", "val"), ("colmap", "test"), ("colmap", "validation"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "part"), LISTS)
def test_one_list_of_held_out_views_is_enough(tmp_path: Path, layout: Layout, part: str) -> None:
    lists = {"train": list(range(7)), part: [7, 8, 9]}
    config = config_of(tmp_path / "a", layout, lists)
    assert first_look(config).problems == []
    assert held_out(config, "val") == held_out(config, "test") == [7, 8, 9]


@pytest.mark.parametrize("layout", ["colmap", "transforms"])
def test_each_split_has_its_own_list_if_there_are_two(tmp_path: Path, layout: Layout) -> None:
    lists = {"train": list(range(6)), "val": [6, 7, 8, 9], "test": [9, 6, 7, 8]}
    config = config_of(tmp_path / "a", layout, lists)
    assert first_look(config).problems == []
    lists["test"] = [8]
    config = config_of(tmp_path / "b", layout, {**lists, "train": [0, 1, 2, 3, 4, 5, 6, 7, 9]})
    assert first_look(config).problems == [] and held_out(config, "test") == [8]


WRONG = [
    ({"train": [1, 2]}, "", r"{train} and no list of held-out views. Add {val}"),
    ({"test": [1, 2]}, "", r"{val or test} and no list of training views. Add {train}"),
    ({"train": [1], "val": [2], "test": [3]}, "test", "(unknown.png|photo_99.png)"),
    ({"train": [1], "val": [2]}, "train", "(unknown.png|photo_99.png)"),
]


@pytest.mark.parametrize(("lists", "unknown", "said"), WRONG)
@pytest.mark.parametrize("layout", ["colmap", "transforms"])
def test_lists_that_a_later_command_would_miss_are_refused(
    tmp_path: Path, layout: Layout, lists: dict[str, list[int]], unknown: str, said: str
) -> None:
    name = r"\1_filenames" if layout == "transforms" else r"\1_list.txt"
    (problem,) = first_look(config_of(tmp_path / "a", layout, lists, unknown)).problems
    assert re.search(re.sub(r"\{(.*?)\}", name, said), problem)
