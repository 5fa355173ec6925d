"""A trainer with all guards and next to no model, so that faults can be tried out in seconds.

The model is one vector, the gradient a keyed draw summed over ranks, so its end depends on every step of every rank.
"""

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ns_multigpu.core.dist.collectives import barrier, sum_in_place
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.random import keyed_generator
from ns_multigpu.plugin.faults import memory
from ns_multigpu.plugin.faults.guards import Guards
from tests.lib.toy import ToyMachine


@dataclass
class ToyPipeline:
    views_per_rank: int = 2


@dataclass
class GuardedConfig:
    """The options that guards read, and what the toy does.

    Attributes:
        faults: (rank, step, what) of each thing to happen in the first attempt; see `GuardedTrainer._misbehave`.
        pace: seconds a step.
    """

    folder: str
    steps: int = 40
    pace: float = 0.0
    faults: tuple[tuple[int, int, str], ...] = ()
    machine: ToyMachine = field(default_factory=ToyMachine)
    pipeline: ToyPipeline = field(default_factory=ToyPipeline)
    max_restarts: int = 0
    save_on_interrupt: bool = True
    stall_seconds: float = 0.0
    stall_abort_seconds: float = 0.0
    steps_per_numeric_check: int = 10
    on_nonfinite: Any = "stop"
    every_attempt: bool = False

    def get_base_dir(self) -> Path:
        return Path(self.folder)

    def setup(self, *, local_rank: int = 0, world_size: int = 1) -> "GuardedTrainer":
        return GuardedTrainer(self)


class GuardedTrainer:
    def __init__(self, config: GuardedConfig) -> None:
        self.config = config
        self.folder = Path(config.folder)
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def setup(self) -> None:
        self.world = World.from_env("cpu")
        self.guards = Guards(self.config, self.world, lambda view: f"view {view} (frame_{view}.png)", lambda: "")
        self.param = torch.nn.Parameter(torch.zeros(8))
        self.adam = torch.optim.Adam([self.param], lr=0.1)
        self.start = 0
        if self.attempt > 0 and self.file.exists():
            saved = torch.load(self.file)
            self.param.data.copy_(saved["param"])
            self.adam.load_state_dict(saved["adam"])
            self.start = saved["step"] + 1
        self.note(f"attempt {self.attempt} from step {self.start}")
        (self.folder / f"pid-{self.world.rank}").write_text(str(os.getpid()))

    @property
    def file(self) -> Path:
        return self.folder / "toy.ckpt"

    def note(self, text: str) -> None:
        if self.world.is_main:
            with (self.folder / "notes").open("a") as file:
                file.write(text + "\n")

    def train(self) -> None:
        with self.guards.on_duty(self.circumstances):
            last = None
            for step in range(self.start, self.config.steps):
                if not self.guards.may_go_on(step, stop=lambda: False, paused=self.paused):
                    break
                last = step
                self.one_step(step)
            if self.guards.signals.agreed:
                saved = None
                if last is not None and self.config.save_on_interrupt:
                    self.save(last)
                    saved = self.file
                raise self.guards.interrupted(last, saved, self.folder, f"go on with {self.folder}")
            self.save(self.config.steps - 1)
        barrier(self.world)
        self.world.close()

    def paused(self) -> bool:
        return (self.folder / "pause").exists()

    def one_step(self, step: int) -> None:
        self.guards.heart.beat("compute")
        wrong = self.misbehave(step)
        draw = torch.randn(8, generator=keyed_generator(7, "toy", step, self.world.rank))
        self.param.grad = draw * (float("nan") if wrong == "nan" else 1.0)
        self.guards.heart.beat("exchange")
        sum_in_place(self.param.grad, self.world)
        views = [2 * self.world.rank, 2 * self.world.rank + 1]
        losses = {view: torch.tensor(1.0) for view in views}
        if wrong == "nan":
            losses[views[1]] = torch.tensor(float("nan"))
        if self.guards.numbers.watch(step, losses, {"toy.param": self.param}, {"toy": self.adam}):
            self.adam.step()
        if wrong == "nan parameter":
            self.param.data[3] = float("inf")
        self.guards.numbers.look(step, {"toy.param": self.param})
        if step % 5 == 4:
            self.guards.heart.beat("checkpoint")
            self.save(step)
        if self.config.pace:
            time.sleep(self.config.pace)

    def misbehave(self, step: int) -> str:
        for rank, when, what in self.config.faults:
            if (rank, when) != (self.world.rank, step) or (self.attempt and not self.config.every_attempt):
                continue
            if what == "raise":
                raise KeyError("the toy is broken")
            if what == "fails":
                raise RuntimeError("the toy fails")
            if what == "cannot read":
                raise ValueError("the toy cannot read") from OSError()
            if what == "exit":
                os._exit(7)
            if what == "out of memory":
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 GB")
            if what.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, what))
            if what == "sleep":
                time.sleep(300)
            return what
        return ""

    def save(self, step: int) -> None:
        if self.world.is_main:
            part = self.file.with_suffix(".part")
            torch.save({"step": step, "param": self.param.data, "adam": self.adam.state_dict()}, part)
            part.replace(self.file)

    def circumstances(self) -> memory.Circumstances:
        return memory.Circumstances(
            self.world.rank, self.guards.heart.step, self.world.device, last_checkpoint=str(self.file)
        )


def main() -> None:
    """For a process of its own, alone or under torchrun: the arguments are how many workers and the config's fields as
    Python."""
    import sys

    from ns_multigpu.plugin.faults.errors import show_uncaught
    from ns_multigpu.plugin.launch.launcher import run_workers

    show_uncaught()
    workers, fields = int(sys.argv[1]), dict(eval(sys.argv[2]))
    config = GuardedConfig(**fields)
    if workers:
        run_workers(config, workers)
    else:
        trainer = config.setup()
        trainer.setup()
        trainer.train()


if __name__ == "__main__":
    main()
