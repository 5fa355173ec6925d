"""The checkpoint that a run ends with, on disks that are full: for a while, for one rank, or for good."""

import errno
import json
import os
import re
import shlex
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint.verify import check_checkpoint, checkpoints_in
from ns_multigpu.plugin.faults.errors import SaveFailed
from ns_multigpu.plugin.faults.signals import Interrupted
from ns_multigpu.plugin.launch.run_parts import RunParts
from ns_multigpu.plugin.run import last_save
from ns_multigpu.plugin.run.last_save import in_short, save_last
from tests.lib.ranks import run_ranks
from tests.lib.resuming import start
from tests.lib.saving import ALONE, disk, no_space, steps_in

RUN = Path("run", "splatfacto-batch", "now")
FULL = os.strerror(errno.ENOSPC)


def full(*folders: Path, times: int = 10**9) -> Callable[[str], None]:
    """Return a disk on which these folders take nothing, for so many writes."""
    left = [times]

    def behave(name: str) -> None:
        if any(Path(name).is_relative_to(folder) for folder in folders) and left[0] > 0:
            left[0] -= 1
            no_space(name)

    return behave


def never() -> bool:
    return False


class Clock:
    """Clock that advances only during sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(last_save, "time", made)
    return made


def set_up(capture: Path, out: Path, world: World = ALONE, **options: Any) -> Any:
    trainer = start(world, capture, out, 2, **options)
    if world.is_main:
        (trainer.base_dir / "config.yml").write_text(yaml.dump({"a": 1}))
    return trainer


def test_disk_that_is_freed_in_time_is_used(capture: Path, tmp_path: Path, clock: Clock, capsys: Any) -> None:
    trainer = set_up(capture, tmp_path)
    with disk(full(trainer.base_dir, times=2)):
        assert save_last(trainer, 1, seconds=300, is_cancelled=never) == trainer.base_dir
    assert steps_in(trainer.checkpoint_dir) == [1]
    said = capsys.readouterr().out
    assert said.count("is tried again for 300 s") == 1 and FULL in said and "Ctrl-C cancels" in said


@pytest.mark.parametrize("why", ["timeout", "cancelled"])
def test_a_disk_that_stays_full(capture: Path, tmp_path: Path, clock: Clock, why: str) -> None:
    trainer = set_up(capture, tmp_path / "my runs")
    assert trainer.checkpoints.write(0) == ""
    asked: list[int] = []

    def is_cancelled() -> bool:
        asked.append(1)
        return why == "cancelled" and len(asked) == 3

    with disk(full(trainer.base_dir)), pytest.raises(SaveFailed) as caught:
        save_last(trainer, 1, seconds=8.0 if why == "timeout" else 60.0, is_cancelled=is_cancelled)
    assert (len(asked), clock.now) == ((4, 9.0) if why == "timeout" else (3, 6.0))
    said = str(caught.value)
    models = tmp_path / "my runs" / RUN / "nerfstudio_models"
    assert f"could not be written to {models}: {FULL}." in said
    assert "Lost: the model after 2 images (60 Gaussians, " in said
    assert f"The newest checkpoint there is: {models / 'step-000000000.ckpt'}." in said
    assert "--save-fallback-dir DIR" in said and re.search(r"There is enough space in /\S+ \([\d,.]+ GB free\)", said)
    assert shlex.split(said.splitlines()[-1]) == [
        *("ns-train", "splatfacto-batch", "--load-config", str(models.parent / "config.yml")),
        *("--load-dir", str(models)),
    ]
    assert steps_in(models) == [0], "the earlier one is as it was"


@pytest.mark.parametrize(("degree", "state", "size"), [(3, "full", "7,200 MB"), (1, "compact", "1,960 MB")])
def test_lost_work_is_reported(
    capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, degree: int, state: str, size: str
) -> None:
    trainer = set_up(capture, tmp_path)
    options = trainer.pipeline.model.config
    options.sh_degree, options.optimizer_state = degree, state
    monkeypatch.setattr(type(trainer.pipeline.model), "total_points", 10_000_000)
    with disk(full(tmp_path)), pytest.raises(SaveFailed, match=rf"\(10,000,000 Gaussians, {size}\)"):
        save_last(trainer, 1, seconds=0, is_cancelled=never)


def test_no_resume_command_without_a_checkpoint(capture: Path, tmp_path: Path) -> None:
    trainer = set_up(capture, tmp_path)
    with disk(full(tmp_path)), pytest.raises(SaveFailed) as caught:
        save_last(trainer, 1, seconds=0, is_cancelled=never)
    said = str(caught.value)
    assert "There is no earlier checkpoint." in said and said.endswith("and start again.")
    assert "ns-train" not in said


def test_fallback_folder_gets_the_checkpoint(capture: Path, tmp_path: Path, capsys: Any) -> None:
    place = tmp_path / "other disk"
    trainer = set_up(capture, tmp_path / "runs", save_fallback_dir=place)
    with disk(full(trainer.base_dir)):
        assert save_last(trainer, 1, seconds=0, is_cancelled=never) == place / RUN
    assert steps_in(place / RUN / "nerfstudio_models") == [1] and steps_in(trainer.checkpoint_dir) == []
    assert yaml.safe_load((place / RUN / "config.yml").read_text()) == {"a": 1}, "it is a run folder"
    assert f"({FULL}): it is in {place / RUN}." in capsys.readouterr().out


def test_fallback_folder_is_unused_if_not_needed(capture: Path, tmp_path: Path) -> None:
    trainer = set_up(capture, tmp_path / "runs", save_fallback_dir=tmp_path / "other")
    assert save_last(trainer, 1, seconds=0, is_cancelled=never) == trainer.base_dir
    assert not (tmp_path / "other").exists()


def test_both_folders_are_tried_again_and_both_are_named(capture: Path, tmp_path: Path, clock: Clock) -> None:
    other = tmp_path / "other"
    trainer = set_up(capture, tmp_path / "runs", save_fallback_dir=other)
    with disk(full(tmp_path)), pytest.raises(SaveFailed, match=f"{FULL}; {other / RUN}: {FULL}"):
        save_last(trainer, 1, seconds=0, is_cancelled=never)
    own, later = full(trainer.base_dir), full(other, times=2)

    def both(name: str) -> None:
        own(name)
        later(name)

    with disk(both):
        assert save_last(trainer, 1, seconds=300, is_cancelled=never) == other / RUN


def test_a_run_ends_with_it(capture: Path, tmp_path: Path, clock: Clock, capsys: Any) -> None:
    """Not with "Training finished"."""
    trainer = set_up(capture, tmp_path / "lost", save_retry_seconds=0.0)
    with disk(full(tmp_path / "lost")), pytest.raises(SaveFailed, match="Lost: the model after 2 images"):
        trainer.train()
    assert "Training finished" not in capsys.readouterr().out
    other = set_up(capture, tmp_path / "runs", save_fallback_dir=tmp_path / "other")
    with disk(full(other.base_dir)):
        other.train()
    said, kept = capsys.readouterr().out, tmp_path / "other" / RUN
    assert "Training finished" in said and f"ns-viewer --load-config {kept / 'config.yml'}" in said
    assert f"--load-dir {kept / 'nerfstudio_models'}" in said, "the way on begins where the checkpoint is"
    resumed = start(ALONE, capture, tmp_path / "next", 4, load_dir=kept / "nerfstudio_models")
    assert resumed._start_step == 2


def test_stopped_run_checks_disk_space_once(capture: Path, tmp_path: Path, capsys: Any) -> None:
    trainer = set_up(capture, tmp_path / "runs", save_fallback_dir=tmp_path / "other")
    trainer.config.max_num_iterations = 10**6
    trainer.may_go_on = lambda step: step < 3 or setattr(trainer.guards.signals, "agreed", 15) is not None
    with disk(full(trainer.base_dir)), pytest.raises(Interrupted) as caught:
        trainer.train()
    path = tmp_path / "other" / RUN / "nerfstudio_models" / "step-000000002.ckpt"
    assert caught.value.checkpoint == path and caught.value.code == 143 and check_checkpoint(path) is not None
    assert f"--load-dir {path.parent}" in capsys.readouterr().out


def test_run_warns_of_a_disk_that_is_too_small_for_its_saves(capture: Path, tmp_path: Path, capsys: Any) -> None:
    def said(gigabytes: int, out: Path, **options: Any) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(last_save.shutil, "disk_usage", lambda _: SimpleNamespace(free=gigabytes * 10**9))
            trainer = set_up(capture, out, **options)
            trainer.objective.begin(0)
        return " ".join(capsys.readouterr().out.split())

    large: dict[str, Any] = {"densifier": "mcmc", "max_gaussians": 60_000_000, "steps_per_save": 1}
    text = said(120, tmp_path / "one", **large)
    assert "Up to 3 checkpoint(s) of 60,000,000 Gaussians, 43.2 GB each" in text
    assert "120.0 GB free" in text and "--save-fallback-dir" in text
    assert "Up to" not in said(130, tmp_path / "two", **large)
    assert "Up to 2" in said(80, tmp_path / "three", keep_checkpoints=1, **large)
    assert "Up to 3" in said(80, tmp_path / "four", keep_checkpoints=0, **large), "two steps, and the last save"
    assert "Up to" not in said(44, tmp_path / "five", **(large | {"steps_per_save": 9})), "one is written in all"
    few = said(1, tmp_path / "six", max_gaussians=60_000_000)
    assert "Up to" not in few, "without MCMC a cap is not what the run grows to"


def test_space_for_the_missing_saves_suffices_after_earlier_ones(tmp_path: Path, capsys: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(last_save.shutil, "disk_usage", lambda _: SimpleNamespace(free=150))
        for models, most, expected in ((tmp_path / "none", 2, True), (tmp_path, 2, False), (tmp_path, 3, True)):
            (tmp_path / "step-000000001.ckpt").touch()
            last_save.warn_of_disk(models, 5, 100, most)
            assert ("checkpoint(s) of 5" in capsys.readouterr().out) == expected


def test_disk_error_is_summarized() -> None:
    said = "rank 0: [Errno 28] No space left on device: '/a/b'; rank 1: [Errno 28] No space left on device: '/a/c'"
    assert in_short(said) == "No space left on device"
    assert in_short(said + "; [Errno 122] Disk quota exceeded") == "No space left on device; Disk quota exceeded"
    assert in_short("") == "" and in_short("it does not get to rank 0") == "it does not get to rank 0"


# ---- two ranks, of which one has a full disk ----


def _two(world: World, capture: Path, out: Path) -> dict[str, Any]:
    last_save._PAUSE = 0.01
    other = out / "other"
    trainer = set_up(capture, out / "runs", world, save_fallback_dir=other)
    report: dict[str, Any] = {}

    def on_rank_1(*folders: Path, **options: int) -> Callable[[str], None]:
        return full(*folders, **options) if world.rank == 1 else full()

    with disk(on_rank_1(out)), pytest.raises(SaveFailed) as caught:
        save_last(trainer, 1, seconds=0.1, is_cancelled=never)
    report["lost"] = str(caught.value)
    with disk(on_rank_1(trainer.base_dir)):
        report["other"] = save_last(trainer, 1, seconds=0, is_cancelled=never) == other / RUN
    report["there"] = steps_in(other / RUN / "nerfstudio_models")
    with disk(on_rank_1(out, times=2)):
        report["again"] = save_last(trainer, 1, seconds=300, is_cancelled=never) == trainer.base_dir
    report["here"] = steps_in(trainer.checkpoint_dir)
    return report


def test_two_ranks_take_the_same_decision(capture: Path, tmp_path: Path) -> None:
    first, second = run_ranks(_two, 2, capture, tmp_path)
    assert first == second and first["lost"].count(FULL) == 2
    assert "Lost: the model after 4 images (60 Gaussians" in first["lost"]
    assert (first["other"], first["there"], first["again"], first["here"]) == (True, [1], True, [1])


# ---- held-out views are evaluated during the save: the checkpoint exists with any outcome ----


class Held:
    """A disk whose first write waits until it is released."""

    def __init__(self) -> None:
        self.asked, self.goes_on = threading.Event(), threading.Event()

    def __call__(self, name: str) -> None:
        self.asked.set()
        assert self.goes_on.wait(60), "the look waits for the save"


def test_views_are_evaluated_during_the_write(capture: Path, tmp_path: Path) -> None:
    trainer, held, there = set_up(capture, tmp_path), Held(), list[Any]()

    def look() -> None:
        assert held.asked.wait(60), "the save waits for the look"
        there.append(checkpoints_in(trainer.checkpoint_dir))
        held.goes_on.set()

    with disk(held):
        assert save_last(trainer, 1, seconds=0, is_cancelled=never, while_busy=look) == trainer.base_dir
    assert there == [[]] and steps_in(trainer.checkpoint_dir) == [1]
    written: list[str] = []
    with disk(written.append):
        assert (
            save_last(trainer, 1, seconds=0, is_cancelled=never, while_busy=lambda: there.append(2)) == trainer.base_dir
        )
    assert there == [[], 2] and not written, "it is there"


def test_failing_disk_is_tried_again(capture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = set_up(capture, tmp_path)
    with disk(full(trainer.base_dir, times=1)):
        assert save_last(trainer, 1, seconds=0, is_cancelled=never, while_busy=lambda: None) == trainer.base_dir
    said = capsys.readouterr()
    assert steps_in(trainer.checkpoint_dir) == [1] and "could not be written" not in said.out + said.err


def test_run_reports_times_of_save_and_evaluation(
    capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, parts, done = set_up(capture, tmp_path), list[str](), RunParts.done
    monkeypatch.setattr(RunParts, "done", lambda self, part: parts.append(part) or done(self, part))
    trainer.train()
    summary = json.loads((trainer.base_dir / "training_summary.json").read_text())
    look, save = "last look at held-out views", "last save"
    assert parts.index(look) < parts.index(save) and {look, save} <= set(summary["startup_ms"])
    assert summary["psnr"] > 0 and summary["held_out_views"] == 1 and steps_in(trainer.checkpoint_dir) == [1]


def _one_fails(world: World, capture: Path, out: Path) -> tuple[list[int], str]:
    trainer, held = set_up(capture, out, world), Held()

    def look() -> None:
        held.asked.wait(60)
        threading.Timer(0.3, held.goes_on.set).start()
        if world.rank == 1:
            raise RuntimeError("no memory for a picture")

    said = ""
    with disk(held):
        try:
            save_last(trainer, 1, seconds=0, is_cancelled=never, while_busy=look)
        except RuntimeError as error:
            said = str(error)
    return steps_in(trainer.checkpoint_dir), said


def test_evaluation_failing_on_one_rank_keeps_the_checkpoint(capture: Path, tmp_path: Path) -> None:
    (there, nothing), (there_too, said) = run_ranks(_one_fails, 2, capture, tmp_path)
    assert there == there_too == [1] and (nothing, said) == ("", "no memory for a picture")


def test_failing_evaluation_keeps_the_checkpoint(capture: Path, tmp_path: Path) -> None:
    trainer, held = set_up(capture, tmp_path, ALONE), Held()

    def look() -> None:
        threading.Timer(0.3, held.goes_on.set).start()
        raise KeyboardInterrupt

    with disk(held), pytest.raises(KeyboardInterrupt):
        save_last(trainer, 1, seconds=0, is_cancelled=never, while_busy=look)
    assert steps_in(trainer.checkpoint_dir) == [1]
