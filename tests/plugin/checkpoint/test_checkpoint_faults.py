"""Saves that end early: a process that is killed, a disk that is full, a mistake in the code."""

import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint import atomic_save as checkpoint
from ns_multigpu.plugin.checkpoint import rows as checkpoint_rows
from ns_multigpu.plugin.checkpoint import saved_tensors
from ns_multigpu.plugin.checkpoint import storage as checkpoint_storage
from ns_multigpu.plugin.checkpoint.atomic_save import remove_old
from ns_multigpu.plugin.checkpoint.held_rows import Rows
from ns_multigpu.plugin.checkpoint.verify import (
    check_checkpoint,
    latest_checkpoint,
    states_folder,
    step_of,
)
from tests.lib.ranks import run_ranks
from tests.lib.saving import (
    ALONE,
    as_large_ones,
    copied,
    disk,
    files_of,
    newest_as_nerfstudio_finds_it,
    no_space,
    steps_in,
    tensors_of,
    write,
)


def _count(calls: Callable[[bool], None]) -> Iterator[tuple[Any, str, Any]]:
    """Record a save's disk operations. `calls` runs before each, with whether it is a write."""
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
    """Return the exit status of a child that does `work`, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(99)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at_each_instant(
    models: Path, folder: Path, save: Callable[[Path], None], instants: Iterable[int], by: Callable[[], bool]
) -> Iterator[Path]:
    """Yield copies of a run behind a save that was killed before one of its touches of the disk, up to a save that was
    not; `by`: whether the right thread touches it."""
    for instant in instants:
        place = copied(models, folder / str(instant))

        def dying(place: Path = place, left: int = instant) -> None:
            writes = 0

            def touch(write: bool) -> None:
                nonlocal left, writes
                writes += write
                if write and writes % 12 != 1:  # torch.save writes in many small pieces
                    return
                if left == 0:
                    assert by()
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

            for holder, name, replacement in list(_count(touch)):
                setattr(holder, name, replacement)
            save(place)

        status = in_another_process(dying)
        yield place
        shutil.rmtree(place.parent)
        if status == 0:
            return
        assert status == -signal.SIGKILL
    pytest.fail("it was killed at every instant")


def test_killed_at_any_instant(models: Path, tmp_path: Path) -> None:
    """The third save, which also removes the first checkpoint, killed before each of its touches of the disk."""

    def save(place: Path) -> None:
        if write(place, 3) == "":
            remove_old(place, 2, ALONE, 3)

    seen = list[int]()
    for place in killed_at_each_instant(models, tmp_path, save, range(1000), lambda: True):
        newest = latest_checkpoint(place)
        assert newest is not None and step_of(newest) in (2, 3)
        assert check_checkpoint(place / "step-000000002.ckpt") is not None
        assert newest_as_nerfstudio_finds_it(place) == step_of(newest)
        seen.append(step_of(newest))
        # And the run that follows finds nothing in its way.
        assert write(place, 3) == ""
        remove_old(place, 2, ALONE, 3)
        assert steps_in(place) == [2, 3]
        assert len(list(states_folder(place).iterdir())) == 2
    assert len(seen) > 16 and set(seen) == {2, 3}


def _write_with_full_disk(world: World, models: Path, full_on: int, after: int) -> tuple[str, str]:
    writes = count()

    def full(name: str) -> None:
        if next(writes) >= after and world.rank == full_on:
            no_space(name)

    with disk(full):
        problem = write(models, 3, world)
    return problem, write(models, 4, world)


@pytest.mark.parametrize(("full_on", "after"), [(0, 0), (1, 1), (0, 17), (1, 17)])
def test_full_disk_on_one_rank(models: Path, full_on: int, after: int) -> None:
    (said, then), (said_1, then_1) = run_ranks(_write_with_full_disk, 2, models, full_on, after)
    assert said == said_1 and "No space left on device" in said
    assert then == then_1 == "", "the next save succeeds"
    assert steps_in(models) == [1, 2, 4]
    assert len(list(states_folder(models).iterdir())) == 3


def _write_with_loss(world: World, models: Path, lost_on: int, left: int | None) -> tuple[str, str]:
    """Return a save of which a rank's file is lost once it has been written, or all but its first bytes."""
    usual = saved_tensors.save_tensors

    def save_tensors(folder: Path, *rest: Any, **how: Any) -> Any:
        stamps = usual(folder, *rest, **how)
        if world.rank == lost_on:
            file = folder / f"__{world.rank}_0.distcp"
            file.unlink() if left is None else os.truncate(file, left)
        return stamps

    saved_tensors.save_tensors = save_tensors
    problem = write(models, 3, world)
    saved_tensors.save_tensors = usual
    return problem, write(models, 4, world)


@pytest.mark.parametrize(("lost_on", "left"), [(0, 10), (1, 10), (1, None)])
def test_missing_file_of_a_rank_fails_the_checkpoint(models: Path, lost_on: int, left: int | None) -> None:
    """On a folder that machines do not share, say: there is no checkpoint then, on any rank."""
    (said, then), (said_1, then_1) = run_ranks(_write_with_loss, 2, models, lost_on, left)
    assert said == said_1 and f"__{lost_on}_0.distcp does not appear on the machine of rank 0" in said
    assert then == then_1 == ""
    assert steps_in(models) == [1, 2, 4]
    assert len(list(states_folder(models).iterdir())) == 3


