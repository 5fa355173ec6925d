"""Our step with what training does around it, for the benchmarks."""

import torch
from torch import Tensor

from benchmarks.kernels.autograd_step import RATE, SSIM_LAMBDA
from benchmarks.kernels.fused_path import Capacities
from benchmarks.lib.stopwatch import Work, captured
from benchmarks.scenes.garden import Scene
from cuda_ext import AdamStep, FusedAdam, LazyAdam
from cuda_ext.ops.adam import ScalarRing
from ns_multigpu.core.world import World
from ns_multigpu.primitives.fused_step import ORDER, FusedStep, StepSettings


class OurStep:
    """`FusedStep` with what training does around it on the host.

    Args:
        graph: replay a CUDA graph from the second step on.
        lazy: put off the steps of points that are not drawn.
    """

    def __init__(self, scene: Scene, room: Capacities, absgrad: bool, graph: bool, lazy: bool) -> None:
        self._scene = scene
        params: dict[str, Tensor] = {
            name: torch.nn.Parameter(p.clone()) for name, p in zip(ORDER, scene.raw(), strict=True)
        }
        self.adam = AdamStep([FusedAdam([p], lr=RATE, eps=1e-15) for p in params.values()], with_grads=False)
        both = zip(self.adam.exp_avgs, self.adam.exp_avg_sqs, strict=True)
        moments: dict[str, tuple[Tensor, Tensor]] = dict(zip(ORDER, both, strict=True))
        settings = StepSettings(
            width=scene.width, height=scene.height, views=1, degree=3, antialiased=False, absgrad=absgrad,
            ssim_lambda=SSIM_LAMBDA, rows=room.rows, intersections=room.intersections,
        )  # fmt: skip
        put_off = LazyAdam.make(scene.points, scene.device) if lazy else None
        self.fused = FusedStep(params, moments, {}, settings, World.single(scene.device), lazy=put_off)
        cameras = [scene.viewmats.reshape(-1).cpu(), scene.Ks.reshape(-1).cpu()]
        self._cameras = torch.cat([*cameras, scene.background().cpu()])
        self._ring = ScalarRing(scene.device, self.fused.inputs.numel(), slots=16)
        self._graph = graph
        self._run: Work | None = None
        self._taken = 0

    def __call__(self) -> None:
        numbers = torch.tensor(self.adam.count()).reshape(-1)
        inputs = torch.cat([self._cameras, numbers])
        self._ring.upload(inputs[None], torch.float32, into=self.fused.inputs[None])
        self.fused.targets[0].copy_(self._scene.target)
        if self._run is not None:
            self._run()
        elif self._graph:
            self._run = captured(self._both, self._scene.device)  # takes a step, too
        else:
            self._both()
        self._taken += 1

    def block(self, steps: int) -> None:
        """So many steps, at most 64, and the flush after them."""
        for _ in range(steps):
            self()
        self.fused.flush()

    def _both(self) -> None:
        self.fused.render()
        self.fused.update()

    def check(self) -> None:
        """Raises RuntimeError unless all steps were taken: the figures would be of something else."""
        status = self.fused.status()
        if status.full or status.done != self._taken:
            raise RuntimeError(f"of {self._taken} steps not all were taken: {status}")
