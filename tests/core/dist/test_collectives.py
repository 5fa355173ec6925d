"""Collectives: values, empty tensors, uneven rows."""

import pytest
import torch

from ns_multigpu.core.dist import collectives as c
from ns_multigpu.core.dist.world import World, gpus_are_shared
from tests.lib.ranks import run_ranks


def _rows(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count * 2, dtype=torch.float64).reshape(count, 2) + 100 * rank


def _everything(world: World) -> dict[str, object]:
    r, n = world.rank, world.size
    out: dict[str, object] = {}
    out["sum"] = c.add_up(torch.full((3,), float(r + 1)), world)
    # Rank r sends r + dest rows to dest, so rank 0 sends none to itself.
    send = [r + dest for dest in range(n)]
    out["receive"] = receive = c.exchange_counts(send, world)
    out["rows"] = c.exchange_rows(_rows(r, sum(send)), send, receive, world)
    out["gather"], out["counts"] = c.all_gather_rows(_rows(r, r), world)  # rank 0 has none
    empty = torch.zeros(0, 3)
    nothing = c.exchange_rows(empty, [0] * n, [0] * n, world)
    gathered, _ = c.all_gather_rows(empty, world)
    out["empty"] = [tuple(t.shape) for t in (nothing, gathered, c.add_up(empty, world))]
    wide = c.exchange_rows(torch.zeros(n, 0), [1] * n, [1] * n, world)
    out["wide"] = tuple(wide.shape)
    out["ints"] = c.all_gather_ints([r, -r], world)
    out["object"] = c.broadcast_object({"rank": r}, n - 1, world)
    out["int"] = c.broadcast_int(r - 5, world)
    out["objects"] = c.all_gather_objects("x" * r, world)
    out["sent"] = world.traffic.sent
    c.barrier(world)
    return out


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives(size: int) -> None:
    results = run_ranks(_everything, size)
    for r, out in enumerate(results):
        assert torch.equal(out["sum"], torch.full((3,), float(sum(range(1, size + 1)))))
        assert out["receive"] == [source + r for source in range(size)]
        parts = []
        for source in range(size):
            start = sum(source + dest for dest in range(r))
            parts.append(_rows(source, sum(source + dest for dest in range(size)))[start : start + source + r])
        assert torch.equal(out["rows"], torch.cat(parts))
        assert out["counts"] == list(range(size))
        assert torch.equal(out["gather"], torch.cat([_rows(s, s) for s in range(size)]))
        assert out["empty"] == [(0, 3)] * 3
        assert out["wide"] == (size, 0)
        assert out["ints"] == [[s, -s] for s in range(size)]
        assert out["object"] == {"rank": size - 1}
        assert out["int"] == -5
        assert out["objects"] == ["x" * s for s in range(size)]
        assert (out["sent"] > 0) == (size > 1)


def _together(world: World) -> dict[str, object]:
    r, n = world.rank, world.size
    counts, ids = torch.tensor([r, 10 * r], dtype=torch.int64), torch.arange(3, dtype=torch.int32) + 100 * r
    xs = [counts, ids, torch.full((3, 2), r + 0.5), torch.zeros(0, 4)]
    outs = [counts.new_zeros(n, 2), ids.new_zeros(3 * n), torch.zeros(3 * n, 2), torch.zeros(0, 4)]
    c.all_gather_together([], [], world)
    assert world.traffic.sent == 0
    c.all_gather_together(outs, xs, world)
    sent = world.traffic.sent
    alone = [torch.zeros_like(out).view(n, *x.shape) for out, x in zip(outs, xs, strict=True)]
    for out, x in zip(alone[:3], xs[:3], strict=True):
        c.all_gather_into(out, x, world)
    return {"outs": outs, "alone": alone, "sent": (sent, world.traffic.sent - sent)}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gathering_several_tensors_equals_single_gathers(size: int) -> None:
    for out in run_ranks(_together, size):
        counts, ids, fractions, empty = out["outs"]
        assert counts.tolist() == [[r, 10 * r] for r in range(size)] and counts.dtype == torch.int64
        assert ids.tolist() == [100 * r + i for r in range(size) for i in range(3)] and ids.dtype == torch.int32
        assert fractions.tolist() == [[r + 0.5] * 2 for r in range(size) for _ in range(3)] and empty.shape == (0, 4)
        for together, alone in zip(out["outs"], out["alone"], strict=True):
            assert torch.equal(together, alone.view(together.shape))
        assert out["sent"] == ((size - 1) * (16 + 12 + 24),) * 2


def test_outputs_that_do_not_fit_are_refused() -> None:
    world, x = World.single(), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="1 outputs for 2 tensors"):
        c.all_gather_together([x], [x, x], world)
    wide = torch.zeros(2, 4)
    for out, given in ((wide, x), (x.int(), x), (x.T, x), (x, wide[:, :3]), (x.to("meta"), x)):
        with pytest.raises(ValueError, match="output 1 is"):
            c.all_gather_together([x.clone(), out], [x, given], world)


def _together_on_gpus(world: World) -> tuple[list[torch.Tensor], int]:
    """Return the number of NCCL kernels as well."""
    r, n = world.rank, world.size
    xs = [torch.full((2,), r), torch.full((70_000,), r, dtype=torch.int32), torch.full((70_000, 16), r + 0.5)]
    xs = [x.to(world.device) for x in xs]
    outs = [x.new_zeros(n, *x.shape) for x in xs]
    c.all_gather_together(outs, xs, world)  # the first makes the communicator
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        c.all_gather_together([out.zero_() for out in outs], xs, world)
        torch.cuda.synchronize()
    kernels = sum(event.count for event in profile.key_averages() if event.key.startswith("ncclDevKernel"))
    return [out.cpu() for out in outs], kernels


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_several_tensors_gathered_together_on_gpus(size: int) -> None:
    for outs, kernels in run_ranks(_together_on_gpus, size, device="cuda"):
        for out in outs:
            assert all((out[r] == r + (0.5 if out.is_floating_point() else 0)).all() for r in range(size))
        assert kernels == (0 if gpus_are_shared() else 1)


def test_counts_that_do_not_fit_are_refused() -> None:
    world = World.single()
    with pytest.raises(ValueError, match="2 counts for 1 ranks"):
        c.exchange_counts([1, 2], world)
    with pytest.raises(ValueError, match="exchange_rows"):
        c.exchange_rows(torch.zeros(3, 1), [2], [2], world)


@pytest.mark.gpu
def test_world_of_one_has_its_gpu() -> None:
    assert World.single("cuda").device == torch.device("cuda", torch.cuda.current_device())
