"""The viewer's place in the training loop: what a trainer does for it when ranks move in lockstep."""

import contextlib
from typing import Any

from nerfstudio.utils.rich_utils import CONSOLE

from ns_multigpu.core.dist.collectives import broadcast_int
from ns_multigpu.plugin.faults.signals import MANY


def may_go_on(trainer: Any, step: int) -> bool:
    """Whether to take `step`: all ranks go on or none. It returns when a pause of rank 0's viewer is over, or never.

    In between it renders for the viewer. While a page is open, `Guards.granted` is short. Every rank calls it.
    """
    renders = trainer.pipeline.renders
    renders.strides.ended(step)
    try:
        if trainer.guards.has_settled(step):
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


def settle(trainer: Any, step: int) -> None:
    """While the device works on the steps before `step`: agrees with the other ranks to take it, unless one of them has
    a reason to ask again. So nobody waits for an answer between two blocks. Every rank calls it."""
    renders = trainer.pipeline.renders
    asks = trainer.stop_training or trainer.training_state != "training" or renders.waiting > 0 or _watched(trainer)
    trainer.guards.settle(step, asks=asks)


def _watched(trainer: Any) -> bool:
    """Whether a page of rank 0's viewer is open."""
    return bool(getattr(trainer.viewer_state, "render_statemachines", None))


def stay_open(trainer: Any) -> None:
    """After training: keeps rank 0's viewer open, if there is one, until Ctrl-C or SIGTERM. Every rank calls it.

    All stay, for it takes them all to render; and one that left would be taken for one that does not answer.
    """
    viewer = trainer.viewer_state
    if not broadcast_int(int(viewer is not None), 0, trainer.world):
        return
    if viewer is not None:
        with contextlib.suppress(RuntimeError):  # its connections come and go
            viewer.training_complete()
        CONSOLE.print("Use ctrl+c to quit", justify="center")
    may_go_on(trainer, trainer.step)
