"""Viewer hooks of the training loop, for trainers whose ranks run in lockstep."""

import contextlib
from typing import Any

from nerfstudio.utils.rich_utils import CONSOLE

from ns_multigpu.core.dist.collectives import broadcast_int
from ns_multigpu.plugin.faults.signals import MANY


def may_go_on(trainer: Any, step: int) -> bool:
    """Return True on all ranks if `step` runs, or False on all. Every rank calls it.

    It renders for the viewer in between, and returns after a pause of rank 0's viewer has ended. While a page is open,
    `Guards.granted` is short.
    """
    renders = trainer.pipeline.renders
    renders.strides.ended(step)
    try:
        if trainer.guards.has_agreed(step):
            return True
        return trainer.guards.may_go_on(
            step,
            stop=lambda: trainer.stop_training,
            paused=lambda: trainer.training_state != "training",
            renders=renders,
            due=renders.strides.due,
            steps=renders.strides.steps if _watched(trainer) else MANY,
        )
    finally:
        renders.strides.begins(step)


def agree_ahead(trainer: Any, step: int) -> None:
    """Agree with the other ranks to run `step` while the device executes the steps before it. A rank with a request
    (stop, pause, waiting or open viewer) defers the decision to `may_go_on`. Every rank calls it.
    """
    renders = trainer.pipeline.renders
    asks = trainer.stop_training or trainer.training_state != "training" or renders.waiting > 0 or _watched(trainer)
    trainer.guards.agree_ahead(step, asks=asks)


def _watched(trainer: Any) -> bool:
    """Return True if a page of rank 0's viewer is open."""
    return bool(getattr(trainer.viewer_state, "render_statemachines", None))


def keep_open(trainer: Any) -> None:
    """Keep rank 0's viewer open after training, if there is one, until Ctrl-C or SIGTERM. Every rank calls it.

    All ranks must stay, since rendering takes all of them and a missing rank would count as hung.
    """
    viewer = trainer.viewer_state
    if not broadcast_int(int(viewer is not None), trainer.world):
        return
    if viewer is not None:
        with contextlib.suppress(RuntimeError):  # its connections may close at any time
            viewer.training_complete()
        CONSOLE.print("Use ctrl+c to quit", justify="center")
    may_go_on(trainer, trainer.step)
