"""Checkpoints on the disk: whole or absent, whatever is done to them, and written by all ranks together."""

import hashlib
import os
import pickle
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint.atomic_save import open_checkpoint, remove_old
from ns_multigpu.plugin.checkpoint.saved_tensors import SavedTensors
from ns_multigpu.plugin.checkpoint.verify import (
    FORMAT,
    MANIFEST,
    OURS,
    DamagedCheckpoint,
    Manifest,
    Stamp,
    check_checkpoint,
    checkpoints_in,
    dump_manifest,
    latest_checkpoint,
    read_manifest,
    states_folder,
    step_of,
)
from ns_multigpu.plugin.faults.errors import InputError
from tests.lib.ranks import run_ranks
from tests.lib.saving import ALONE, copied, files_of, newest_as_nerfstudio_finds_it, steps_in, tensors_of, write


def test_round_trip(models: Path) -> None:
    assert newest_as_nerfstudio_finds_it(models) == 2
    opened = open_checkpoint(models / "step-000000002.ckpt", ALONE)
    assert opened.values == {"images": 2} and opened.tensors is not None
    expected = tensors_of(2)
    assert opened.tensors.names == sorted(expected)
    for name, value in opened.tensors.read(opened.tensors.names).items():
        assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name


def _write_on(world: World, models: Path) -> tuple[int, list[str]]:
    assert write(models, 5, world) == ""
    opened = open_checkpoint(models / "step-000000005.ckpt", world)
    assert opened.tensors is not None
    for name, value in opened.tensors.read([n for n in opened.tensors.names if n.startswith("shared/")]).items():
        assert torch.equal(value, tensors_of(5)[name])
    own = opened.tensors.read([f"rank{r}/own" for r in range(world.size)])
    assert [int(v[0]) for v in own.values()] == list(range(world.size))
    sizes = [p.stat().st_size for p in sorted(files_of(models, 5)) if p.suffix == ".distcp"]
    return len(sizes), [p.name for p in models.iterdir()]


def test_ranks_share_the_writing(tmp_path: Path) -> None:
    seen = run_ranks(_write_on, 3, tmp_path / "nerfstudio_models")
    assert seen == [(3, ["step-000000005.ckpt"])] * 3
    parts = [p for p in files_of(tmp_path / "nerfstudio_models", 5) if p.suffix == ".distcp"]
    sizes = [p.stat().st_size for p in parts]
    assert max(sizes) < 0.6 * sum(sizes), "what is the same on all ranks is written once, by different ranks"


# ---- damage ----


def test_fifty_damaged_ones_are_refused_and_named(models: Path, tmp_path: Path) -> None:
    draw = random.Random(8)
    names = [p.relative_to(models.parent) for p in files_of(models, 2)]
    assert len(names) == 4
    for trial in range(52):
        place = copied(models, tmp_path / str(trial))
        victim = place.parent / names[trial % 4]
        data = bytearray(victim.read_bytes())
        if trial < 4:
            victim.unlink()
        elif trial % 3 == 0:
            victim.write_bytes(data[: draw.randrange(len(data))])
        elif trial % 3 == 1:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            victim.write_bytes(data)
        else:
            at = draw.randrange(len(data))
            victim.write_bytes(data[:at] + draw.randbytes(draw.randrange(1, 40)) + data[at:])
        with pytest.raises(InputError, match=victim.name.replace(".", "[.]")) as caught:
            open_checkpoint(place / "step-000000002.ckpt", ALONE)
        assert "--load-step 1" in str(caught.value), "says which one is whole"
        messages: list[str] = []
        newest = latest_checkpoint(place, messages.append)
        assert newest == place / "step-000000001.ckpt"
        assert messages == [] if trial == 0 else victim.name in messages[0]
        shutil.rmtree(place.parent)
    assert latest_checkpoint(models) == models / "step-000000002.ckpt"


