"""Machines must share the run folder, the capture and the type of GPU; refusals name the machine and the remedy.

The machines are pretended: the ranks of this one, distributed round-robin to two.
"""

import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from ns_multigpu.core.dist.machines import PRETEND_MACHINES
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.checks import DIFFERENT, different_points, raise_together
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.machines import (
    at_another_machine,
    check_shared_folder,
    different_devices,
    machines_named,
    restarts_in_vain,
)
from tests.lib.captures import edit, manager, transforms, write_capture
from tests.lib.ranks import run_ranks

HOST = socket.gethostname()
SECOND = f"machine 1 ({HOST})"


@pytest.fixture(autouse=True)
def two_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRETEND_MACHINES, "2")


def _message_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except InputError as error:
        return str(error)
    return ""


# ---- the run folder ----


def _share(world: World, folders: list[Path]) -> str:
    return _message_of(lambda: check_shared_folder(folders[world.machine], world, patience=1.0))


def test_shared_folder_passes_unchanged(tmp_path: Path) -> None:
    (tmp_path / "config.yml").touch()
    (tmp_path / "elsewhere").symlink_to(tmp_path)  # mounted in another place
    assert run_ranks(_share, 4, [tmp_path, tmp_path / "elsewhere"]) == [""] * 4
    assert {path.name for path in tmp_path.iterdir()} == {"config.yml", "elsewhere"}


