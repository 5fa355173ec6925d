"""Collectives: values, mirrors, empty tensors, uneven rows."""

import pytest
import torch

from ns_multigpu.core import collectives as c
from ns_multigpu.core.world import World
from tests.ranks import run_ranks


def _rows(rank: int, count: int) -> torch.Tensor:
    return (torch.arange(count * 2, dtype=torch.float64).reshape(count, 2) + 100 * rank).requires_grad_()


def _everything(world: World) -> dict[str, object]:
    r, n = world.rank, world.size
    out: dict[str, object] = {}
    x = torch.full((3,), float(r + 1), requires_grad=True)
    y = c.sum_all(x, world)
    (y * (r + 1)).sum().backward()
    out["sum"], out["sum_grad"] = y.detach(), x.grad
    x = torch.full((2,), float(r), requires_grad=True)
    y = c.broadcast(x, n - 1, world)
    (y * (r + 1)).sum().backward()
    out["broadcast"], out["broadcast_grad"] = y.detach(), x.grad
    # Rank r sends r + dest rows to dest, so rank 0 sends none to itself.
    send = [r + dest for dest in range(n)]
    receive = c.exchange_counts(send, world)
    x = _rows(r, sum(send))
    y = c.exchange_rows(x, send, receive, world)
    (y * (r + 1)).sum().backward()
    out["receive"], out["rows"], out["rows_grad"] = receive, y.detach(), x.grad
    x = _rows(r, r)  # rank 0 has none
    y, counts = c.all_gather_rows(x, world)
    (y * (r + 1)).sum().backward()
    out["gather"], out["counts"], out["gather_grad"] = y.detach(), counts, x.grad
    x = _rows(r, r)
    y, _ = c.gather_rows(x, 0, world)
    y.sum().backward()
    out["root"], out["root_grad"] = y.detach(), x.grad
    empty = torch.zeros(0, 3, requires_grad=True)
    nothing = c.exchange_rows(empty, [0] * n, [0] * n, world)
    gathered, _ = c.all_gather_rows(empty, world)
    total = c.sum_all(empty, world)
    (nothing.sum() + gathered.sum() + total.sum() + c.broadcast(empty, 0, world).sum()).backward()
    out["empty"] = [tuple(t.shape) for t in (nothing, gathered, total, empty.grad)]
    wide = c.exchange_rows(torch.zeros(n, 0), [1] * n, [1] * n, world)
    out["wide"] = tuple(wide.shape)
    out["ints"] = c.all_gather_ints([r, -r], world)
    out["object"] = c.broadcast_object({"rank": r}, n - 1, world)
    out["int"] = c.broadcast_int(r - 5, 0, world)
    out["objects"] = c.all_gather_objects("x" * r, world)
    out["sent"] = world.traffic.sent
    c.barrier(world)
    return out


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives(size: int) -> None:
    results = run_ranks(_everything, size)
    weights = sum(range(1, size + 1))
    for r, out in enumerate(results):
        assert torch.equal(out["sum"], torch.full((3,), float(weights)))
        assert torch.equal(out["sum_grad"], torch.full((3,), float(weights)))
        assert torch.equal(out["broadcast"], torch.full((2,), float(size - 1)))
        assert torch.equal(out["broadcast_grad"], torch.full((2,), float(weights if r == size - 1 else 0)))
        assert out["receive"] == [source + r for source in range(size)]
        parts = []
        for source in range(size):
            start = sum(source + dest for dest in range(r))
            parts.append(_rows(source, sum(source + dest for dest in range(size))).detach()[start : start + source + r])
        assert torch.equal(out["rows"], torch.cat(parts))
        expected = torch.cat([torch.full((r + dest, 2), dest + 1.0, dtype=torch.float64) for dest in range(size)])
        assert torch.equal(out["rows_grad"], expected)
        assert out["counts"] == list(range(size))
        assert torch.equal(out["gather"], torch.cat([_rows(s, s).detach() for s in range(size)]))
        assert torch.equal(out["gather_grad"], torch.full((r, 2), float(weights), dtype=torch.float64))
        assert out["root"].shape[0] == (sum(range(size)) if r == 0 else 0)
        assert torch.equal(out["root_grad"], torch.ones(r, 2, dtype=torch.float64))
        assert out["empty"] == [(0, 3)] * 4
        assert out["wide"] == (size, 0)
        assert out["ints"] == [[s, -s] for s in range(size)]
        assert out["object"] == {"rank": size - 1}
        assert out["int"] == -5
        assert out["objects"] == ["x" * s for s in range(size)]
        assert (out["sent"] > 0) == (size > 1)


def test_counts_that_do_not_fit_are_refused() -> None:
    world = World.single()
    with pytest.raises(ValueError, match="2 counts for 1 ranks"):
        c.exchange_counts([1, 2], world)
    with pytest.raises(ValueError, match="exchange_rows"):
        c.exchange_rows(torch.zeros(3, 1), [2], [2], world)


@pytest.mark.gpu
def test_a_world_of_one_knows_its_gpu() -> None:
    assert World.single("cuda").device == torch.device("cuda", torch.cuda.current_device())
