"""How a trainer's process joins the others: the world, and what all must have in common before anything is loaded."""

import os
from typing import Any

from nerfstudio.utils.rich_utils import CONSOLE
from rich.text import Text

from ns_multigpu.core.world import World
from ns_multigpu.plugin.launch.agreement import check_same_start
from ns_multigpu.plugin.launch.machines import (
    at_another_machine,
    check_shared_folder,
    device_kind,
    different_devices,
    machines_named,
    restarts_in_vain,
)
from ns_multigpu.plugin.launch.process_world import set_world
from ns_multigpu.plugin.launch.quick_imports import load_beside
from ns_multigpu.plugin.launch.ranks import rendezvous_explained
from ns_multigpu.plugin.launch.run_parts import run_parts


def enter_world(config: Any) -> World:
    """The world that this process's launcher describes, which is this process's from now on. Every rank calls it.

    Says which ranks are on which machine, and warns of what is unlike.

    Args:
        config: a `DistributedTrainerConfig`.

    Raises:
        InputError: on every rank: the ranks were not started alike, or their machines do not share the run folder; or
            they cannot meet.
    """
    load_beside()
    with rendezvous_explained():
        world = World.from_env(config.machine.device_type)
    check_same_start(config, world)
    set_world(world)
    check_shared_folder(config.get_base_dir(), world)
    unlike = different_devices(device_kind(world.device), world)
    for line, style in ((machines_named(world), ""), (unlike, "yellow"), (restarts_in_vain(os.environ), "yellow")):
        if line:
            CONSOLE.print(Text(line, style), soft_wrap=True)
    if line := at_another_machine(world):
        print(line, flush=True)  # nerfstudio's console is rank 0's
    run_parts().done("device and rendezvous")
    return world
