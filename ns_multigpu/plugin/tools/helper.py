"""A helper of ns-viewer, ns-eval or ns-render: it holds its part of a model, and draws what rank 0 asks for.

`python -m ns_multigpu.plugin.tools.helper DEVICE_TYPE PARENT`, started by `launch.helpers`.
"""

import ctypes
import os
import signal
import sys
import threading
from typing import Any


def end_with(parent: int) -> None:
    """From now on this process ends with its parent: the kernel sees to it, and a pipe that only the parent holds."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(0)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def obey(pipeline: Any, told: Any) -> None:
    """Does with the others what rank 0 has told: calls a method (`Team.tell`), or renders what is asked for."""
    if isinstance(told, tuple):
        name, args, kwargs = told
        getattr(pipeline, name)(*args, **kwargs)
    else:
        pipeline.renders.help(told)


def main(device_type: str) -> None:
    """Meets the others, makes the pipeline that rank 0 makes, and does what it is told until it is gone."""
    from nerfstudio.utils.rich_utils import CONSOLE

    from ns_multigpu.core.collectives import broadcast_object
    from ns_multigpu.core.world import World
    from ns_multigpu.plugin.launch.helpers import PATIENCE
    from ns_multigpu.plugin.launch.process_world import set_world

    CONSOLE.quiet = True
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a terminal's Ctrl-C is for rank 0, which ends this process
    world = World.from_env(device_type, control_timeout=PATIENCE)
    set_world(world)
    config, test_mode = broadcast_object(None, 0, world)
    pipeline = config.setup(device=str(world.device), test_mode=test_mode)
    pipeline.eval()
    while True:
        obey(pipeline, broadcast_object(None, 0, world))


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    try:
        main(sys.argv[1])
    except BaseException:
        # What is wrong here is likely wrong on rank 0, too, which can say it better: let it.
        threading.Event().wait(5.0)
        raise
