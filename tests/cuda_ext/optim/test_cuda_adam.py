"""adam_step on CUDA: torch's own numbers, also from a CUDA graph, and never waiting for the device."""

import pytest
import torch

from cuda_ext.ops.optim.adam import AdamStep, FusedAdam, ScalarRing, adam_scalars, adam_step, fused_step
from tests.cuda_ext.adams import assert_same, run_steps

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["alone", "together", "counted"])
def test_same_as_torch(kind: str) -> None:
    found = run_steps(kind, "cuda")  # type: ignore[arg-type]
    assert_same(found, run_steps("torch", "cpu"), rtol=5e-6)
    exact = run_steps("torch", "cpu", torch.float64)
    assert_same([t.double() for t in found], exact, rtol=2e-5)


def test_more_tensors_than_one_launch_and_a_misaligned_one() -> None:
    g = torch.Generator().manual_seed(0)
    lists = [[torch.rand(9 + i, generator=g).cuda()[1:] for i in range(150)] for _ in range(4)]
    copies = [[t.cpu().clone() for t in tensors] for tensors in lists]
    before = [t.clone() for t in copies[0]]
    scalars = torch.tensor([adam_scalars(0.01 * i, (0.9, 0.999), 1e-15, 1 + i) for i in range(150)])
    adam_step(*lists, scalars.cuda(), set_grads_to_zero=True)
    adam_step(*copies, scalars, set_grads_to_zero=True)
    for a, b, old in zip(lists[0], copies[0], before, strict=True):
        # A parameter near zero after a step of its own size keeps the rounding of its old value.
        assert bool(((a.cpu() - b).abs() <= 1e-6 * (old.abs() + (b - old).abs())).all())
    for ours, theirs in zip(lists[1:], copies[1:], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=2e-6, atol=1e-7)
    assert all((g == 0).all() for g in lists[1])


def test_graph() -> None:
    params = [torch.nn.Parameter(torch.ones(1003, 3, device="cuda")) for _ in range(2)]
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    ours = [FusedAdam([p], lr=0.1) for p in params]
    theirs = torch.optim.Adam(copies, lr=0.1)
    for p, q in zip(params, copies, strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    step, grads = AdamStep(ours), [p.grad for p in params if p.grad is not None]
    scalars = torch.zeros(2, 8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        adam_step(step.params, grads, step.exp_avgs, step.exp_avg_sqs, scalars)
    for i in range(4):
        for group in (*(o.param_groups[0] for o in ours), theirs.param_groups[0]):
            group["lr"] = 0.1 / (i + 1)
        scalars.copy_(torch.tensor(step.count()))
        graph.replay()
        theirs.step()
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(p, q, rtol=5e-6, atol=1e-6)


def test_upload_within_a_capture_is_refused() -> None:
    p = torch.nn.Parameter(torch.ones(4, device="cuda"))
    p.grad = torch.ones_like(p)
    optimizer = FusedAdam([p])
    optimizer.step()
    with pytest.raises(RuntimeError, match="Adam's scalars cannot"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


def test_ring_outlives_its_slots() -> None:
    ring = ScalarRing(torch.device("cuda"), width=2, slots=2)
    seen = []
    torch.cuda._sleep(20_000_000)
    for i in range(9):
        seen.append(ring.upload([[float(i), 2.0 * i]] * (1 + i // 4), torch.float32).clone())
    assert [float(t[-1, 1]) for t in seen] == [2.0 * i for i in range(9)]


def test_a_step_does_not_wait() -> None:
    p = torch.nn.Parameter(torch.ones(100, device="cuda"))
    p.grad = torch.ones_like(p)
    optimizer = FusedAdam([p])
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused_step([optimizer])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_more_than_2_to_the_31_bytes() -> None:
    count = (1 << 29) + (1 << 20) + 3
    p, g, m, v = (torch.full((count,), x, device="cuda") for x in (1.0, 2.0, 0.0, 0.0))
    adam_step([p], [g], [m], [v], torch.tensor([adam_scalars(0.5, (0.9, 0.999), 1e-15, 1)], device="cuda"))
    for at in (slice(0, 8), slice(count - 8, count)):
        torch.testing.assert_close(p[at], torch.full((8,), 0.5, device="cuda"), rtol=1e-5, atol=0)
    assert float(p.max()) < 0.51