def _damaged_for_all(world: World, path: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_checkpoint(path, world)
    return str(caught.value)


def test_every_rank_refuses_what_one_has_seen(models: Path) -> None:
    victim = files_of(models, 2)[-2]
    victim.write_bytes(victim.read_bytes()[:-1])
    first, second = run_ranks(_damaged_for_all, 2, models / "step-000000002.ckpt")
    assert first == second and victim.name in first and "truncated" in first


class _Bad:
    def __reduce__(self) -> Any:
        return os.mkdir, ("opened",)


def test_no_code_of_a_checkpoint_is_executed(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = models / "step-000000002.ckpt"
    folder = files_of(models, 2)[1].parent
    (folder / ".metadata").write_bytes(pickle.dumps(_Bad()))
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        SavedTensors(folder)
    torch.save({"step": 2, "pipeline": _Bad()}, path)
    with pytest.raises(DamagedCheckpoint, match=path.name):
        check_checkpoint(path)
    assert not (tmp_path / "opened").exists()


def test_of_a_newer_version(models: Path) -> None:
    path, *_ = files_of(models, 2)
    content = torch.load(path)
    content[OURS]["format"] = FORMAT + 1
    torch.save(content, path)
    with pytest.raises(InputError, match=rf"step-000000002.ckpt was written by a newer version .*format {FORMAT + 1}"):
        open_checkpoint(path, ALONE)
    body = dump_manifest(read_manifest(files_of(models, 1)[1].parent)).replace(b'"format": 2', b'"format": 7')
    (files_of(models, 1)[1].parent / MANIFEST).write_bytes(body)
    with pytest.raises(InputError, match=r"newer version .*format 7"):
        open_checkpoint(models / "step-000000001.ckpt", ALONE)


def test_of_an_older_version(models: Path) -> None:
    """Whose checksums are blake2b: they are compared as ever, and the manifest stays as it was written."""
    path, *files = files_of(models, 2)
    folder = files[0].parent
    old = {name: hashlib.blake2b(name.read_bytes(), digest_size=16).hexdigest() for name in [path, *files]}
    stamps = {name: Stamp(name.stat().st_size, digest) for name, digest in old.items()}
    of_files = {name.name: stamp for name, stamp in stamps.items() if name not in (path, folder / MANIFEST)}
    manifest = replace(read_manifest(folder), checkpoint=stamps[path], files=of_files, format=1)
    (folder / MANIFEST).write_bytes(dump_manifest(manifest))
    assert read_manifest(folder) == manifest and check_checkpoint(path) is not None
    assert open_checkpoint(path, ALONE).values == {"images": 2}
    victim = next(name for name in files if name.suffix == ".distcp")
    content = victim.read_bytes()
    victim.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(DamagedCheckpoint, match=f"{victim.name} has been altered"):
        check_checkpoint(path)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    path = tmp_path / "step-000000009.ckpt"
    for content in (b"", b"PK not a zip", pickle.dumps({"step": 9})):
        path.write_bytes(content)
        with pytest.raises(InputError, match=path.name):
            open_checkpoint(path, ALONE)
    torch.save({"weights": torch.ones(3)}, path)
    with pytest.raises(InputError, match="not a checkpoint of nerfstudio"):
        open_checkpoint(path, ALONE)
    assert latest_checkpoint(tmp_path) is None and latest_checkpoint(tmp_path / "nowhere") is None


# ---- which are kept ----


def test_the_last_two_are_kept(models: Path) -> None:
    for step, keep, expected in [(3, 2, [2, 3]), (4, 0, [2, 3, 4]), (4, 3, [2, 3, 4]), (5, 1, [5]), (3, 0, [3, 5])]:
        assert write(models, step) == ""
        remove_old(models, keep, ALONE, step)
        assert steps_in(models) == expected
        assert len(list(states_folder(models).iterdir())) == len(expected)


def test_last_written_checkpoint_is_kept_at_any_step(models: Path) -> None:
    """A run that goes on from an early checkpoint in its old folder writes steps below those that it finds there."""
    for step in (9, 3, 4):
        assert write(models, step) == ""
        for path in checkpoints_in(models):  # a second goes by
            stat = path.stat()
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns - 10**9))
    remove_old(models, 3, ALONE, 4)
    assert steps_in(models) == [3, 4], "commands take the largest step for the newest model"
    assert len(list(states_folder(models).iterdir())) == 2


@pytest.mark.parametrize("keep", [1, 2])
def test_a_clock_that_is_ahead_keeps_no_checkpoint_too_long(models: Path, keep: int) -> None:
    """Rank 0 was on a machine whose clock is an hour ahead, and is on another since that one was lost."""
    for step in (1, 2):
        assert write(models, step) == ""
        for path in checkpoints_in(models):
            stat = path.stat()
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 3600 * 10**9))
    for step in (3, 4):
        assert write(models, step) == ""
        remove_old(models, keep, ALONE, step)
        assert step_of(checkpoints_in(models)[-1]) == step
    assert steps_in(models) == [3, 4][-keep:]


def test_manifest_contents(models: Path) -> None:
    manifest = read_manifest(files_of(models, 1)[1].parent)
    assert isinstance(manifest, Manifest) and manifest.values == {"images": 1}
    assert set(manifest.files) == {".metadata", "__0_0.distcp"}
