"""Gradient buckets: sums, overlap, order, changed parameters, missing gradients."""

import pytest
import torch

from ns_multigpu.core.dist.buckets import GradientBuckets
from ns_multigpu.core.dist.world import World
from tests.lib.ranks import run_ranks


def _params() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 3), (5,), (0, 4), (11, 2), (3, 3)]
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


def _loss(params: list[torch.Tensor], rank: int, order: list[int]) -> torch.Tensor:
    total = torch.zeros(())
    for i in order:
        total = total + (params[i].square() * (rank + 1) * (i + 1)).sum()
    return total


def _train(world: World) -> list[list[torch.Tensor | None]]:
    results = []
    params = _params()
    frozen = torch.ones(2)
    buckets = GradientBuckets(world, bucket_bytes=40)
    # Every rank finishes its gradients in another order, and the last rank lacks one altogether.
    order = list(range(5)) if world.rank % 2 == 0 else [3, 0, 4, 2, 1]
    if world.rank == world.size - 1 and world.size > 1:
        order.remove(1)
    for round_ in range(3):
        for p in params:
            p.grad = None
        buckets.watch([*params, frozen])
        _loss(params, world.rank, order).backward()
        buckets.finish()
        results.append([None if p.grad is None else p.grad.clone() for p in params])
        if round_ == 1:  # as densification does
            params[3] = torch.ones(4, 2).requires_grad_()
    assert frozen.grad is None
    return results


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums(size: int) -> None:
    results = run_ranks(_train, size)
    for round_ in range(3):
        params = _params()
        if round_ == 2:
            params[3] = torch.ones(4, 2).requires_grad_()
        total = torch.zeros(())
        for rank in range(size):
            order = [i for i in range(5) if not (i == 1 and rank == size - 1 and size > 1)]
            total = total + _loss(params, rank, order)
        total.backward()
        for rank in range(size):
            for grad, param in zip(results[rank][round_], params, strict=True):
                torch.testing.assert_close(grad, param.grad)
        for i in range(5):
            assert all(torch.equal(results[r][round_][i], results[0][round_][i]) for r in range(size))


def _launches_before_finish(world: World) -> int:
    params = [torch.ones(100).requires_grad_() for _ in range(4)]
    buckets = GradientBuckets(world, bucket_bytes=1)
    buckets.watch(params)
    sent = world.traffic.sent
    sum(p.sum() for p in params).backward()
    during = world.traffic.sent - sent
    buckets.finish()
    return during


def test_buckets_are_sent_during_backward() -> None:
    assert run_ranks(_launches_before_finish, 2) == [4 * 400, 4 * 400]
