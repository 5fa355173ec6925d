"""The last words of a run."""

from pathlib import Path
from typing import Any

from ns_multigpu.plugin.launch.commands import commands_afterwards
from ns_multigpu.plugin.launch.run_parts import run_parts
from ns_multigpu.plugin.render.evaluation import HeldOut
from ns_multigpu.plugin.train.terminal import duration, say_goodbye

_LOOKED_AT = 16
"""Held-out views that the end of a run is judged by, at most: all of them would take long on a large capture."""


def last_look(trainer: Any) -> HeldOut | None:
    """How good held-out views are now; None if there are none. Every rank calls it.

    Args:
        trainer: a `DistributedTrainer`, done.
    """
    trainer.guards.heart.beat("evaluation")
    with trainer.train_lock:
        found: HeldOut | None = trainer.pipeline.held_out_quality(_LOOKED_AT)
    run_parts().done("last look at held-out views")
    return found


def say_how_it_went(trainer: Any, folder: Path, held_out: HeldOut | None) -> None:
    """Says how a run went, and what can be done next.

    Args:
        trainer: a `DistributedTrainer`, done. folder: the run's, or where its last checkpoint is.
        held_out: the last look at held-out views, if there was one.
    """
    batch, steps = trainer.batch_size, trainer.step + 1
    images, taken = steps * batch, (steps - trainer._start_step) * batch
    lines = [
        ("Images", f"{images:,}" if taken == images else f"{images:,}, {taken:,} of them now"),
        ("Training", f"{duration(trainer.progress.seconds)}, {taken / trainer.progress.seconds:,.0f} images a second"),
        ("Gaussians", f"{trainer.pipeline.model.total_points:,}"),
        ("Run folder", str(folder)),
    ]
    if held_out is not None:
        lines.insert(0, ("PSNR", held_out.described()))
    psnr = trainer.progress.psnr
    if psnr.fallen:
        lines.append(("Warning", f"training's PSNR ended at {psnr.now:.1f} dB; its best was {psnr.best[0]:.1f}"))
    if trainer.config.max_num_images is not None:
        longer = ("--max-num-images", str(2 * images))
    else:
        longer = ("--max-num-iterations", str(2 * steps))
    models = folder / trainer.config.relative_model_dir
    say_goodbye(lines, commands_afterwards(str(trainer.config.method_name), folder, models, *longer))
