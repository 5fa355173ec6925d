"""A step's bookkeeping on a GPU: what torch's operators make of it, bit for bit."""

import pytest
import torch

from cuda_ext import step_message
from tests.cuda_ext.optim.test_step_control import CASES, REASONS, Gated, make_gated, make_message_inputs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("lines", [0, 1, 40, 256, 257, 5000])
@pytest.mark.parametrize(("ranks", "bands"), [*CASES, (32, 600)])
def test_message(ranks: int, bands: int, lines: int) -> None:
    for seed in range(3):
        message_inputs = make_message_inputs(ranks, bands, lines, columns=1 + 60 * seed, seed=seed)
        if lines == 5000 and bands == 600:
            assert len(message_inputs.bands) == 4 * 600, "more than one launch takes"
        there, here = message_inputs.on("cuda"), message_inputs.on("cpu")
        found = step_message(*there)
        assert found.is_cuda and torch.equal(found.cpu(), step_message(*here))
        assert torch.equal(there[3].cpu(), here[3])


def check(there: Gated, here: Gated) -> None:
    for found, expected in zip(there.run(), here.run(), strict=True):
        assert found.is_cuda and found.is_contiguous() and torch.equal(found.cpu(), expected)
    assert torch.equal(there.status.cpu(), here.status)
    assert torch.equal(there.totals.cpu(), here.totals)


@pytest.mark.parametrize("why", REASONS)
@pytest.mark.parametrize(("ranks", "segments"), [(1, 1), (2, 1), (3, 4), (4, 300), (8, 2), (32, 8)])
def test_gate(ranks: int, segments: int, why: str) -> None:
    for seed, lines in enumerate((18, 0, 256, 258, 4000)):
        for num_limits in (2, 3):
            gated = make_gated(ranks, segments, why if why != "over 2" else "over 1", num_limits, lines, seed)
            check(gated.to("cuda"), gated)
    if why == "over 2":
        gated = make_gated(ranks, segments, why)
        check(gated.to("cuda"), gated)


def test_in_a_graph() -> None:
    message_inputs, gated = make_message_inputs(4, 9), make_gated(4, 2, "")
    there, inputs = gated.to("cuda"), message_inputs.on("cuda")
    there.to("cuda").run()  # loads the kernels, which a capture must not do
    step_message(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        message = step_message(*inputs)
        scalars, counts = there.run()
    before = gated.to("cpu")
    for change in ("nothing", "over", "nothing", "again"):
        if change == "over":
            gated.messages[3, 1] += 1
            there.messages[3, 1] += 1
        elif change == "again":
            gated.messages.copy_(before.messages)
            there.messages.copy_(before.messages)
            gated.status.zero_()
            there.status.zero_()
        inputs[4].add_(5)
        message_inputs.met.add_(5)
        graph.replay()
        expected = gated.run()
        assert torch.equal(scalars.cpu(), expected[0]) and torch.equal(counts.cpu(), expected[1])
        assert torch.equal(there.status.cpu(), gated.status) and torch.equal(there.totals.cpu(), gated.totals)
        assert torch.equal(message.cpu(), step_message(*message_inputs.on("cpu")))
        assert bool(counts.any()) == (int(gated.status[4]) == 0)


def test_wrong_arguments_are_named() -> None:
    gated = make_gated(2, 2, "").to("cuda")
    counts = [gated.messages[:, k] for k in range(3)]
    given = (counts, gated.limits, gated.status, gated.scalars, gated.still, gated.row_counts, None, 64)
    rest = (gated.messages[0, 3:4], gated.messages[:, 4:], gated.totals)
    op = torch.ops.ns_multigpu.step_gate
    with pytest.raises(TypeError, match="limits"):
        op(counts, gated.limits.int(), *given[2:], *rest)
    with pytest.raises(ValueError, match="written in place"):
        op(*given, rest[0], rest[1], gated.totals.T)
    with pytest.raises(ValueError, match="rows contiguous"):
        op(*given, rest[0], gated.messages.T.contiguous().T[:, 4:], rest[2])
