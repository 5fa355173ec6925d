"""Operators on the aggregate device equal those on the CPU for any number of members, and each computes its shard."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ns_multigpu import aggregate

Case = Callable[..., object]


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def places(count: int, below: int, seed: int = 1) -> Tensor:
    return torch.randint(below, (count,), generator=torch.Generator().manual_seed(seed))


A, B, ROW, LINE, IDS = rows(13, 6), rows(13, 6, seed=1), rows(6, seed=2), rows(29, seed=3), places(17, 13)
IMAGES, FILTERS = rows(5, 4, 8, 8), rows(6, 4, 3, 3, seed=4)
TIES = places(40, 5).double()

ELEMENTS: dict[str, tuple[Case, tuple[Tensor, ...]]] = {
    "add": (torch.add, (A, B)),
    "broadcast": (lambda a, row: a * row + 2, (A, ROW)),
    "column": (lambda a, row: a[:, :1] - row, (A, ROW)),
    "one row": (lambda row: row.exp(), (ROW[None],)),
    "transposed": (lambda a, b: (a.t() / b.t()).contiguous(), (A, B)),
    "where": (lambda a, b: torch.where(a > b, a, b), (A, B)),
    "clamp": (lambda a: a.clamp(-0.5, 0.5), (A,)),
    "in place": (lambda a, b: a.clone().mul_(b).add_(1).relu_(), (A, B)),
    "promoted": (lambda a, ids: a[0, 0] + ids + ids.float(), (A, IDS)),
    "out": (lambda a, b: torch.add(a.detach(), b.detach(), out=torch.empty(0, dtype=a.dtype, device=a.device)), (A, B)),
    "fill": (lambda a: torch.full_like(a, 3).index_fill_(1, torch.tensor([2], device=a.device), 0), (A,)),
    "masked_fill": (lambda a: a.masked_fill(a > 0, 7), (A,)),
    "lerp": (torch.lerp, (A, B, ROW)),
    "logical": (lambda a, b: (a > 0) & ~(b > 0) | a.isnan(), (A, B)),
    "activations": (lambda a: F.silu(a) + F.gelu(a) + a.sigmoid() + F.softplus(a), (A,)),
    "cast": (lambda a: a.half().float().int(), (A,)),
    "strided copy": (lambda a, b: a.clone().t().copy_(b.t()), (A, B)),
    "foreach": (lambda a, b: torch._foreach_add([a, b], [b, a], alpha=2)[1], (A, B)),
}
REDUCTIONS: dict[str, tuple[Case, tuple[Tensor, ...]]] = {
    "sum": (torch.sum, (A,)),
    "sum of a row": (lambda a: a.sum(1), (A,)),
    "sum of a column": (lambda a: a.sum(0, keepdim=True), (A,)),
    "sum of the outer dimensions": (lambda x: x.sum((0, 2, 3)), (IMAGES,)),
    "mean": (lambda a: torch.stack([a.mean(), a.mean((0, 1), keepdim=True)[0, 0]]), (A,)),
    "mean of rows": (lambda a: a.mean(-1), (A,)),
    "extremes": (lambda a: torch.stack([a.max(), a.min(), a.amax((0, 1)), a.prod()]), (A,)),
    "max of rows": (lambda a: a.max(1), (A,)),
    "max of columns": (lambda a: a.min(0), (A,)),
    "norms": (lambda a: torch.stack([a.norm(), torch.linalg.vector_norm(a, 1), a.abs().max()]), (A,)),
    "any": (lambda a: torch.stack([(a > 2).any(), (a < 9).all()]), (A,)),
    "argmax": (lambda a: torch.stack([a.argmax(), a.argmin(), a.t().contiguous().argmax()]), (A,)),
    "argmax of rows": (lambda a: a.argmax(1), (A,)),
    "var": (lambda a: (a.var(1), a.std(0)), (A,)),
    "softmax": (lambda a: (a.softmax(1), a.softmax(0), a.log_softmax(-1)), (A,)),
    "cumsum": (lambda line: line.cumsum(0), (LINE,)),
    "cumsum of rows": (lambda a: (a.cumsum(0), a.cumsum(1)), (A,)),
    "cumsum of integers": (lambda ids: ids.int().cumsum(0), (IDS,)),
}
INDEXING: dict[str, tuple[Case, tuple[Tensor, ...]]] = {
    "sort": (lambda x: x.sort(stable=True), (TIES,)),
    "sort descending": (lambda x: x.sort(stable=True, descending=True), (TIES,)),
    "sort of rows": (lambda a: a.sort(1), (A,)),
    "sort of integers": (lambda ids: (ids - 5).sort(stable=True, descending=True), (IDS,)),
    "sort of special numbers": (
        lambda x: x.float().sort(stable=True).indices,
        (torch.tensor([2, torch.nan, -0.0, 0.0, -torch.inf, -torch.nan, 1, torch.inf, -3, 0.0, -0.0]),),
    ),
    "index": (lambda a, ids: a[ids], (A, IDS)),
    "index pairs": (lambda a, ids: a[ids, ids % 6], (A, IDS)),
    "index by a grid": (lambda a, ids: a[ids[:16].view(8, 2), None], (A, IDS)),
    "index columns": (lambda a, ids: a[:, ids % 6], (A, IDS)),
    "mask": (lambda a: a[a[:, 0] > 0], (A,)),
    "index_select": (lambda a, ids: (a.index_select(0, ids), a.index_select(1, ids % 6)), (A, IDS)),
    "gather": (lambda a, ids: (a.gather(0, ids[:, None]), a.gather(1, ids[:13, None] % 6)), (A, IDS)),
    "embedding": (lambda a, ids: F.embedding(ids, a), (A, IDS)),
    "assign": (lambda a, ids: a.clone().index_put_((ids,), a[0] * 0 + 1), (A, IDS)),
    "index_add": (lambda a, ids: a.index_add(0, ids, a[ids]), (A, IDS)),
    "scatter_add": (lambda a, ids: a.scatter_add(0, ids[:, None].expand(-1, 6), a[ids]), (A, IDS)),
    "cat": (lambda a, b: (torch.cat([a, b[:2], a]), torch.cat([a, b], 1), torch.stack([a, b], -1)), (A, B)),
    "split": (lambda a: a.split([4, 9])[1] + a.unbind(1)[2][4:, None], (A,)),
    "flip": (lambda a, line: (a.flip(1), a.flip(0, 1), line.flip(0), a.roll(2, 1)), (A, LINE)),
}
MODELS: dict[str, tuple[Case, tuple[Tensor, ...]]] = {
    "mm": (lambda a, b: a @ b.t(), (A, B)),
    "addmm": (lambda a, b: (F.linear(a, b, b[:, 0]), torch.addmm(a[:, :1], a, b.t())), (A, B)),
    "mv": (torch.mv, (A, ROW)),
    "bmm": (lambda x: x.flatten(2) @ x.flatten(2).mT, (IMAGES,)),
    "conv2d": (lambda x, w: F.conv2d(x, w, w[:, 0, 0, 0], padding=1, stride=2), (IMAGES, FILTERS)),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w[:4, :2], stride=2), (IMAGES, FILTERS)),
    "group_norm": (lambda x: F.group_norm(x, 2, x[0, :, 0, 0], x[1, :, 0, 0]), (IMAGES,)),
    "layer_norm": (lambda a, row: F.layer_norm(a, (6,), row, row), (A, ROW)),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), (IMAGES,)),
    "resize": (lambda x: F.interpolate(x, scale_factor=2) + F.pad(x, (4, 4, 4, 4)), (IMAGES,)),
    "pool": (lambda x: F.avg_pool2d(x, 2) + F.max_pool2d(x, 2), (IMAGES,)),
    "pad": (lambda x: F.pad(x, (1, 1, 1, 1), "reflect"), (IMAGES,)),
    "losses": (lambda a, b: F.mse_loss(a, b) + F.l1_loss(a, b) + F.mse_loss(a, b, reduction="none").sum(), (A, B)),
    "attention": (lambda x: F.scaled_dot_product_attention(*[x.flatten(2)] * 3), (IMAGES,)),
    "inverse": (lambda x: torch.linalg.inv(x[:, 0]), (IMAGES,)),
    "cross": (lambda a, b: torch.linalg.cross(a[:, :3], b[:, 3:]), (A, B)),
}


def flat(found: object) -> list[Tensor]:
    """Return the tensors of a result."""
    return [found] if isinstance(found, Tensor) else [one for part in found for one in flat(part)]  # type: ignore[attr-defined]


def results(case: Case, arguments: tuple[Tensor, ...], device: str) -> list[Tensor]:
    """Return the results and the gradients of their weighted sum, on the CPU."""
    given = [value.to(device) for value in arguments]
    leaves = [value.requires_grad_() for value in given if value.is_floating_point()]
    found = flat(case(*(value.clone() if value.requires_grad else value for value in given)))
    assert {one.device.type for one in found} == {torch.device(device).type}
    smooth = [one for one in found if one.requires_grad]
    if smooth:
        weights = [torch.linspace(0.5, 1.5, one.numel(), dtype=one.dtype).view(one.shape).to(device) for one in smooth]
        total = torch.stack([(one * weight).sum() for one, weight in zip(smooth, weights, strict=True)]).sum()
        found += [one for one in torch.autograd.grad(total, leaves, allow_unused=True) if one is not None]
    return [one.detach().cpu() for one in found]


@pytest.mark.parametrize("members", [1, 2, 3])
@pytest.mark.parametrize(
    "cases", [ELEMENTS, REDUCTIONS, INDEXING, MODELS], ids=["elements", "reductions", "indexing", "models"]
)
def test_operators_equal_the_cpus(
    use: Callable[..., None], cases: dict[str, tuple[Case, tuple[Tensor, ...]]], members: int
) -> None:
    use(members)
    for name, (case, arguments) in cases.items():
        expected, before = results(case, arguments, "cpu"), aggregate.calls()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings(
                "ignore", "aten::(scatter|_index_put_impl_).*is not distributed"
            )  # if all is indexed
            found = results(case, arguments, "multigpu")
        worked = [now - then for now, then in zip(aggregate.calls(), before, strict=True)]
        assert min(worked) >= 1, name
        assert len(found) == len(expected), name
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
