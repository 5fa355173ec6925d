"""A trainer that trains nothing: it meets the other ranks, writes down what it saw, and misbehaves on request."""

import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.errors import InputError


class ToyTrainer:
    """Its conduct is in the environment variable TOY: nothing, raise, input, exit, kill (by rank 1) or wait (all)."""

    def __init__(self, config: Any, local_rank: int = 0, world_size: int = 1) -> None:
        self.config, self.asked = config, (local_rank, world_size)

    def setup(self) -> None:
        self.world = World.from_env(self.config.machine.device_type)

    def train(self) -> None:
        conduct, world, folder = os.environ.get("TOY", ""), self.world, Path(self.config.get_base_dir())
        total = torch.tensor([world.rank + 1.0])
        if world.group is not None:
            dist.all_reduce(total, group=world.group)
        if world.rank == 1 and conduct == "raise":
            raise KeyError("the toy is broken")
        if world.rank == 1 and conduct == "input":
            raise InputError("no such toy; choose another")
        if world.rank == 1 and conduct == "exit":
            raise SystemExit(3)
        if world.rank == 1 and conduct == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        seen = {
            "asked": self.asked,
            "place": (world.rank, world.size, world.local_rank, world.local_size),
            "sum": total.item(),
            "draw": torch.rand(1).item(),
            "threads": torch.get_num_threads(),
            "devices": self.config.machine.num_devices,
            "pid": os.getpid(),
        }
        (folder / f"rank-{world.rank}.json.part").write_text(json.dumps(seen))
        (folder / f"rank-{world.rank}.json.part").rename(folder / f"rank-{world.rank}.json")
        if conduct == "wait" and world.rank == 1:
            time.sleep(300)
        if conduct:
            dist.barrier()
        world.close()


@dataclass
class ToyMachine:
    seed: int = 42
    device_type: str = "cpu"
    num_devices: int = 1


@dataclass
class ToyConfig:
    """As much of a configuration as the launcher looks at; needs no nerfstudio, so workers start quickly."""

    folder: str
    machine: ToyMachine = field(default_factory=ToyMachine)

    def get_base_dir(self) -> Path:
        return Path(self.folder)

    def setup(self, *, local_rank: int, world_size: int) -> ToyTrainer:
        return ToyTrainer(self, local_rank, world_size)


def reports(folder: Path) -> list[dict[str, Any]]:
    """Return the reports that the ranks wrote, by rank."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
