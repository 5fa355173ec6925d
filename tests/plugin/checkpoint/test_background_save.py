"""Checkpoints that are written while training goes on: of the step they are named after, whole or not there at all."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.collectives import barrier
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint import background as background_save
from ns_multigpu.plugin.checkpoint import training_copy
from ns_multigpu.plugin.checkpoint.atomic_save import open_checkpoint
from ns_multigpu.plugin.checkpoint.background import CheckpointWriter
from ns_multigpu.plugin.checkpoint.held_rows import Rows
from ns_multigpu.plugin.checkpoint.training_copy import Content, share_out
from ns_multigpu.plugin.checkpoint.verify import check_checkpoint, latest_checkpoint, states_folder, step_of
from tests.lib.processes import until
from tests.lib.ranks import run_ranks
from tests.lib.saving import ALONE, as_large_ones, disk, files_of, no_space, steps_in, tensors_of
from tests.plugin.checkpoint.test_checkpoint_faults import killed_at_each_instant


def content_of(step: int, world: World) -> Content:
    """Return the state that `saving.write` writes, with rows sharded over the ranks."""
    model = {"_model.gauss_params.means": torch.full((20, 3), float(step))}
    rows = Rows(torch.full((3, 2), float(step)), 3 * world.rank, 3 * world.size)
    return Content(lambda: model, {**tensors_of(step, world.rank), "rows": rows}, {"images": step, "list": [step]})


def _changed_meanwhile(world: World, models: Path) -> list[str]:
    """Everything is changed as soon as `save` has returned; nothing is written before that."""
    messages: list[str] = []
    writer = CheckpointWriter(models, 0, world, messages.append)
    changed = threading.Event()

    def wait(_: str) -> None:
        assert changed.wait(60)

    with disk(wait):
        for step in (1, 2):
            changed.clear()
            content = content_of(step, world)
            assert writer.save(step, lambda content=content: content, background=True)
            assert writer.saved_step == (1 if step == 2 else -1), "the second has waited for the first"
            for value in [*content.tensors.values(), *content.pipeline().values()]:
                (value.own if isinstance(value, Rows) else value).zero_()
            content.values["list"].append(77)
            threading.Timer(0.3, changed.set).start()
        writer.finish()
    assert writer.saved_step == 2 and set(writer.measured()) == {"save_stall_ms", "save_ms"}
    for step in (1, 2):
        opened = open_checkpoint(models / f"step-{step:09d}.ckpt", world)
        assert opened.values == {"images": step, "list": [step]} and opened.tensors is not None
        assert opened.content["pipeline"]["_model.gauss_params.means"].eq(step).all()
        expected = tensors_of(step)
        for rank in range(world.size):
            expected[f"rank{rank}/own"] = tensors_of(step, rank)[f"rank{rank}/own"]
        expected["rows"] = torch.full((3 * world.size, 2), float(step))
        assert opened.tensors.names == sorted(expected)
        for name, value in opened.tensors.read(opened.tensors.names).items():
            assert torch.equal(value, expected[name]), name
    assert writer.save(2, lambda: pytest.fail("there is one"), background=True)
    return messages


def test_nothing_that_training_changes_is_written(tmp_path: Path) -> None:
    assert run_ranks(_changed_meanwhile, 3, tmp_path / "nerfstudio_models") == [[]] * 3


def test_a_save_that_must_be_complete_is_written_once_and_may_be_in_another_folder(tmp_path: Path) -> None:
    """Another folder's checkpoint neither removes the run's own, nor counts as one of them."""
    models, other = tmp_path / "nerfstudio_models", tmp_path / "other"
    writer = CheckpointWriter(models, 1, ALONE, pytest.fail)
    assert writer.write(3, lambda: content_of(3, ALONE)) == ""
    assert writer.write(3, lambda: pytest.fail("there is one")) == ""
    assert writer.write(2, lambda: content_of(2, ALONE), other) == "" and writer.saved_step == 3
    assert (steps_in(models), steps_in(other)) == ([3], [2])
    assert writer.write(4, lambda: content_of(4, ALONE)) == ""
    assert (steps_in(models), steps_in(other)) == ([4], [2])


def _no_capacity(world: World, models: Path) -> list[bool]:
    """Return whether the checkpoint exists when `save` returns, with memory for a copy and without."""
    writer = CheckpointWriter(models, 0, world, pytest.fail)
    available, apart = training_copy.available_memory, training_copy.apart
    there: list[bool] = []
    last = world.rank == world.size - 1

    def fails(*_: Any) -> Any:
        raise MemoryError

    for step, spare, copy_of in [(1, available, apart), (2, lambda: 4000, apart), (3, available, fails)]:
        begun = threading.Event()

        def wait(_: str, begun: threading.Event = begun) -> None:
            if threading.current_thread().name == "checkpoint":
                begun.wait(60)

        training_copy.available_memory = spare if last else available
        training_copy.apart = copy_of if last else apart
        with disk(wait):
            assert writer.save(step, lambda step=step: content_of(step, world), background=True)
            there.append((models / f"step-{step:09d}.ckpt").exists())
            barrier(world)
            begun.set()
            writer.finish()
    training_copy.available_memory, training_copy.apart = available, apart
    return there


@pytest.mark.parametrize("background", [True, False])
def test_files_are_written_in_sequence_during_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """A synchronous save uses all threads."""
    as_large_ones(monkeypatch)
    models, writing = tmp_path / "nerfstudio_models", set[str]()

    def note(name: str) -> None:
        writing.add(threading.current_thread().name.partition("_")[0])

    writer = CheckpointWriter(models, 0, ALONE, print)
    with disk(note):
        assert writer.save(1, lambda: content_of(1, ALONE), background=background)
        writer.finish()
    assert len([path for path in files_of(models, 1) if path.suffix == ".distcp"]) == (1 if background else 4)
    assert ("model" in writing) == (not background) and ("checkpoint" in writing) == background
    assert steps_in(models) == [1]


def test_one_rank_without_memory_makes_all_write_at_once(tmp_path: Path) -> None:
    models = tmp_path / "nerfstudio_models"
    assert run_ranks(_no_capacity, 2, models) == [[False, True, True]] * 2
    assert steps_in(models) == [1, 2, 3]


def _full(world: World, models: Path) -> tuple[list[str], list[int]]:
    messages: list[str] = []
    writer = CheckpointWriter(models, 2, world, messages.append)
    saved: list[int] = []

    def full(name: str) -> None:
        if world.rank == world.size - 1 and "step-000000002" in name:
            no_space(name)

    with disk(full):
        for step in (1, 2, 3):
            assert writer.save(step, lambda step=step: content_of(step, world), background=True)
            if step == 2:  # reported by any rank that polls, without communication
                assert until(lambda: (writer.look(), bool(messages))[1])
            writer.finish()
            saved.append(writer.saved_step)
    return messages, saved


def test_full_disk_is_reported_and_keeps_old_checkpoints(tmp_path: Path) -> None:
    models = tmp_path / "nerfstudio_models"
    for messages, saved in run_ranks(_full, 2, models):
        assert saved == [1, 1, 3] and len(messages) == 1
        assert "step 2 could not be written" in messages[0] and "No space left on device" in messages[0]
    assert steps_in(models) == [1, 3] and len(list(states_folder(models).iterdir())) == 2


def _bug(world: World, models: Path) -> str:
    writer = CheckpointWriter(models, 2, world, pytest.fail)
    if world.rank == world.size - 1:
        background_save.remove_old = lambda *_: {}["missing"]  # type: ignore[assignment]
    assert writer.save(1, lambda: content_of(1, world), background=True)
    if world.rank < world.size - 1:
        writer.finish()
        return "whole"
    with pytest.raises(KeyError) as caught:
        writer.finish()
    writer.finish()  # it is reported once
    return str(caught.value)


def test_a_bug_is_raised_by_the_training_thread(tmp_path: Path) -> None:
    assert run_ranks(_bug, 2, tmp_path / "nerfstudio_models") == ["whole", "'missing'"]


def test_killed_at_any_instant(models: Path, tmp_path: Path) -> None:
    """The third save, which also removes the first checkpoint, killed before a touch of the disk, by its thread."""

    def save(place: Path) -> None:
        writer = CheckpointWriter(place, 2, ALONE, pytest.fail)
        assert writer.save(3, lambda: content_of(3, ALONE), background=True)
        writer.finish()

    def by_its_thread() -> bool:
        return threading.current_thread() is not threading.main_thread()

    seen: set[int] = set()
    for place in killed_at_each_instant(models, tmp_path, save, range(0, 1000, 3), by_its_thread):
        newest = latest_checkpoint(place)
        assert newest is not None and check_checkpoint(place / "step-000000002.ckpt") is not None
        seen.add(step_of(newest))
    assert seen == {2, 3}


def test_each_tensor_is_written_once_and_all_have_about_as_much_to_write() -> None:
    held = {f"{i}": 100 + i for i in range(40)}
    holders = [{**held, "own/0": 5}, held, {**held, "own/2": 900}]
    writers = share_out(holders, [1500, 0, 0])
    assert writers.keys() == {*held, "own/0", "own/2"} and writers["own/0"] == 0 and writers["own/2"] == 2
    loads = [1500, 0, 0]
    for name, rank in writers.items():
        loads[rank] += holders[rank][name]
    assert max(loads) - min(loads) < 150
    assert share_out([{}, {"late": 3}], [0, 10]) == {"late": 1}, "by one that has it"
