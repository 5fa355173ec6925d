"""Runs whose checkpoints are written while they go on: they end as others do, and so do those that end early."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint import storage as checkpoint_storage
from ns_multigpu.plugin.checkpoint.verify import checkpoints_in
from ns_multigpu.plugin.faults.errors import WorkerFailed
from ns_multigpu.plugin.faults.signals import Interrupted
from ns_multigpu.plugin.launch.launcher import run_workers
from tests.lib.processes import until
from tests.lib.ranks import run_ranks
from tests.lib.resuming import differing, everything, start
from tests.lib.saving import ALONE, disk, steps_in
from tests.lib.training_run import small_config

pytestmark = pytest.mark.slow


def _train(world: World, capture: Path, out: Path) -> dict[str, Any]:
    """Save after steps 4 and 8 of ten; the first is not written before the eighth step has begun."""
    report: dict[str, Any] = {}
    trainer = start(world, capture, out / "slow", 10, steps_per_save=4, keep_checkpoints=0)
    at_save: dict[str, torch.Tensor] = {}
    usual = trainer.save_checkpoint

    def save_checkpoint(step: int, **options: Any) -> None:
        if step == 4:
            at_save.update(everything(trainer))
        usual(step, **options)

    trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]
    written_in: list[int] = []

    def slow(name: str) -> None:
        if "step-000000004" in name:
            assert until(lambda: trainer.step >= 7)
            written_in.append(trainer.step)

    with disk(slow):
        trainer.train()
    report["steps"] = steps_in(trainer.checkpoint_dir)
    report["written in"] = min(written_in)
    report["metrics"] = (trainer.base_dir / "metrics.jsonl").read_text() if world.is_main else ""

    path = trainer.checkpoint_dir / "step-000000004.ckpt"
    resumed = start(world, capture, out / "resumed", 10, load_checkpoint=path)
    report["at save"] = differing(at_save, everything(resumed))
    resumed.train()
    report["resumed"] = differing(everything(trainer), everything(resumed))

    threads: set[str] = set()
    plain = start(world, capture, out / "plain", 10, steps_per_save=4, save_in_background=False)
    with disk(lambda _: threads.add(threading.current_thread().name)):
        plain.train()
    report["plain"], report["threads"] = differing(everything(trainer), everything(plain)), threads
    return report


def test_training_continues_during_a_save(capture: Path, tmp_path: Path) -> None:
    reports = run_ranks(_train, 2, capture, tmp_path)
    for rank, report in enumerate(reports):
        assert report["steps"] == [4, 8, 9] and report["written in"] >= 7
        assert report["at save"] == report["resumed"] == report["plain"] == []
        assert report["threads"] == {"MainThread", *(["model_0"] if rank == 0 else [])}
    assert '"save_stall_ms"' in reports[0]["metrics"] and '"save_ms"' in reports[0]["metrics"]


@pytest.mark.parametrize("save_on_interrupt", [True, False])
def test_interrupted_while_one_is_on_its_way(capture: Path, tmp_path: Path, save_on_interrupt: bool) -> None:
    trainer = start(ALONE, capture, tmp_path, 50, steps_per_save=4, save_on_interrupt=save_on_interrupt)
    stopping = threading.Event()
    usual, stop = trainer.may_go_on, trainer._stop_early

    def may_go_on(step: int) -> bool:
        if step == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return usual(step)

    def stop_early() -> None:
        assert not checkpoints_in(trainer.checkpoint_dir)
        stopping.set()
        stop()

    trainer.may_go_on, trainer._stop_early = may_go_on, stop_early  # type: ignore[method-assign]
    with disk(lambda _: until(stopping.is_set)), pytest.raises(Interrupted) as caught:
        trainer.train()
    newest = trainer.checkpoint_dir / "step-000000005.ckpt"
    assert caught.value.checkpoint == (newest if save_on_interrupt else None)
    assert steps_in(trainer.checkpoint_dir) == ([4, 5] if save_on_interrupt else [4])


def test_failing_run_finishes_its_save(capture: Path, tmp_path: Path) -> None:
    trainer = start(ALONE, capture, tmp_path, 50, steps_per_save=4)
    failed = threading.Event()
    usual = trainer.may_go_on

    def may_go_on(step: int) -> bool:
        if step == 6:
            failed.set()
            raise KeyError("broken")
        return usual(step)

    trainer.may_go_on = may_go_on  # type: ignore[method-assign]
    with disk(lambda _: until(failed.is_set)), pytest.raises(KeyError, match="broken"):
        trainer.train()
    assert steps_in(trainer.checkpoint_dir) == [4]


class Config:
    """Makes the trainer of a worker in which something happens while the save of step 4 is on its way.

    Attributes:
        what: "SIGKILL": rank 1 is killed in the middle of its file; "raise": its next step fails.
    """

    def __init__(self, config: Any, what: str) -> None:
        self.config, self.what = config, what
        self.machine, self.max_restarts = config.machine, 0

    def get_base_dir(self) -> Path:
        return self.config.get_base_dir()

    def setup(self, *, local_rank: int, world_size: int) -> Any:
        from ns_multigpu.plugin.run.trainer import DistributedTrainer

        trainer = DistributedTrainer(self.config, local_rank=local_rank, world_size=world_size)
        usual, train, folder = trainer.may_go_on, checkpoint_storage.write_bytes, self.get_base_dir()

        def may_go_on(step: int) -> bool:
            if step == 6 and trainer.world.rank == 1 and self.what == "raise":
                (folder / "time").write_text(str(time.time()))
                raise KeyError("broken")
            return usual(step)

        def write_bytes(file: Any, data: Any) -> None:
            if "step-000000004" in file.name:
                assert until(lambda: trainer.step >= 6 or self.what == "raise")
                if self.what == "raise":
                    time.sleep(30)
                elif trainer.world.rank == 1:
                    (folder / "time").write_text(str(time.time()))
                    os.kill(os.getpid(), signal.SIGKILL)
            train(file, data)

        trainer.may_go_on = may_go_on  # type: ignore[method-assign]
        checkpoint_storage.write_bytes = write_bytes
        return trainer


@pytest.mark.parametrize(("what", "said"), [("SIGKILL", "Worker 1 was killed by SIGKILL"), ("raise", "broken")])
def test_dying_rank_does_not_block_others(
    capture: Path, tmp_path: Path, what: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    config = small_config(capture, tmp_path)
    config.machine.num_devices, config.max_num_images, config.steps_per_eval_image = 2, 10**4, 0
    config.steps_per_save = 2
    config.pipeline.model.num_downscales = 0
    config.get_base_dir().mkdir(parents=True)
    with pytest.raises(WorkerFailed, match=said):
        run_workers(Config(config, what), 2)  # type: ignore[arg-type]
    assert time.time() - float((config.get_base_dir() / "time").read_text()) < 10
    assert "terminate called" not in capfd.readouterr().err
    assert steps_in(config.get_checkpoint_dir()) == [2]
