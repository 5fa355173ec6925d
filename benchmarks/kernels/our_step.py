"""Our step with what training does around it, for the benchmarks."""

import torch
from torch import Tensor

from benchmarks.kernels.autograd_step import RATE, SSIM_LAMBDA
from benchmarks.kernels.fused_path import Capacities
from benchmarks.lib.stopwatch import Work, captured
from benchmarks.scenes.garden import DEGREE, Scene
from cuda_ext import AdamStep, FusedAdam, LazyAdam
from cuda_ext.ops.optim.adam import ScalarRing
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transports import OwnRows
from ns_multigpu.core.step.step import Step
from ns_multigpu.core.step.step_settings import StepSettings
from ns_multigpu.core.types import Patch
from ns_multigpu.primitives.gaussians.functions import Gaussians
from ns_multigpu.primitives.gaussians.schema import ORDER
from strategies.single import single


class OurStep:
    """`Step` with what training does around it on the host.

    Args:
        counting: sum up absolute gradients, too, and add to densification's statistics.
        graph: replay a CUDA graph from the second step on.
        lazy: defer the steps of points that are not drawn.
        groups: cull groups of points by their boxes; None: as training would.
    """

    def __init__(
        self, scene: Scene, capacities: Capacities, graph: bool, lazy: bool, counting: bool = False,
        groups: bool | None = None,
    ) -> None:  # fmt: skip
        self._scene = scene
        params: dict[str, Tensor] = {
            name: torch.nn.Parameter(p.clone()) for name, p in zip(ORDER, scene.raw(), strict=True)
        }
        self.adam = AdamStep([FusedAdam([p], lr=RATE, eps=1e-15) for p in params.values()])
        both = zip(self.adam.exp_avgs, self.adam.exp_avg_sqs, strict=True)
        moments: dict[str, tuple[Tensor, Tensor]] = dict(zip(ORDER, both, strict=True))
        settings = StepSettings(
            width=scene.width, height=scene.height, views=1, ssim_lambda=SSIM_LAMBDA, rows=capacities.rows, segment=1,
            intersections=capacities.intersections,
        )  # fmt: skip
        put_off = LazyAdam.make(scene.points, scene.device) if lazy else None
        world = World.single(scene.device)
        kernels = Gaussians(sh_degree=DEGREE, absgrad=counting).kernels()
        assert kernels is not None
        rows = OwnRows(world, kernels, settings.rows, settings.segment, settings.words())
        names = ("grad2d", "count", "radii") if counting else ()
        sums = {name: torch.zeros(scene.points, device=scene.device) for name in names}
        self.fused = Step(
            kernels, params, moments, sums, settings, single(world), rows, put_off, group_culling=groups
        )  # fmt: skip
        self._plan = Plan.of([[Patch(0, 0, 0, scene.width, scene.height)]])
        self._target = torch.empty_like(scene.target)
        cameras = [scene.viewmats.reshape(-1).cpu(), scene.Ks.reshape(-1).cpu()]
        self._cameras = torch.cat([*cameras, scene.background().cpu()])
        self._times = torch.zeros(len(scene.viewmats))
        self._ring = ScalarRing(scene.device, self.fused.inputs.numel(), slots=16)
        self._graph = graph
        self._run: Work | None = None
        self._taken = 0

    def __call__(self) -> None:
        numbers = torch.tensor(self.adam.count()).reshape(-1)
        inputs = torch.cat([self._cameras, numbers, self._times])
        self._ring.upload(inputs[None], torch.float32, into=self.fused.inputs[None])
        self._target.copy_(self._scene.target)
        if self._run is not None:
            self._run()
        elif self._graph:
            self._run = captured(self._take, self._scene.device)  # takes a step, too
        else:
            self._take()
        self._taken += 1

    def block(self, steps: int) -> None:
        """Run `steps` steps, at most 64, and the flush after them."""
        for _ in range(steps):
            self()
        self.fused.flush()

    def _take(self) -> None:
        self.fused.take(self._plan, [self._target])

    def check(self) -> None:
        """Raise RuntimeError unless all steps were taken: the figures would be meaningless."""
        status = self.fused.status()
        if status.full or status.done != self._taken:
            raise RuntimeError(f"of {self._taken} steps not all were taken: {status}")