def test_a_folder_that_a_machine_does_not_see_is_named_on_all_ranks(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for theirs, said in (
        (other, f"{SECOND} does not see {other} as rank 0 does: it is not there\n"),
        (tmp_path / "empty", f"{SECOND} does not see {tmp_path / 'empty'} as rank 0 does\n"),
    ):
        messages = run_ranks(_share, 4, [mine, theirs])
        assert len(set(messages)) == 1 and said in messages[0] and "--output-dir DIR" in messages[0]
    [message] = set(run_ranks(_share, 4, [tmp_path / "file", other]))
    assert f"machine 0 ({HOST}) cannot write to {tmp_path / 'file'}: Not a directory" in message
    assert list(mine.iterdir()) == [] and not other.exists()


def _one_way(world: World, mine: Path, copy: Path) -> str:
    """Machine 1 sees a copy of what rank 0 writes, and rank 0 nothing of what it does."""
    import ns_multigpu.plugin.launch.machines as machines

    if world.is_main:
        written = machines._written

        def and_copied(path: Path, here: str) -> str:
            said = written(path, here)
            shutil.copytree(mine, copy, dirs_exist_ok=True)
            return said

        machines._written = and_copied
    return _share(world, [mine, copy])


def test_folder_must_be_shared_in_both_directions(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    [message] = set(run_ranks(_one_way, 4, tmp_path / "mine", tmp_path / "copy"))
    assert f"rank 0 does not see in {tmp_path / 'mine'} what {SECOND} writes there" in message


def test_one_machine_needs_no_check(tmp_path: Path) -> None:
    check_shared_folder(tmp_path / "none", World.single())
    assert list(tmp_path.iterdir()) == [] and machines_named(World.single()) == ""


# ---- GPUs ----


def _gpus(world: World, models: list[str]) -> tuple[str, str, str]:
    return different_devices(models[world.rank], world), machines_named(world), at_another_machine(world)


def test_gpus_that_are_unlike_are_named_by_machine() -> None:
    h200, a100 = "NVIDIA H200 (151 GB)", "NVIDIA A100 (85 GB)"
    alike = run_ranks(_gpus, 4, [h200] * 4)
    assert {row[0] for row in alike} == {""}
    assert alike[0][1] == f"2 machines (pretended): machine 0 ({HOST}) has ranks 0 to 1; {SECOND} has ranks 2 to 3."
    shown = f"This is {SECOND}, with ranks 2 to 3 of 4. Progress is shown by rank 0 on machine 0 ({HOST})."
    assert [row[2] for row in alike] == ["", "", shown, ""]
    [(_, pair, _), (_, _, second)] = run_ranks(_gpus, 2, [h200] * 2)
    assert f"machine 0 ({HOST}) has rank 0; {SECOND} has rank 1." in pair and f"{SECOND}, with rank 1 of 2." in second
    [(unlike, _, _), *_] = run_ranks(_gpus, 4, [h200, h200, h200, a100])
    assert f"machine 0 ({HOST}) has 2 x {h200}; {SECOND} has 1 x {h200}, 1 x {a100}" in unlike


def test_impossible_restarts_are_reported() -> None:
    asked = {"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every machine" in restarts_in_vain(asked)
    for name, value in (
        ("GROUP_WORLD_SIZE", "1"), ("TORCHELASTIC_MAX_RESTARTS", "0"), ("TORCHELASTIC_USE_AGENT_STORE", "False")
    ):  # fmt: skip
        assert restarts_in_vain({**asked, name: value}) == ""
    assert restarts_in_vain({}) == ""


# ---- the capture ----


def _read(world: World, folders: list[Path]) -> str:
    return _message_of(lambda: manager(folders[world.machine], world).check_capture())


def test_a_capture_that_is_on_one_machine_only(tmp_path: Path) -> None:
    first = write_capture(tmp_path / "here" / "fox")
    absent = tmp_path / "there" / "fox"
    for folders, where in (([first, absent], SECOND), ([absent, first], f"machine 0 ({HOST})")):
        [message] = set(run_ranks(_read, 4, folders))
        assert re.search(f"{absent}.* \\(seen on {re.escape(where)}\\)", message), message


def test_the_same_capture_in_another_place_passes(tmp_path: Path) -> None:
    first = write_capture(tmp_path / "here" / "fox")
    shutil.copytree(first, tmp_path / "there" / "renard")
    assert run_ranks(_read, 4, [first, tmp_path / "there" / "renard"]) == [""] * 4


def _fewer(folder: Path) -> None:
    with transforms(folder) as meta:
        meta["frames"].pop()


def _renamed(folder: Path) -> None:
    (folder / "images/photo_03.png").rename(folder / "images/photo_3b.png")
    edit(folder, 3, file_path="images/photo_3b.png")


def _moved(folder: Path) -> None:
    """Two views are swapped, which changes no sum over all views."""
    with transforms(folder) as meta:
        third, fifth = meta["frames"][3], meta["frames"][5]
        third["transform_matrix"], fifth["transform_matrix"] = fifth["transform_matrix"], third["transform_matrix"]


def _drawn_anew(folder: Path) -> None:
    """Of the same size in pixels, and another in bytes."""
    Image.new("RGB", (24, 16), "red").save(folder / "images/photo_06.png")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_fewer, "has 8 views and rank 0 has 9"),
        (_renamed, "has image files of other names than rank 0, 7 of them: view 2 is photo_04.png, and photo_03.png "),
        (_moved, "has other poses than rank 0: of 2 views, photo_03.png first"),
        (lambda folder: edit(folder, None, fl_x=20.5), "has other sizes or intrinsics than rank 0: of 9 views, photo_"),
        (lambda folder: edit(folder, None, cy=8.1), "has other sizes or intrinsics than rank 0: of 9 views, photo_"),
        (_drawn_anew, "has other files than rank 0: of 1 view, photo_06.png first"),
    ],
)
def test_another_version_of_the_capture_on_one_machine(
    tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    first, other = write_capture(tmp_path / "here"), write_capture(tmp_path / "there")
    change(other)
    [message] = set(run_ranks(_read, 4, [first, other]))
    assert message.startswith(DIFFERENT) and f"{SECOND} {said}" in message
    assert message.count(SECOND) <= 2 and "machine 0" not in message, "each split once"


def _points(world: World, changed: str) -> str:
    points, colours = torch.rand(5, 3, generator=torch.Generator().manual_seed(1)), torch.full((5, 3), 100)
    if world.machine == 1:
        points = {"moved": points + 0.1, "fewer": points[1:], "rounded": points * (1 + 1e-6)}.get(changed, points)
        colours = {"fewer": colours[1:], "coloured": colours + 1}.get(changed, colours)
    given = None if changed == "none" and world.machine else (points, colours)
    return _message_of(lambda: raise_together(different_points(given, world), world, DIFFERENT))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("rounded", ""),
        ("moved", f"{SECOND} has other seed points than rank 0"),
        ("coloured", f"{SECOND} has other seed points than rank 0"),
        ("fewer", f"{SECOND} has 4 seed points and rank 0 has 5"),
        ("none", f"{SECOND} has 0 seed points and rank 0 has 5"),
    ],
)
def test_other_seed_points_on_one_machine(changed: str, said: str) -> None:
    """With sharded points each rank takes its own from those that it has read."""
    [message] = set(run_ranks(_points, 4, changed))
    assert said in message and bool(message) == bool(said)
