"""Helper processes of one that nerfstudio knows as the only one: ns-viewer, ns-eval and ns-render on several devices.

The process that the user started is rank 0. It starts the others and ends them with itself. If one of them dies, rank 0
says so and ends, for it might wait for the dead one for ever.
"""

import atexit
import os
import signal
import sys
import threading
import warnings
from datetime import timedelta
from typing import Any, Literal

from nerfstudio.utils.rich_utils import CONSOLE
from rich.text import Text

from ns_multigpu.core.dist.collectives import broadcast_object
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.launch.process_world import set_world
from ns_multigpu.plugin.launch.processes import RankFailed, RankProcesses, environment, how_ended, preload

_PATIENCE = timedelta(days=30)
"""Rank 0 may think for so long between two things that it asks for. A helper that dies is noticed at once."""
_END_TIMEOUT_S = 3.0
"""Seconds that helpers have to end by themselves."""


class Helpers:
    """The helpers of this process, and the world of all of them.

    Args:
        count: how many. device_type: what each computes on; helper k on the k-th GPU that is visible.

    Attributes:
        world: of this process, rank 0, and its helpers.
    """

    def __init__(self, count: int, device_type: Literal["cpu", "cuda"]) -> None:
        self._count, self._ending = count, False
        preload(["ns_multigpu.plugin.run.config"])
        self._ranks = RankProcesses(help_rank_0, (device_type,), count + 1, first=1)
        atexit.register(self.end)
        threading.Thread(target=self._watch, name="helpers", daemon=True).start()
        with environment(self._ranks.place(0)):
            self.world = World.from_env(device_type, control_timeout=_PATIENCE)

    @property
    def pids(self) -> list[int]:
        """Processes of the helpers."""
        return self._ranks.pids

    def end(self) -> None:
        """End the helpers; do nothing the second time."""
        if not self._ending:
            self._ending = True
            self._ranks.end(_END_TIMEOUT_S)

    def _watch(self) -> None:
        try:
            self._ranks.wait()
        except RankFailed as error:
            if self._ending:
                return
            self._ending = True
            hint = " The machine may have run out of memory (`dmesg` says so)." if error.code == -signal.SIGKILL else ""
            text = f"Helper {error.rank} of {self._count} {how_ended(error.code)}; this process ends, too.{hint}"
            CONSOLE.quiet = False
            if error.report:
                print(error.report.rstrip(), file=sys.stderr)
            CONSOLE.print(Text(text, "bold red"), soft_wrap=True)
            sys.stdout.flush()
            os._exit(1)  # other threads may wait for the dead one, and would not see an exception


def obey(pipeline: Any, command: Any) -> None:
    """Execute a command published by rank 0, with all helpers: call a method (`Team.call`), or render a request."""
    if isinstance(command, tuple):
        name, args, kwargs = command
        getattr(pipeline, name)(*args, **kwargs)
    else:
        pipeline.renders.help(command)


def help_rank_0(device_type: str) -> None:
    """Join the world, make the pipeline that rank 0 makes, and execute its commands until it ends; in a helper."""
    CONSOLE.quiet = True
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a terminal's Ctrl-C is for rank 0, which ends this process
    try:
        world = World.from_env(device_type, control_timeout=_PATIENCE)
        set_world(world)
        config, test_mode = broadcast_object(None, 0, world)
        pipeline = config.setup(device=str(world.device), test_mode=test_mode)
        pipeline.eval()
        while True:
            obey(pipeline, broadcast_object(None, 0, world))
    except BaseException:
        # What is wrong here is likely wrong on rank 0, too, which can say it better: let it.
        threading.Event().wait(5.0)
        raise
