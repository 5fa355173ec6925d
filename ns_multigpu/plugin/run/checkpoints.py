"""Checkpoints of a run: saving, and the choice of the one to resume from."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nerfstudio.utils.rich_utils import CONSOLE
from rich.text import Text

import ns_multigpu
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint.atomic_save import open_checkpoint, to_go_on_from
from ns_multigpu.plugin.checkpoint.background import CheckpointWriter, Content
from ns_multigpu.plugin.checkpoint.training_state import put_generators, take_generators
from ns_multigpu.plugin.checkpoint.verify import step_of
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.agreement import options_of
from ns_multigpu.plugin.launch.run_folder import restarts
from ns_multigpu.plugin.run.objective import Objective

if TYPE_CHECKING:
    from ns_multigpu.plugin.run.config import RunConfig


class RunCheckpoints:
    """Writer and loader of a run's checkpoints. Every rank calls each method.

    Args:
        config: the run's.
        models: its `nerfstudio_models` folder.
        world: the ranks.

    Attributes:
        writer: writes checkpoints.
        objective: saved and restored; set once it exists.
    """

    objective: Objective

    def __init__(self, config: "RunConfig", models: Path, world: World) -> None:
        self._config, self._models, self._world = config, models, world
        self._thread = threading.get_ident()
        if config.keep_checkpoints < 0:
            raise InputError(f"--keep-checkpoints {config.keep_checkpoints}: give how many, or 0 for all.")
        self.writer = CheckpointWriter(
            models, config.checkpoints_to_keep(), world, lambda line: _print(line, "bold yellow")
        )

    # ---- saving ----

    def save(self, step: int, *, background: bool = False) -> bool:
        """Write a checkpoint after `step`, unless there is one, and remove the oldest.

        Args:
            background: return when the state has been copied, if there is memory for that: `checkpoint.background`.

        Returns:
            True if the checkpoint exists or is being written. If the disk fails, earlier ones are unchanged and a
            message is printed.
        """
        if threading.get_ident() != self._thread:  # nerfstudio's legacy viewer has a save button, on rank 0 alone
            _print(
                f"Checkpoints are written by all workers, every {self._config.steps_per_save} steps: not on request."
            )
            return False
        return step >= 0 and self.writer.save(step, lambda: self._content(step), background=background)

    def begin(self, step: int) -> None:
        """Begin to write a checkpoint after `step`, unless there is one. The training state must not change until
        `write` returns."""
        self.writer.finish()
        if step != self.writer.saved_step:
            self.writer.begin(step, self._content(step))

    def write(self, step: int, folder: Path | None = None) -> str:
        """Write a checkpoint after `step`, unless there is one, and wait for it.

        Args:
            folder: folder to use instead of the run's.

        Returns:
            "" on success; otherwise the disk's error.
        """
        return self.writer.write(step, lambda: self._content(step), folder)

    def _content(self, step: int) -> Content:
        """Return the objective's content with what is saved of every run."""
        content = self.objective.content(step)
        values = {
            "method": self._config.method_name,
            "version": ns_multigpu.__version__,
            "ranks": self._world.size,
            "options": options_of(self._config),
            **content.values,
        }
        return Content(content.pipeline, {**content.tensors, **take_generators(self._world)}, values)

    # ---- going on ----

    def find(self) -> Path | None:
        """Return the .ckpt to resume from, by the flags or a restart by the launcher; None for a new run.

        Raises:
            InputError: a flag names none.
        """
        return to_go_on_from(self._config, self._models, restarts(), self._world, _print)

    def resume(self, path: Path | None) -> int:
        """Resume from a checkpoint, if there is one.

        Returns:
            the first step to run: 0 for a new run.

        Raises:
            InputError: it is damaged, another method's, or does not fit this run.
        """
        if path is None:
            return 0
        opened = open_checkpoint(path, self._world)
        resumed = self.objective.resume(opened)
        if opened.tensors is not None:
            put_generators(opened.tensors.names, opened.tensors.read, self._world)
        for line in [*resumed.lines, *changed_options(opened.values.get("options", {}), options_of(self._config))]:
            _print(line)
        if resumed.whole and path.parent.resolve() == self._models.resolve():
            self.writer.saved_step = step_of(path)
        return resumed.steps


def changed_options(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a heading and a line for each option that differs from the checkpoint's run; none without differences.

    Args:
        before, now: results of `options_of`; empty for older checkpoints.
    """
    changed = [name for name in now if name in before and before[name] != now[name]]
    if not changed:
        return []
    return ["Options that differ from the checkpoint's:", *(f"  {n} {now[n]} (was {before[n]})" for n in changed)]


def _print(line: str, style: str = "") -> None:
    CONSOLE.print(Text(line, style), soft_wrap=True)
