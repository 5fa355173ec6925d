"""Guards of a rank in training against signals, stalls, NaN and infinity, and lack of memory."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from nerfstudio.utils.rich_utils import CONSOLE
from rich.markup import escape

from ns_multigpu.core.dist.collectives import barrier
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults import memory
from ns_multigpu.plugin.faults.numerics import NumericGuard
from ns_multigpu.plugin.faults.signals import GO_ON, MANY, RENDER, STOP, WAIT, Interrupted, StopSignals, signal_name
from ns_multigpu.plugin.faults.watchdog import Heartbeat, Watchdog, heartbeat_store

_PAUSE = 0.05
"""Seconds between two checks whether a pause is over."""


class Renders(Protocol):
    """Renderer for a viewer that needs all ranks; see `RenderService`."""

    @property
    def waiting(self) -> int: ...

    def wait_until_wanted(self, seconds: float) -> None: ...

    def serve(self) -> None: ...


class Guards:
    """Guards of one rank, made from the trainer's options.

    Args:
        config: a `RunConfig`.
        world: the ranks.
        view_name: returns the name of a training view.
        last_checkpoint: returns the path of the newest checkpoint of the run, "" if there is none.
    """

    def __init__(
        self, config: Any, world: World, view_name: Callable[[int], str], last_checkpoint: Callable[[], str]
    ) -> None:
        self._config, self._world, self._last_checkpoint = config, world, last_checkpoint
        self.heart = Heartbeat()
        self._agreed_step: int | None = None
        # A single process has no collectives that could keep it from handling a signal.
        self.signals = StopSignals(self.heart if world.group is not None else None)
        self.numbers = NumericGuard(
            world,
            config.steps_per_numeric_check,
            config.on_nonfinite,
            view_name=view_name,
            say=lambda text: CONSOLE.print(f"[bold yellow]{escape(text)}[/bold yellow]"),
        )

    @contextlib.contextmanager
    def on_duty(self, circumstances: Callable[[], memory.Circumstances]) -> Iterator[None]:
        """Guard the enclosed steps and the actions that follow them."""
        store = heartbeat_store(self._world)
        warn, abort = self._config.stall_seconds, self._config.stall_abort_seconds
        world = self._world
        watchdog = Watchdog(self.heart, world.rank, world.size, store, warn, abort, name=world.rank_name)
        with self.explained(circumstances), self.signals, watchdog:
            yield

    @contextlib.contextmanager
    def explained(self, circumstances: Callable[[], memory.Circumstances]) -> Iterator[None]:
        """Replace an enclosed lack of memory by an error with remedies.

        Raises:
            RanOutOfMemory: instead of the allocator's error.
        """
        try:
            yield
        except Exception as error:
            explanation = memory.explain(error, circumstances()) if memory.where_memory_ran_out(error) else None
            if explanation is None:
                raise
            raise explanation from error

    def computed(self) -> None:
        """Record that this rank has launched the part of the step that waits for no other rank."""
        if self._world.device.type == "cuda" and self._world.group is not None:
            self.heart.mark_device()

    def circumstances(self, trainer: Any) -> memory.Circumstances:
        """Return the present circumstances of `trainer`, as far as it is set up."""
        pipeline = getattr(trainer, "pipeline", None)
        return memory.Circumstances(
            rank=self._world.rank,
            step=self.heart.step if self.heart.step >= 0 else None,
            device=self._world.device,
            facts=[] if pipeline is None else pipeline.memory_facts,
            gpu_remedies=self._config.pipeline.memory_remedies(on_gpu=True),
            host_remedies=self._config.pipeline.memory_remedies(on_gpu=False),
            last_checkpoint=self._last_checkpoint(),
        )

    @property
    def granted(self) -> int:
        """Number of steps that all ranks may run before the next agreement."""
        return self.signals.granted

    def may_go_on(
        self, step: int, *, stop: Callable[[], bool], paused: Callable[[], bool], renders: Renders | None = None,
        due: bool = True, steps: int = MANY,
    ) -> bool:  # fmt: skip
        """Return whether all ranks run another step, the same on each; wait during a pause. Every rank calls it.

        Args:
            step: the step.
            stop, paused: the state of this rank's viewer; rank 0 has one.
            renders: renders for rank 0's viewer: before a step one image for each waiting page, in a pause any number.
            due: on rank 0, whether to render before this step, if a page waits.
            steps: on rank 0, the number of steps until the next agreement.
        """
        num_rendered, pages = 0, renders.waiting if renders is not None and due else 0
        while True:
            self.heart.beat("decide", step)
            wait = self._world.is_main and paused()
            render = (
                renders is not None and self._world.is_main and renders.waiting > 0 and (wait or num_rendered < pages)
            )
            verdict = self.signals.verdict(self._world, stop=stop(), wait=wait, render=render, steps=steps)
            if verdict == RENDER and renders is not None:
                self.heart.beat("render")
                renders.serve()
                num_rendered += 1
            elif verdict == WAIT:
                if renders is None:
                    time.sleep(_PAUSE)
                elif self._world.is_main:  # the others wait for it
                    renders.wait_until_wanted(_PAUSE)
            else:
                return verdict != STOP

    def agree_ahead(self, step: int, *, asks: bool) -> None:
        """Agree in advance that all ranks run `step`, unless one of them `asks` for an agreement at the step itself.

        Every rank calls it, at any time before.
        """
        if self._world.group is None:  # a single process needs no agreement
            return
        self.heart.beat("decide", step)
        verdict = self.signals.verdict(self._world, wait=asks)
        self._agreed_step = step if verdict == GO_ON else None

    def has_agreed(self, step: int) -> bool:
        """Return whether `step` has been agreed on, the same on every rank; else call `may_go_on`."""
        return self._agreed_step == step

    def interrupted(self, step: int | None, saved: Path | None, folder: Path, command: str) -> Interrupted:
        """Return the exception to raise when all ranks have stopped for a signal; print a message on rank 0.

        Args:
            step: the last completed step, if any.
            saved: the checkpoint written now, if any.
            folder: folder of checkpoints.
            command: resumes from the newest of them.
        """
        signum = self.signals.agreed
        barrier(self._world)  # no rank may close its connections while another needs them
        after = f"after step {step}" if step is not None else "before the first step"
        if saved is not None:
            text = f"Saved {saved}. To go on from there:\n\n  {command}\n"
        elif any(folder.glob("*.ckpt")):
            text = f"Nothing new was saved. To go on from the last checkpoint:\n\n  {command}\n"
        else:
            text = "Nothing was saved."
        CONSOLE.print(escape(f"Stopped by {signal_name(signum)} {after}. {text}"), soft_wrap=True)
        return Interrupted(signum, saved)
