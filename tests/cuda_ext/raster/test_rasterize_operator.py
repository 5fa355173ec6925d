"""`rasterize` as an operator: strides, padding, gradients into given memory, wrong arguments, torch's own checks."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cuda_ext import rasterize
from tests.cuda_ext.splats import make_splats

pytestmark = pytest.mark.usefixtures("native")


def test_not_contiguous_inputs_and_broadcast_gradients() -> None:
    splats = make_splats(60, 20, 20)
    strided = replace(splats, means2d=splats.means2d.t().contiguous().t(), features=splats.features.flip(1).flip(1))
    assert not strided.means2d.is_contiguous()
    assert torch.equal(strided.render()[0], splats.render()[0])
    leaves = [splats.leaves(), strided.leaves()]
    gradients = [torch.autograd.grad(s.render()[0].sum(), s.inputs()) for s in leaves]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.usefixtures("either")
def test_padding_behind_the_lists_changes_nothing() -> None:
    splats = make_splats(60, 20, 20).leaves()
    offsets, rows = splats.intersect()
    padded = torch.cat([rows, torch.full((50,), 2**31 - 1, dtype=torch.int32)])
    results = [rasterize(*splats.inputs(), offsets, ids, splats.patches) for ids in (rows, padded)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    gradients = [torch.autograd.grad(out.sum(), splats.inputs()[:3]) for out, _, _ in results]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("absgrad", [False, True])
def test_gradients_into_two_sinks(absgrad: bool) -> None:
    splats = make_splats(60, 20, 20)
    arguments = (*splats.inputs(), *splats.intersect(), list(splats.patches), 16)
    operators = torch.ops.ns_multigpu
    out, alpha, last, state = operators.rasterize(*arguments, None)
    walk = (*arguments, alpha, last, state, out, torch.cos(out * 9), torch.sin(alpha * 9), absgrad)
    *gradients, v_abs = operators.rasterize_backward(*walk)
    sinks = [torch.zeros(40, 16), torch.ones(60, 16)]
    owners, slots = (torch.arange(60) % 3 == 0).int(), torch.arange(60).int() * 2 // 3
    slots[owners == 1] = torch.arange(20).int() * 3
    operators.rasterize_backward_into(*walk, torch.tensor([s.data_ptr() for s in sinks]), owners, slots, False)
    expected = torch.cat([gradients[0], gradients[1], gradients[2][:, None], gradients[3], torch.zeros(60, 1)], dim=1)
    expected = torch.cat([expected, v_abs if absgrad else torch.zeros(60, 2), torch.zeros(60, 4)], dim=1)
    for k, sink in enumerate(sinks):
        mine = owners == k
        wanted = torch.full_like(sink, float(k)).index_add_(0, slots[mine], expected[mine])
        torch.testing.assert_close(sink, wanted)
    assert expected.count_nonzero() > 400


def test_wrong_arguments_are_named() -> None:
    splats = make_splats(5, 40, 32)
    lists = splats.intersect()
    with pytest.raises(ValueError, match="same patches"):
        rasterize(*splats.inputs(), *lists, (0, 0, 0, 20, 32))
    with pytest.raises(RuntimeError, match="as intersect returns"):
        rasterize(*splats.inputs(), lists[0], lists[1] + 5, splats.patches)
    with pytest.raises(ValueError, match=r"\[M,D\]"):
        rasterize(*splats.inputs()[:3], splats.depths, *lists, splats.patches)
    with pytest.raises(ValueError, match="absgrad_probe"):
        rasterize(*splats.inputs(), *lists, splats.patches, 16, torch.zeros(5, 3))
    with pytest.raises(TypeError, match="features"):
        rasterize(*splats.inputs()[:3], splats.features.double(), *lists, splats.patches)


def test_opcheck() -> None:
    splats = make_splats(20, 40, 30).leaves()
    arguments = (*splats.inputs(), *splats.intersect(), list(splats.patches), 16)
    operators = torch.ops.ns_multigpu
    out, alpha, last, state = operators.rasterize(*arguments, None)
    for probe in (None, torch.zeros(20, 2, requires_grad=True)):
        torch.library.opcheck(operators.rasterize.default, (*arguments, probe))
    detached = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    gradients = (alpha.detach(), last, state, out.detach(), torch.ones_like(out), torch.ones_like(alpha))
    for absgrad in (False, True):
        torch.library.opcheck(operators.rasterize_backward.default, (*detached, *gradients, absgrad))
