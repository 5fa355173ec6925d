"""Sum of replicated parameters' gradients, in a few large all-reduces that overlap with backward.

DistributedDataParallel does this for modules whose parameters never change. Densification replaces ours, so buckets are
rebuilt whenever the parameters are new tensors.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ns_multigpu.core.dist.collectives import sum_in_place
from ns_multigpu.core.dist.world import World

BUCKET_BYTES = 32 << 20
"""A bucket is closed once it holds this much: large enough that latency does not count."""


@dataclass
class _Bucket:
    """Gradients that are sent together: a lone large one in place, small ones in one flat buffer."""

    params: list[Tensor]
    missing: int = 0
    flat: Tensor | None = None
    work: Any = None
    views: list[Tensor] = field(default_factory=list[Tensor])


class GradientBuckets:
    """Buckets that sum `.grad` of the watched parameters over all ranks.

    Buckets are filled in the order in which gradients usually become ready, the reverse of the parameters'. Every rank
    sends them in that order, even if its backward finishes them in another.
    """

    def __init__(self, world: World, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._world = world
        self._bucket_bytes = bucket_bytes
        self._buckets: list[_Bucket] = []
        self._owner: dict[int, _Bucket] = {}
        self._hooks: list[Any] = []
        self._params: list[Tensor] = []
        self._launched = 0
        self._armed = False

    def watch(self, params: list[Tensor]) -> None:
        """Prepare one backward over `params`: leaves that require a gradient, the same list on every rank."""
        if self._world.group is None:
            return
        wanted = [p for p in params if p.requires_grad]
        if len(wanted) != len(self._params) or any(a is not b for a, b in zip(wanted, self._params, strict=True)):
            self._lay_out(wanted)
        for bucket in self._buckets:
            bucket.missing, bucket.work, bucket.flat = len(bucket.params), None, None
        self._launched = 0
        self._armed = True

    def finish(self) -> None:
        """Send the remaining buckets and wait: afterwards every watched parameter's `.grad` is the sum of all ranks'.

        A parameter that got no gradient here counts as zero.
        """
        if self._world.group is None:
            return
        self._armed = False
        for bucket in self._buckets:
            bucket.missing = 0
        self._launch_ready()
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
            if bucket.flat is not None:
                grads = [_gradient(p) for p in bucket.params]
                torch._foreach_copy_(grads, bucket.views)  # pyright: ignore
            bucket.work, bucket.flat, bucket.views = None, None, []

    def finish_unready(self, params: list[Tensor]) -> None:
        """Run `finish` in place of a backward pass that failed or never began: meaningless sums, but all of them.

        Args:
            params: as given to `watch`.
        """
        if not self._armed:
            self.watch(params)
        self.finish()

    def _lay_out(self, params: list[Tensor]) -> None:
        for hook in self._hooks:
            hook.remove()
        self._params, self._buckets, self._owner = params, [], {}
        filled = self._bucket_bytes
        last: torch.dtype | None = None
        for param in reversed(params):
            if filled >= self._bucket_bytes or param.nbytes >= self._bucket_bytes or param.dtype != last:
                self._buckets.append(_Bucket([]))
                filled = 0
            self._buckets[-1].params.append(param)
            self._owner[id(param)] = self._buckets[-1]
            filled += param.nbytes
            last = param.dtype
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in params]

    def _on_gradient(self, param: Tensor) -> None:
        if self._armed:
            self._owner[id(param)].missing -= 1
            self._launch_ready()

    def _launch_ready(self) -> None:
        while self._launched < len(self._buckets) and self._buckets[self._launched].missing == 0:
            bucket = self._buckets[self._launched]
            self._launched += 1
            grads = [_gradient(p) for p in bucket.params]
            if len(grads) == 1 and grads[0].is_contiguous():
                bucket.work = sum_in_place(grads[0], self._world, async_op=True)
                continue
            bucket.flat = torch.cat([g.reshape(-1) for g in grads])
            parts = bucket.flat.split([g.numel() for g in grads])
            bucket.views = [piece.view_as(g) for piece, g in zip(parts, grads, strict=True)]
            bucket.work = sum_in_place(bucket.flat, self._world, async_op=True)


def _gradient(param: Tensor) -> Tensor:
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad
