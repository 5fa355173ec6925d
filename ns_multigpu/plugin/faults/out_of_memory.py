"""Recovery from a step that runs out of memory before it has changed the model: cancelled on all ranks, saved, ended.

A rank that runs out in rendering or backward still takes part in the sums of gradients that the others wait for, with
arbitrary values. Then all ranks agree, over the control group, whether one ran out, before any optimizer step. If a
rank cannot take part, or has begun to change the model, its error ends the run, and the last checkpoint remains.
"""

import contextlib
import copy
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ns_multigpu.core.dist.collectives import all_gather_objects, max_int
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults import memory
from ns_multigpu.plugin.faults.signals import RanOutOfMemory


class StepCancelled(Exception):
    """Cancellation of a step on all ranks for lack of memory on some; the model is intact.

    Attributes:
        last: the last completed step.
        cause: this rank's own lack of memory; None if it was another's.
    """

    def __init__(self, last: int, cause: Exception | None) -> None:
        super().__init__(f"a step after {last} was cancelled for lack of memory")
        self.last, self.cause = last, cause


class Attempt:
    """Guard between forward and backward, which may fail, and the update, which then must not begin.

    Args:
        objective: a `SplatObjective`.
    """

    def __init__(self, objective: Any) -> None:
        self._objective = objective

    @contextlib.contextmanager
    def rendering(self, step: int) -> Iterator[None]:
        """Enclose the rendering and backward pass of `step`.

        Raises:
            StepCancelled: memory ran out here, and all ranks know it.
        """
        try:
            yield
            self._objective.guards.computed()
        except Exception as error:
            if memory.where_memory_ran_out(error) is None or not self._others_can_go_on():
                raise
            forget_frames(error)
            self._objective.pipeline.strategy.gradients.cancel(self._objective.parameters())
            self._agree(failed=True)
            raise StepCancelled(step - 1, error) from None

    def rendered(self, step: int) -> None:
        """Agree with all ranks after the exchange of gradients. Every rank whose rendering succeeded calls it.

        Raises:
            StepCancelled: memory ran out on another rank.
        """
        if self._objective.pipeline.strategy.can_cancel and self._agree(failed=False):
            raise StepCancelled(step - 1, None)

    def _agree(self, *, failed: bool) -> bool:
        return max_int(int(failed), self._objective.world) > 0

    def _others_can_go_on(self) -> bool:
        """Return whether the ranks that wait for this one can proceed to the agreement."""
        pipeline = self._objective.pipeline
        # Images are exchanged between ranks before rendering.
        rendering = pipeline.timer.part == "compute" and pipeline.strategy.can_cancel
        return self._objective.world.group is None or rendering


@contextlib.contextmanager
def saving(trainer: Any) -> Iterator[None]:
    """Enclose a run's steps: save the intact model after a cancelled step; after any other error finish a pending save.

    Raises:
        RanOutOfMemory: on every rank, with the remedies and the checkpoint to resume from.
    """
    try:
        yield
    except StepCancelled as cancelled:
        raise _exit_error(trainer, cancelled) from cancelled.cause
    except BaseException as error:
        trainer.guards.heart.beat("checkpoint")
        trainer.checkpoints.writer.close(error)
        raise


def _exit_error(trainer: Any, cancelled: StepCancelled) -> RanOutOfMemory:
    cause, last = cancelled.cause, cancelled.last
    text = ""
    if cause is not None:
        explanation = memory.explain(cause, replace(trainer._circumstances(), last_checkpoint=""))
        text = str(explanation or cause)
        forget_frames(cause)
    forget_frames(cancelled)
    trainer.objective.release()
    give_back(trainer.world)
    said = next(text for text in all_gather_objects(text, trainer.world) if text)
    path = trainer.checkpoint_dir / f"step-{last:09d}.ckpt"
    if last >= 0:
        trainer.step = last
        trainer.guards.heart.beat("checkpoint")
        trainer.checkpoints.writer.finish()
        trainer._look_for_nan(now=True)
        trainer.save_checkpoint(last)
    if last >= 0 and path.exists():
        saved = f"The step was cancelled on all ranks; the model as it was after step {last} is saved in {path}. Go on "
        saved += f"from it, with one of the above, by --load-dir {trainer.checkpoint_dir}"
    elif last < 0:
        saved = "No step had been taken: there is nothing to save."
    else:
        saved = f"The model as it was after step {last} could not be saved; earlier checkpoints are as they were."
    return RanOutOfMemory(f"{said}\n{saved}")


def give_back(world: World) -> None:
    """Return unused memory to the device."""
    if world.device.type != "cpu":
        torch.get_device_module(world.device).empty_cache()


def forget_frames(error: BaseException) -> None:
    """Release the locals of frames that ended with `error`: activations, mostly."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


def check_memory(needed: float, what: str, world: World) -> None:
    """Check that every rank's GPU has `needed` free bytes, before anything of a step has begun.

    Args:
        needed: bytes. what: their use, for the message.

    Raises:
        StepOutOfMemory: on every rank, if one has less.
    """
    free = memory.free_bytes(world.device)
    if free is None:
        return
    if max_int(int(needed > free), world):
        raise StepOutOfMemory(
            f"{needed / 2**30:.1f} GiB are needed for {what}, {free / 2**30:.1f} are free", here=needed > free
        )


class StepOutOfMemory(torch.cuda.OutOfMemoryError):
    """Lack of memory for a step that has not begun, known on all ranks.

    Attributes:
        here: True if this rank lacks memory.
    """

    def __init__(self, text: str, *, here: bool) -> None:
        super().__init__(text)
        self.here = here


@dataclass(frozen=True)
class Counts:
    """Step counts on the host: Adam's counters, rates, schedules. They can be restored after steps that were counted
    but not completed.

    Attributes:
        counters: (optimizer's name, index of the parameter) -> its counter; none before its first step.
        rates: rates of the groups, by optimizer's name. schedules: states by name.
    """

    counters: dict[tuple[str, int], float]
    rates: dict[str, list[float]]
    schedules: dict[str, dict[str, Any]]

    @classmethod
    def now(cls, optimizers: Mapping[str, torch.optim.Optimizer], schedulers: Mapping[str, Any]) -> "Counts":
        """Return the current counts."""
        counters = {
            (name, place): float(state["step"])
            for name, optimizer in optimizers.items()
            for place, state in enumerate(_states(optimizer))
            if "step" in state
        }
        rates = {name: [group["lr"] for group in o.param_groups] for name, o in optimizers.items()}
        return cls(counters, rates, {name: copy.deepcopy(s.state_dict()) for name, s in schedulers.items()})

    def restore(self, optimizers: Mapping[str, torch.optim.Optimizer], schedulers: Mapping[str, Any]) -> None:
        """Restore these counts."""
        for name, optimizer in optimizers.items():
            for place, state in enumerate(_states(optimizer)):
                if "step" in state:
                    before = self.counters.get((name, place), 0.0)
                    if torch.is_tensor(state["step"]):
                        state["step"].fill_(before)
                    else:
                        state["step"] = type(state["step"])(before)
        for name, scheduler in schedulers.items():
            scheduler.load_state_dict(self.schedules[name])
        for name, optimizer in optimizers.items():
            for group, rate in zip(optimizer.param_groups, self.rates[name], strict=True):
                group["lr"] = rate


def _states(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [optimizer.state.get(param, {}) for group in optimizer.param_groups for param in group["params"]]
