"""Checkpoints on the disk: whole or absent, whatever is done to them, and written by all ranks together."""

import errno
import os
import pickle
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ns_multigpu.core.world import World
from ns_multigpu.plugin import checkpoint, checkpoint_storage
from ns_multigpu.plugin.checkpoint import open_checkpoint, remove_old, save
from ns_multigpu.plugin.checkpoint_storage import SavedTensors
from ns_multigpu.plugin.checkpoint_verify import (
    FORMAT,
    MANIFEST,
    OURS,
    DamagedCheckpoint,
    Manifest,
    check_checkpoint,
    checkpoints_in,
    dump_manifest,
    latest_checkpoint,
    read_manifest,
    states_folder,
    step_of,
)
from ns_multigpu.plugin.errors import InputError
from tests.ranks import run_ranks

ALONE = World.single()


def tensors_of(step: int, rank: int = 0) -> dict[str, torch.Tensor]:
    """Shared ones of several types and sizes, and one of this rank's."""
    g = torch.Generator().manual_seed(step)
    shared = {f"shared/{i}": torch.rand(40 * i, 3, generator=g) for i in range(6)}
    more = {"count": torch.tensor(float(step)), "bytes": torch.arange(100, dtype=torch.uint8)}
    return {**shared, **more, f"rank{rank}/own": torch.full((7,), float(rank))}


def write(models: Path, step: int, world: World = ALONE) -> str:
    model = {"_model.gauss_params.means": torch.full((20, 3), float(step))}
    return save(models, step, lambda: model, tensors_of(step, world.rank), {"images": step}, world)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """The folder of a run with the checkpoints of steps 1 and 2."""
    folder = tmp_path / "run" / "nerfstudio_models"
    assert write(folder, 1) == write(folder, 2) == ""
    return folder


def copied(models: Path, place: Path) -> Path:
    shutil.copytree(models.parent, place)
    return place / models.name


def newest_as_nerfstudio_finds_it(models: Path) -> int:
    """By its rule, which takes every name in the folder for a checkpoint's; and as it opens it."""
    steps = [int(x[x.find("-") + 1 : x.find(".")]) for x in os.listdir(models)]
    content = torch.load(models / f"step-{max(steps):09d}.ckpt", map_location="cpu")
    assert content["step"] == max(steps)
    assert torch.equal(content["pipeline"]["_model.gauss_params.means"], torch.full((20, 3), float(max(steps))))
    return max(steps)


def files_of(models: Path, step: int) -> list[Path]:
    (folder,) = states_folder(models).glob(f"step-{step:09d}-*")
    return [models / f"step-{step:09d}.ckpt", *sorted(folder.iterdir())]


def test_comes_back_as_it_was(models: Path) -> None:
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
        told: list[str] = []
        newest = latest_checkpoint(place, told.append)
        assert newest == place / "step-000000001.ckpt"
        assert told == [] if trial == 0 else victim.name in told[0]
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