def test_state_in_several_files(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_large_ones(monkeypatch)
    assert write(models, 3) == ""
    found = files_of(models, 3)
    assert [path.name for path in found[2:-1]] == [f"__0_{part}.distcp" for part in range(4)]
    assert all(path.stat().st_size > 1000 for path in found[2:-1])
    assert check_checkpoint(found[0]) is not None
    saved = saved_tensors.SavedTensors(found[1].parent)
    expected = tensors_of(3)
    assert saved.names == sorted(expected)
    assert all(torch.equal(value, expected[name]) for name, value in saved.read(saved.names).items())


@pytest.mark.parametrize("full", ["__0_0.distcp", "__0_1.distcp", "__0_3.distcp", "step-000000003.ckpt"])
@pytest.mark.parametrize("opens", [True, False])
def test_full_disk_in_any_file(
    models: Path, full: str, opens: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The file is written by a thread of torch that does not report errors."""
    as_large_ones(monkeypatch)
    usual = Path.open

    def no_write(name: str) -> None:
        if opens and Path(name).name == full:
            no_space(name)

    def no_open(self: Path, *how: Any, **more: Any) -> Any:
        if not opens and self.name == full and "wb" in how:
            no_space(self)
        return usual(self, *how, **more)

    with monkeypatch.context() as patched, disk(no_write):
        patched.setattr(Path, "open", no_open)
        said = write(models, 3)
    assert "No space left on device" in said and full in said
    assert "Exception in thread" not in capfd.readouterr().err
    assert steps_in(models) == [1, 2] and len(list(states_folder(models).iterdir())) == 2
    assert write(models, 4) == "" and check_checkpoint(files_of(models, 4)[0]) is not None


def test_every_file_is_synced_to_disk(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its last byte, and before the checkpoint has its name."""
    as_large_ones(monkeypatch)
    usual, synced = os.fsync, dict[str, int]()

    def fsync(descriptor: int) -> None:
        usual(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_file():
            assert not (models / path.name).exists()
            synced[path.name.removesuffix(".tmp")] = path.stat().st_size

    monkeypatch.setattr(os, "fsync", fsync)
    assert write(models, 3) == ""
    assert synced == {path.name: path.stat().st_size for path in files_of(models, 3)}


def test_a_gpu_has_done_its_work_before_threads_copy_from_it(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their streams do not wait for the one that training uses; and they begin with the first GPU for theirs."""
    recorded: list[tuple[str, Any, bool]] = []

    def note(name: str) -> Callable[[Any], None]:
        return lambda device: recorded.append((name, device, threading.current_thread() is threading.main_thread()))

    monkeypatch.setattr(torch.cuda, "synchronize", note("synchronize"))
    monkeypatch.setattr(torch.cuda, "set_device", note("set_device"))
    device = torch.device("cuda:1")
    with disk(lambda _: recorded.append(("write", None, False))):
        assert write(models, 3, replace(ALONE, device=device)) == ""
    assert recorded[0] == ("synchronize", device, True) and ("set_device", device, False) in recorded[1:]


@pytest.mark.parametrize(
    ("megabytes", "cores", "ranks", "files"),
    [
        (0, 64, 1, 1),
        (127, 64, 1, 1),
        (128, 64, 1, 2),
        (5000, 64, 1, 4),
        (5000, 3, 1, 3),
        (5000, 8, 4, 2),
        (900, 2, 4, 1),
    ],
)
def test_files_at_once(megabytes: int, cores: int, ranks: int, files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_tensors, "cores", lambda: cores)
    monkeypatch.setattr(saved_tensors, "available_memory", lambda: 0)
    tensors = {"means": torch.empty(1).expand(megabytes << 18)}  # on the host: nothing is copied
    assert saved_tensors.files_at_once(tensors, ranks) == files
    assert saved_tensors.files_at_once({}, ranks) == 1


@pytest.mark.parametrize(
    ("memory_mib", "ranks", "files"), [(None, 1, 4), (8000, 1, 4), (6000, 1, 3), (6000, 3, 1), (10, 1, 1)]
)
@pytest.mark.parametrize("rows", [False, True])
def test_gpu_copies_use_at_most_half_of_host_memory(
    memory_mib: int | None, ranks: int, files: int, rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file holds one tensor of 1000 MiB, or four blocks of rows of as many."""
    monkeypatch.setattr(saved_tensors, "cores", lambda: 64)
    monkeypatch.setattr(saved_tensors, "available_memory", lambda: None if memory_mib is None else memory_mib << 20)
    monkeypatch.setattr(checkpoint_rows, "BLOCK", 1 << 18)
    one = torch.empty(1 << 20, 250, device="meta")
    more = torch.empty(3 << 20, 250, device="meta")
    tensors = {"small": one[:5], "large": Rows(more, 0, len(more)) if rows else one}
    assert saved_tensors.files_at_once(tensors, ranks) == files


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

    kind = TypeError if world.rank == 1 else RuntimeError
    with pytest.raises(BaseException) as caught:
        checkpoint.together(lambda: broken() if world.rank == 1 else None, world, OSError)
    assert isinstance(caught.value, kind)
    return str(caught.value)


def test_interrupted_rank_sends_no_report() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.together(interrupted, World.single(), OSError)


def test_bug_is_not_reported_as_a_full_disk(models: Path) -> None:
    first, second = run_ranks(_write_with_bug, 2, models)
    assert second == "a mistake in the code" and "rank 1 failed: TypeError" in first
