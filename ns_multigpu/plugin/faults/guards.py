"""What guards a rank while it trains: against signals, stalls, NaN and infinity, and memory that runs out."""

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
"""Seconds between two looks at whether a pause is over."""


class Renders(Protocol):
    """Renders for a viewer what takes all ranks; see `RenderService`."""

    @property
    def waiting(self) -> int: ...

    def wait_until_wanted(self, seconds: float) -> None: ...

    def serve(self) -> None: ...


class Guards:
    """The guards of one rank, made from the trainer's options.

    Args:
        config: a `RunConfig`.
        world: the ranks.
        view_name: what to call a training view.
        last_checkpoint: the path of the newest one that the run has written, "" if there is none.
    """

    def __init__(
        self, config: Any, world: World, view_name: Callable[[int], str], last_checkpoint: Callable[[], str]
    ) -> None:
        self._config, self._world, self._last_checkpoint = config, world, last_checkpoint
        self.heart = Heartbeat()
        self._settled: int | None = None
        # Alone, a process waits for nobody: nothing can keep it from seeing a signal.
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
        """Watches over what is enclosed: the steps, and what follows them."""
        store = heartbeat_store(self._world)
        warn, abort = self._config.stall_seconds, self._config.stall_abort_seconds
        world = self._world
        watchdog = Watchdog(self.heart, world.rank, world.size, store, warn, abort, name=world.rank_name)
        with self.explained(circumstances), self.signals, watchdog:
            yield

    @contextlib.contextmanager
    def explained(self, circumstances: Callable[[], memory.Circumstances]) -> Iterator[None]:
        """Says of a lack of memory in what is enclosed what to change.

        Raises:
            RanOutOfMemory: instead of the allocator's error.
        """
        try:
            yield
        except Exception as error:
            told = memory.explain(error, circumstances()) if memory.where_memory_ran_out(error) else None
            if told is None:
                raise
            raise told from error

    def computed(self) -> None:
        """This rank has given its device all of the step that waits for no other."""
        if self._world.device.type == "cuda" and self._world.group is not None:
            self.heart.mark_device()

    def circumstances(self, trainer: Any) -> memory.Circumstances:
        """What `trainer` is doing, as far as it has got."""
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
        """Steps that all ranks may take before they ask again."""
        return self.signals.granted

    def may_go_on(
        self, step: int, *, stop: Callable[[], bool], paused: Callable[[], bool], renders: Renders | None = None,
        due: bool = True, steps: int = MANY,
    ) -> bool:  # fmt: skip
        """Whether all ranks take another step; every rank calls it and gets the same. It returns when a pause is over.

        Args:
            step: the step.
            stop, paused: what this rank's viewer says; rank 0 has it.
            renders: renders for rank 0's viewer: before a step an image for each page that waits then, and as many as
                it wants in a pause.
            due: on rank 0, whether to render before this step, if a page waits.
            steps: on rank 0, how many steps to take before all ask again.
        """
        served, pages = 0, renders.waiting if renders is not None and due else 0
        while True:
            self.heart.beat("decide", step)
            wait = self._world.is_main and paused()
            render = renders is not None and self._world.is_main and renders.waiting > 0 and (wait or served < pages)
            verdict = self.signals.verdict(self._world, stop=stop(), wait=wait, render=render, steps=steps)
            if verdict == RENDER and renders is not None:
                self.heart.beat("render")
                renders.serve()
                served += 1
            elif verdict == WAIT:
                if renders is None:
                    time.sleep(_PAUSE)
                elif self._world.is_main:  # the others wait for it
                    renders.wait_until_wanted(_PAUSE)
            else:
                return verdict != STOP

    def settle(self, step: int, *, asks: bool) -> None:
        """Settles ahead of time that all ranks take `step`, where none of them `asks` to be asked when it comes. Every
        rank calls it, at any time before."""
        if self._world.group is None:  # alone, nobody waits for an answer
            return
        self.heart.beat("decide", step)
        verdict = self.signals.verdict(self._world, wait=asks)
        self._settled = step if verdict == GO_ON else None

    def has_settled(self, step: int) -> bool:
        """Whether `step` has been settled; else `may_go_on` is to be called. The same on every rank."""
        return self._settled == step

    def interrupted(self, step: int | None, saved: Path | None, folder: Path, command: str) -> Interrupted:
        """What to raise when all ranks have stopped for a signal; says so, on rank 0.

        Args:
            step: the last step taken, if any.
            saved: the checkpoint that was written for the occasion.
            folder: where checkpoints lie.
            command: goes on from the newest of them.
        """
        signum = self.signals.agreed
        barrier(self._world)  # no rank leaves, and takes its connections with it, while another still needs them
        after = f"after step {step}" if step is not None else "before the first step"
        if saved is not None:
            text = f"Saved {saved}. To go on from there:\n\n  {command}\n"
        elif any(folder.glob("*.ckpt")):
            text = f"Nothing new was saved. To go on from the last checkpoint:\n\n  {command}\n"
        else:
            text = "Nothing was saved."
        CONSOLE.print(escape(f"Stopped by {signal_name(signum)} {after}. {text}"), soft_wrap=True)
        return Interrupted(signum, saved)
