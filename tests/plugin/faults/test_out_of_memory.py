"""Memory that runs out in a step: all ranks give it up, the step before is saved, the run ends and says what helps."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ns_multigpu.plugin.faults.out_of_memory as out_of_memory
import ns_multigpu.plugin.model.splat_model as splat_model
import ns_multigpu.plugin.run.trainer as trainer_module
from ns_multigpu.core.dist.buckets import GradientBuckets
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.patch_losses import PatchLosses
from ns_multigpu.plugin.blocks import point_storage
from ns_multigpu.plugin.checkpoint.verify import read_checkpoint_file
from ns_multigpu.plugin.faults import memory
from ns_multigpu.plugin.faults.errors import WorkerFailed
from ns_multigpu.plugin.faults.out_of_memory import Counts, StepOutOfMemory
from ns_multigpu.plugin.faults.signals import RanOutOfMemory
from tests.lib.ranks import run_ranks
from tests.lib.resuming import differing, everything, start

STEP = 4
"""The step in which memory runs out."""


def no_memory(*_: Any, **__: Any) -> Any:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")


class _Fails(torch.autograd.Function):
    """Runs out of memory on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return no_memory()


def _run_out(
    world: World, capture: Path, run: Path, where: str, options: dict[str, Any]
) -> tuple[str, Path, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Trains; in STEP the last rank's memory runs out. Returns what was said, where checkpoints are, what the model and
    optimizers were after the step before, and what they are at the end."""
    trainer = start(world, capture, run, 12, **options)
    before: dict[str, torch.Tensor] = {}
    unlucky = world.rank == world.size - 1
    usual_loss, usual_look = splat_model.photometric_loss, trainer.may_go_on
    step_now = 0

    def may_go_on(step: int) -> bool:
        nonlocal step_now
        step_now = step
        if step == STEP:
            before.update({name: value.clone() for name, value in everything(trainer).items()})
        return usual_look(step)

    def loss(*args: Any) -> torch.Tensor:
        value = usual_loss(*args)
        if not unlucky or step_now != STEP:
            return value
        return no_memory() if where == "forward" else _Fails.apply(value) if where == "backward" else value  # type: ignore

    def update(*args: Any, **kwargs: Any) -> Any:
        return no_memory() if unlucky and step_now == STEP else usual_update(*args, **kwargs)

    trainer.may_go_on = may_go_on  # type: ignore[method-assign]
    usual_update = trainer.optimizers.optimizer_step_all
    said = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splat_model, "photometric_loss", loss)
        if where == "update":
            patch.setattr(trainer.optimizers, "optimizer_step_all", update)
        try:
            trainer.train()
        except RanOutOfMemory as error:
            said = str(error)
    return said, trainer.checkpoint_dir, before, everything(trainer)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("size", [1, 2])
def test_the_step_before_is_saved(capture: Path, tmp_path: Path, where: str, size: int) -> None:
    results = run_ranks(_run_out, size, capture, tmp_path, where, {})
    said, folder, _, _ = results[0]
    assert all(result[0] == said for result in results), "all ranks say the same"
    assert f"Rank {size - 1} ran out of memory" in said and f"in step {STEP}" in said
    assert "--downscale-factor 2" in said and f"--load-dir {folder}" in said
    assert [path.name for path in folder.glob("*.ckpt")] == [f"step-{STEP - 1:09d}.ckpt"]
    for _, _, before, after in results:
        assert differing(before, after) == [], "nothing of the step is left"
    saved = read_checkpoint_file(folder / f"step-{STEP - 1:09d}.ckpt")["pipeline"]
    for name, value in results[0][2].items():
        if name.startswith("model/gauss_params"):
            assert torch.equal(saved[name.replace("model/", "_model.")], value)


def test_out_of_memory_checkpoint_can_be_resumed(capture: Path, tmp_path: Path) -> None:
    """On one rank, for it is the same bits as a run that did not run out."""
    _, folder, _, _ = _run_out(World.single(), capture, tmp_path / "out", "forward", {})
    undisturbed = start(World.single(), capture, tmp_path / "undisturbed", 12)
    undisturbed.train()
    resumed = start(World.single(), capture, tmp_path / "resumed", 12, load_dir=folder)
    assert resumed._start_step == STEP
    resumed.train()
    assert differing(everything(undisturbed), everything(resumed)) == []


def test_in_the_update_the_last_checkpoint_is_what_is_kept(capture: Path, tmp_path: Path) -> None:
    said, folder, _, _ = _run_out(World.single(), capture, tmp_path, "update", {"steps_per_save": 2})
    assert "ran out of memory" in said and "--downscale-factor 2" in said
    assert f"The last checkpoint is kept: {folder / 'step-000000002.ckpt'}" in said
    assert [path.name for path in folder.glob("*.ckpt")] == ["step-000000002.ckpt"]


def _block_runs_out(world: World, capture: Path, run: Path, how: str) -> tuple[str, Path, int, dict[str, Any]]:
    """Fused steps; memory runs out in the block that begins with step 4: before it, or in its third step."""
    options = {"fused_steps": "always", "background_color": "black", "steps_per_checksum": 4, "exposure": "gain"}
    trainer = start(world, capture, run, 12, **options)
    begun, usual = 0, PatchLosses.add

    def free(device: torch.device) -> int:
        """Of the last rank's memory nothing is left once the first block is over."""
        short = world.rank == world.size - 1 and trainer.steps_taken > 0
        return 0 if short and how == "room" else 1 << 40

    def losses(self: PatchLosses, *args: Any) -> Any:
        nonlocal begun
        begun += 1
        if how == "step" and begun == 9:  # the second of a block
            no_memory()
        return usual(self, *args)

    said = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(out_of_memory.memory, "free_bytes", free)
        patch.setattr(PatchLosses, "add", losses)
        patch.setattr(point_storage, "MOST_SPARED", 0)  # as with a large model, each refinement checks free memory
        try:
            trainer.train()
        except RanOutOfMemory as error:
            said = str(error)
    found = everything(trainer)
    found["rate"] = {name: scheduler.last_epoch for name, scheduler in trainer.optimizers.schedulers.items()}
    return said, trainer.checkpoint_dir, trainer.step, found


@pytest.mark.parametrize(("how", "size"), [("room", 1), ("room", 2), ("step", 1)])
def test_block_reverts_to_its_last_complete_step(capture: Path, tmp_path: Path, how: str, size: int) -> None:
    results = run_ranks(_block_runs_out, size, capture, tmp_path / "out", how)
    said, folder, step, found = results[0]
    assert all(result[0] == said for result in results) and "ran out of memory" in said
    if how == "room":
        assert f"Rank {size - 1} ran out" in said
    assert (folder / f"step-{step:09d}.ckpt").exists() and f"after step {step}" in said
    rates, counters = found.pop("rate"), {n: v for n, v in found.items() if n.endswith("/step")}
    assert set(rates.values()) == {step + 1} and counters
    assert all(float(value) == step + 1 for value in counters.values())
    # The same run, ended there.
    options = {"fused_steps": "always", "background_color": "black", "steps_per_checksum": 4, "exposure": "gain"}
    again = run_ranks(_trained_parameters, size, capture, tmp_path / "again", step + 1, options)
    assert differing(again[0], found, 1e-6) == []


def _trained_parameters(
    world: World, capture: Path, run: Path, steps: int, options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    trainer = start(world, capture, run, steps, **options)
    trainer.train()
    return everything(trainer)


def test_memory_is_checked_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda _: 10)
    out_of_memory.check_memory(10, "x", World.single())
    with pytest.raises(StepOutOfMemory, match="needed for x") as caught:
        out_of_memory.check_memory(11, "x", World.single())
    assert caught.value.here and memory.where_memory_ran_out(caught.value) == "device"
    monkeypatch.setattr(memory, "free_bytes", lambda _: None)
    out_of_memory.check_memory(1 << 60, "x", World.single())


def test_counts_can_be_reverted() -> None:
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    adam = {"a": torch.optim.Adam([params[0]], lr=0.1), "b": torch.optim.Adam([params[1]], lr=0.2)}
    schedules = {"a": torch.optim.lr_scheduler.ExponentialLR(adam["a"], 0.5)}

    def step(*names: str) -> None:
        for name in names:
            adam[name].param_groups[0]["params"][0].grad = torch.ones(3 if name == "a" else 2)
            adam[name].step()
        schedules["a"].step()

    step("a")
    counts = Counts.now(adam, schedules)
    for _ in range(3):
        step("a", "b")
    counts.restore(adam, schedules)
    assert float(adam["a"].state[params[0]]["step"]) == 1 and float(adam["b"].state[params[1]]["step"]) == 0
    assert adam["a"].param_groups[0]["lr"] == 0.05 and schedules["a"].last_epoch == 1
    step("a")
    assert adam["a"].param_groups[0]["lr"] == 0.025


def _sums(world: World) -> list[float]:
    """Rank 1 fails at another place each time; rank 0 completes its collectives."""
    buckets, found = GradientBuckets(world, bucket_bytes=8), []
    for stage in range(3):
        params = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
        if world.rank == 0 or stage > 0:
            buckets.watch(params)
        if world.rank == 0 or stage > 1:
            sum(p.sum() for p in params[: 3 - world.rank]).backward()  # type: ignore[union-attr]
        if world.rank == 0:
            buckets.finish()
        else:
            buckets.finish_unready(params)
        found.append(sum(float(p.grad.sum()) for p in params if p.grad is not None))
    return found


def test_failing_rank_does_not_block_others() -> None:
    assert run_ranks(_sums, 2)[0] == [12.0, 12.0, 20.0]


class _UnluckyTrainer(trainer_module.DistributedTrainer):
    """Of which rank 1 has no memory in its third step."""

    def setup(self, test_mode: Any = "val") -> None:
        super().setup(test_mode)
        usual = splat_model.photometric_loss

        def loss(*args: Any) -> torch.Tensor:
            return no_memory() if self.world.rank == 1 and self.step == 2 else usual(*args)

        splat_model.photometric_loss = loss


@pytest.mark.slow
def test_workers_end_with_the_remedy(capture: Path, tmp_path: Path) -> None:
    from ns_multigpu.plugin.launch.launcher import run_workers
    from tests.lib.training_run import small_config

    config = small_config(capture, tmp_path)
    config._target = _UnluckyTrainer
    config.machine.num_devices, config.max_num_images, config.steps_per_eval_image = 2, 40, 0
    config.pipeline.model.num_downscales = 0
    config.get_base_dir().mkdir(parents=True)
    with pytest.raises(WorkerFailed, match="Rank 1 ran out of memory") as failed:  # ns-train exits with 1 then
        run_workers(config, 2)
    assert "--downscale-factor 2" in str(failed.value) and "after step 1 is saved" in str(failed.value)
    assert (config.get_checkpoint_dir() / "step-000000001.ckpt").exists()