def test_nothing_is_run_that_a_file_asks_for(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(InputError, match=r"step-000000002.ckpt was written by a newer version .*format 2"):
        open_checkpoint(path, ALONE)
    body = dump_manifest(read_manifest(files_of(models, 1)[1].parent)).replace(b'"format": 1', b'"format": 7')
    (files_of(models, 1)[1].parent / MANIFEST).write_bytes(body)
    with pytest.raises(InputError, match=r"newer version .*format 7"):
        open_checkpoint(models / "step-000000001.ckpt", ALONE)


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


# ---- a process that dies, a disk that is full ----


def _count(calls: Callable[[bool], None]) -> Iterator[tuple[Any, str, Any]]:
    """What a save does to the disk, each preceded by `calls`, which is told whether it is a write."""
    places = [
        (checkpoint_storage, "write_bytes"), (os, "fsync"), (os, "replace"), (os, "mkdir"), (os, "unlink"),
        (os, "rename"), (os, "rmdir"), (Path, "rename"), (Path, "mkdir"), (Path, "unlink"), (shutil, "rmtree"),
    ]  # fmt: skip
    for place in places:
        holder, name = place
        original = getattr(holder, name)

        def replacement(*args: Any, _original: Any = original, _write: bool = not places.index(place), **kwargs: Any):
            calls(_write)
            return _original(*args, **kwargs)

        yield holder, name, replacement


def in_another_process(work: Callable[[], None]) -> int:
    """The exit status of a child that does `work`, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(99)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_killed_at_any_instant(models: Path, tmp_path: Path) -> None:
    """The third save, which also removes the first checkpoint, killed before each of its touches of the disk."""
    seen: set[int] = set()
    for instant in range(1000):
        place = copied(models, tmp_path / str(instant))

        def dying(place: Path = place, instant: int = instant) -> None:
            left = instant
            writes = 0

            def touch(write: bool) -> None:
                nonlocal left, writes
                writes += write
                if write and writes % 12 != 1:  # torch.save writes in many small pieces
                    return
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

            for holder, name, replacement in list(_count(touch)):
                setattr(holder, name, replacement)
            if write(place, 3) == "":
                remove_old(place, 2, ALONE)

        status = in_another_process(dying)
        newest = latest_checkpoint(place)
        assert newest is not None and step_of(newest) in (2, 3)
        assert check_checkpoint(place / "step-000000002.ckpt") is not None
        assert newest_as_nerfstudio_finds_it(place) == step_of(newest)
        seen.add(step_of(newest))
        # And the run that follows finds nothing in its way.
        assert write(place, 3) == ""
        remove_old(place, 2, ALONE)
        assert [step_of(p) for p in checkpoints_in(place)] == [2, 3]
        assert len(list(states_folder(place).iterdir())) == 2
        shutil.rmtree(place.parent)
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert status == 0 and instant > 15 and seen == {2, 3}


def _write_with_full_disk(world: World, models: Path, full_on: int, after: int) -> tuple[str, str]:
    original, left = checkpoint_storage.write_bytes, [after]

    def write_bytes(file: Any, data: Any) -> None:
        left[0] -= 1
        if world.rank == full_on and left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
        original(file, data)

    checkpoint_storage.write_bytes = write_bytes
    problem = write(models, 3, world)
    checkpoint_storage.write_bytes = original
    return problem, write(models, 4, world)


@pytest.mark.parametrize(("full_on", "after"), [(0, 0), (1, 1), (0, 17), (1, 17)])
def test_full_disk_on_one_rank(models: Path, full_on: int, after: int) -> None:
    (said, then), (said_1, then_1) = run_ranks(_write_with_full_disk, 2, models, full_on, after)
    assert said == said_1 and "No space left on device" in said
    assert then == then_1 == "", "the next save finds room"
    assert [step_of(p) for p in checkpoints_in(models)] == [1, 2, 4]
    for path in checkpoints_in(models):
        assert check_checkpoint(path) is not None
    assert len(list(states_folder(models).iterdir())) == 3


def test_full_disk_in_earnest(models: Path) -> None:
    """A limit that the kernel enforces, at many sizes, so that each of the files is the one that meets it."""

    def limited(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        assert "File too large" in write(models, 3)

    for size in (0, 100, 1000, 1500, 4000):
        assert in_another_process(lambda size=size: limited(size)) == 0, size
        assert sorted(p.name for p in states_folder(models).iterdir()) == sorted(
            p.parent.name for step in (1, 2) for p in files_of(models, step)[1:2]
        )
        assert newest_as_nerfstudio_finds_it(models) == 2 and step_of(latest_checkpoint(models) or Path()) == 2


def _write_with_bug(world: World, models: Path) -> str:
    def broken(*_: Any) -> None:
        raise TypeError("a mistake in the code")

    if world.rank == 1:
        checkpoint.save_tensors = lambda *_: broken()
    kind = TypeError if world.rank == 1 else RuntimeError
    with pytest.raises(BaseException) as caught:
        checkpoint.together(lambda: broken() if world.rank == 1 else None, world, OSError)
    assert isinstance(caught.value, kind)
    return str(caught.value)


def test_a_bug_is_not_taken_for_a_full_disk(models: Path) -> None:
    first, second = run_ranks(_write_with_bug, 2, models)
    assert second == "a mistake in the code" and "rank 1 failed: TypeError" in first


# ---- which are kept ----


def test_the_last_two_are_kept(models: Path) -> None:
    for step, keep, expected in [(3, 2, [2, 3]), (4, 0, [2, 3, 4]), (4, 3, [2, 3, 4]), (5, 1, [5]), (3, 2, [3, 5])]:
        assert write(models, step) == ""
        remove_old(models, keep, ALONE)
        assert [step_of(p) for p in checkpoints_in(models)] == expected
        assert len(list(states_folder(models).iterdir())) == len(expected)
        for path in checkpoints_in(models):
            assert check_checkpoint(path) is not None


def test_manifest_says_what_it_says(models: Path) -> None:
    manifest = read_manifest(files_of(models, 1)[1].parent)
    assert isinstance(manifest, Manifest) and manifest.values == {"images": 1}
    assert set(manifest.files) == {".metadata", "__0_0.distcp"}
