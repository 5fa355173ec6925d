"""A run that goes on from a checkpoint equals the run that was never stopped."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from nerfstudio.utils.eval_utils import eval_load_checkpoint

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint import storage as checkpoint_storage
from ns_multigpu.plugin.checkpoint.verify import check_checkpoint, checkpoints_in, step_of
from ns_multigpu.plugin.faults.errors import InputError, SaveFailed
from tests.lib.ranks import run_ranks
from tests.lib.resuming import differing, everything, in_double, part_of, start
from tests.lib.training_run import write_capture

Report = dict[str, Any]


# ---- what the ranks do; the tests look at their reports ----


def _same_size(world: World, capture: Path, out: Path) -> Report:
    """Two workers, ten steps, a save after step 4: stopped and resumed, resumed by a launcher, without a disk."""
    report: Report = {}
    whole = start(world, capture, out / "whole", 10, steps_per_save=4, keep_checkpoints=0)
    torch.rand(5 + world.rank)  # so that generators are not where a new run has them
    whole.train()
    expected, generators = everything(whole), torch.get_rng_state()
    models = whole.checkpoint_dir
    unsaved = start(world, capture, out / "unsaved", 10)
    unsaved.train()
    report["saving changes nothing"] = differing(expected, everything(unsaved))

    resumed = start(world, capture, out / "resumed", 10, load_checkpoint=models / "step-000000004.ckpt")
    at_save = everything(resumed)
    report["start"] = resumed._start_step
    report["statistics"] = float(at_save["densifier/grad2d"].sum())
    report["counts"] = (len(at_save["model/gauss_params.means"]), len(expected["model/gauss_params.means"]))
    resumed.train()
    report["resumed"] = differing(expected, everything(resumed))
    report["generators"] = torch.equal(torch.get_rng_state(), generators)
    report["files"] = sorted(step_of(p) for p in checkpoints_in(resumed.checkpoint_dir))

    # The launcher restarts the job in the same folder; the newest checkpoint is damaged.
    if world.is_main:
        shutil.copytree(out / "whole", out / "again")
        victim = out / "again" / models.relative_to(out / "whole") / "step-000000009.ckpt"
        victim.write_bytes(victim.read_bytes()[:-100])
    dist.barrier(group=world.control)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    again = start(world, capture, out / "again", 10, keep_checkpoints=0)
    del os.environ["TORCHELASTIC_RESTART_COUNT"]
    report["again from"] = again._start_step
    again.train()
    report["again"] = differing(expected, everything(again))
    report["mended"] = check_checkpoint(again.checkpoint_dir / "step-000000009.ckpt") is not None

    # Nothing can be written by rank 1.
    write_bytes = checkpoint_storage.write_bytes
    if world.rank == 1:
        checkpoint_storage.write_bytes = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    full = start(world, capture, out / "full", 10, steps_per_save=4, save_retry_seconds=0.0)
    with pytest.raises(SaveFailed, match="No space left on device"):
        full.train()
    checkpoint_storage.write_bytes = write_bytes
    report["full"] = differing(expected, everything(full))
    report["full files"] = list(full.checkpoint_dir.iterdir())
    return report


def _other_batch(capture: Path, out: Path) -> Report:
    """Alone, from the two workers' tenth image: other batches, nerfstudio's commands and its checkpoints."""
    report: Report = {}
    alone = World.single()
    models = out / "whole" / "run" / "splatfacto-batch" / "now" / "nerfstudio_models"
    path = models / "step-000000004.ckpt"
    for batch in (1, 3):
        falling = {"batch_scaling": "sqrt-to-none"}  # which the run that was saved did not do
        trainer = start(alone, capture, out / f"batch-{batch}", 20, batch, load_checkpoint=path, **falling)
        means, opacities = (trainer.optimizers.optimizers[name] for name in ("means", "opacities"))
        (table,) = means.param_groups
        moments = means.state[table["params"][0]]
        report[batch] = {
            "start": trainer._start_step,
            "rate": table["lr"],
            "rate without a schedule": opacities.param_groups[0]["lr"],
            "betas": table["betas"],
            "eps": table["eps"],
            "step": float(moments["step"]),
            "second": moments["exp_avg_sq"].clone(),
            "seen": trainer.pipeline.model.step,
            "statistics": trainer.pipeline.model.densifier_state["grad2d"].clone(),
        }
    finished = start(alone, capture, out / "finished", 5, 2, load_dir=models, load_step=4)
    finished.train()
    report["finished"] = [p.name for p in checkpoints_in(finished.checkpoint_dir)]

    # As ns-eval does it.
    pipeline = finished.pipeline
    _, step = eval_load_checkpoint(SimpleNamespace(load_dir=models, load_step=None), pipeline)  # type: ignore[arg-type]
    newest = torch.load(models / "step-000000009.ckpt")
    report["eval"] = (step, torch.equal(pipeline.model.means, newest["pipeline"]["_model.gauss_params.means"]))

    # What nerfstudio's own trainer writes: LPIPS's weights, numpy's numbers, everything in one file.
    schedulers = {name: s.state_dict() for name, s in finished.optimizers.schedulers.items()}
    schedulers["means"]["_last_lr"] = [np.float64(1e-4)]
    plain = {
        "step": 6,
        "pipeline": {**trainer.pipeline.state_dict(), "_model.lpips.net.weight": torch.ones(2)},
        "optimizers": {name: o.state_dict() for name, o in trainer.optimizers.optimizers.items()},
        "schedulers": {name: {**table, "last_epoch": 7} for name, table in schedulers.items()},
        "scalers": {},
    }
    torch.save(plain, out / "plain.ckpt")
    taken = start(alone, capture, out / "plain", 9, load_checkpoint=out / "plain.ckpt")
    table = taken.optimizers.optimizers["means"].param_groups[0]
    report["plain"] = (taken._start_step, table["lr"], differing(
        {k: v for k, v in everything(trainer).items() if k.startswith("model/")},
        {k: v for k, v in everything(taken).items() if k.startswith("model/")},
    ))  # fmt: skip
    taken.train()

    def refused(**options: Any) -> str:
        with pytest.raises(InputError) as caught:
            start(alone, capture, out / "refused", 9, **options)
        return str(caught.value)

    report["other options"] = refused(load_checkpoint=path, sh_degree=1)
    torch.save({"step": 1, "pipeline": {"_model.field.weight": torch.ones(2)}, "optimizers": {}}, out / "nerf.ckpt")
    report["other method"] = refused(load_checkpoint=out / "nerf.ckpt")
    report["no step"] = refused(load_dir=models, load_step=77)
    report["no folder"] = refused(load_dir=out / "nowhere")
    report["no file"] = refused(load_checkpoint=out / "nothing.ckpt")
    report["negative"] = refused(keep_checkpoints=-1)
    return report


def _other_sizes(world: World, capture: Path, out: Path) -> Report:
    """Batches of twelve on four, then two, then three workers, and on one that is never stopped."""
    load, previous = None, None
    counts: list[int] = []
    for size, steps in ((4, 2), (2, 4), (3, 6)):
        part = part_of(world, size)
        if part is not None:
            previous = in_double(part, capture, out / f"on-{size}", steps, 12 // size, load_dir=load)
            counts.append(previous.pipeline.model.num_points)
        load = out / f"on-{size}" / "run" / "splatfacto-batch" / "now" / "nerfstudio_models"
        dist.barrier(group=world.control)
    if world.rank > 0:
        return {}
    alone = in_double(World.single(), capture, out / "alone", 6, 12)
    assert previous is not None
    model = {k: v for k, v in everything(alone).items() if k.startswith("model/")}
    return {"sizes": differing(model, everything(previous) and {k: everything(previous)[k] for k in model}, 1e-7),
            "points": counts}  # fmt: skip


def _all(world: World, capture: Path, out: Path) -> Report:
    report: Report = {}
    two = part_of(world, 2)
    if two is not None:
        report.update(_same_size(two, capture, out / "same"))
    dist.barrier(group=world.control)
    if world.rank == 0:
        report.update(_other_batch(capture, out / "same"))
    dist.barrier(group=world.control)
    report.update(_other_sizes(world, capture, out / "sizes"))
    return report


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    out = tmp_path_factory.mktemp("resume")
    write_capture(out / "capture")
    return run_ranks(_all, 4, out / "capture", out)


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("rank", [0, 1])
def test_bit_for_bit(reports: list[Report], rank: int) -> None:
    report = reports[rank]
    assert report["saving changes nothing"] == []
    assert report["start"] == 5 and report["statistics"] > 0, "statistics were under way when it was saved"
    assert report["counts"][0] != report["counts"][1], "densification is part of it"
    assert report["resumed"] == [] and report["generators"]
    assert report["files"] == [9]


@pytest.mark.parametrize("rank", [0, 1])
def test_restarted_by_a_launcher(reports: list[Report], rank: int) -> None:
    assert reports[rank]["again from"] == 9, "the newest that is whole: 8"
    assert reports[rank]["again"] == [] and reports[rank]["mended"]


@pytest.mark.parametrize("rank", [0, 1])
def test_training_continues_without_a_disk(reports: list[Report], rank: int) -> None:
    assert reports[rank]["full"] == [] and reports[rank]["full files"] == []


def test_other_numbers_of_workers(reports: list[Report]) -> None:
    assert reports[0]["sizes"] == []
    assert len(set(reports[0]["points"])) == 3, "densification went on after each resumption"


def test_other_batches(reports: list[Report]) -> None:
    one, three = reports[0][1], reports[0][3]
    assert (one["start"], one["seen"]) == (10, 10) and (three["start"], three["seen"]) == (3, 9)
    lr, final, end = 1.6e-4, 1.6e-6, 30000
    assert one["rate"] == pytest.approx(lr * (final / lr) ** (10 / end), rel=1e-6)
    scaled = 3 ** (0.5 * (1 - 9 / 60))  # of 20 steps of 3 images
    assert three["rate"] == pytest.approx(scaled * lr * (final / lr) ** (9 / end), rel=1e-6)
    assert one["rate without a schedule"] == 0.05
    assert three["rate without a schedule"] == pytest.approx(0.05 * scaled, rel=1e-6)
    assert one["betas"] == (0.9, 0.999) and three["betas"] == pytest.approx((0.9**3, 0.999**3))
    assert three["eps"] == pytest.approx(1e-7 / 3**0.5)
    assert one["step"] == 10 and three["step"] == pytest.approx(10 / 3)
    torch.testing.assert_close(three["second"] * 3, one["second"])
    assert torch.equal(one["statistics"], three["statistics"]) and float(one["statistics"].sum()) > 0
    assert reports[0]["finished"] == ["step-000000004.ckpt"], "it has seen all its images: nothing to train"


def test_nerfstudio_reads_it(reports: list[Report]) -> None:
    assert reports[0]["eval"] == (9, True)


def test_resume_from_a_nerfstudio_checkpoint(reports: list[Report]) -> None:
    start_step, rate, differences = reports[0]["plain"]
    assert start_step == 7 and differences == []
    assert rate == pytest.approx(1.6e-4 * 0.01 ** (7 / 30000), rel=1e-6)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (
            "other options",
            "does not fit this run: its harmonics are of degree 3, here 1 (--pipeline.model.sh-degree 3)",
        ),
        ("other method", "whose model is not made of Gaussians: splatfacto-batch cannot go on from it"),
        ("no step", "has no such step; there are 4, 8, 9"),
        ("no folder", "there is no such folder"),
        ("no file", "there is no such file"),
        ("negative", "--keep-checkpoints -1"),
    ],
)
def test_refused(reports: list[Report], case: str, said: str) -> None:
    assert said in reports[0][case]
