"""The aggregate device as a device of torch: memory, random numbers, copies, and errors in torch's manner."""

import copy
import io
import os
import re
import warnings
from collections.abc import Callable

import pytest
import torch

from ns_multigpu import aggregate
from ns_multigpu.plugin.faults.memory import Circumstances, explain

Use = Callable[..., None]
MIB = 2**20


def test_a_tensor_has_an_even_shard_on_each_member(use: Use) -> None:
    use(3, small_bytes=1024)
    assert aggregate.shards(torch.ones(3000, device="multigpu")) == [4032, 4032, 3936]
    assert aggregate.shards(torch.ones(100, device="multigpu")) == [400, 0, 0]
    before = aggregate.calls()
    large = torch.ones(3000, device="multigpu") + 1
    assert [now - then for now, then in zip(aggregate.calls(), before, strict=True)] == [2, 2, 2]
    assert (large[:10] + 1).tolist() == [3.0] * 10
    assert [now - then for now, then in zip(aggregate.calls(), before, strict=True)][1:] == [2, 2]


def test_freed_blocks_are_used_again(use: Use) -> None:
    use(2)
    one = torch.ones(MIB, device="multigpu")
    place = one.data_ptr()
    assert aggregate.memory() == {"allocated": 2 * MIB, "cached": 0}
    del one
    assert aggregate.memory() == {"allocated": 0, "cached": 2 * MIB}
    other = torch.zeros(MIB - 1000, device="multigpu")
    assert other.data_ptr() == place and aggregate.memory()["cached"] == 0
    del other
    aggregate.empty_cache()
    assert aggregate.memory() == {"allocated": 0, "cached": 0}


def test_out_of_memory_leaks_nothing(use: Use) -> None:
    use(2, small_bytes=1024, host_bytes=4 * MIB)
    held = torch.ones(MIB // 2, device="multigpu")
    cached = torch.ones(MIB, device="multigpu")
    del cached
    with pytest.raises(
        torch.OutOfMemoryError, match=r"multigpu out of memory. Tried to allocate \d+ bytes over 2 members"
    ):
        torch.ones(2 * MIB, device="multigpu")
    assert aggregate.memory() == {"allocated": MIB, "cached": 0}
    rest = torch.ones(MIB + MIB // 2, device="multigpu")
    assert float(rest.sum() + held.sum()) == 2 * MIB
    del rest
    assert aggregate.memory()["allocated"] == MIB and aggregate.max_memory_allocated() == 4 * MIB


def test_a_run_that_lacks_memory_says_what_helps(use: Use) -> None:
    use(2, small_bytes=1024, host_bytes=4 * MIB)
    held = torch.ones(MIB // 2, device="multigpu")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.ones(2 * MIB, device="multigpu")
    found = explain(raised.value, Circumstances(0, 3, held.device, gpu_remedies=["smaller images"]))
    assert re.search(
        r"ran out of memory on one of its GPUs in step 3: 0\.0 GiB of tensors on each GPU, 0\.0 GiB idle\."
        r"(.|\n)*smaller images\n.*more GPUs in the device: --machine\.num-devices",
        str(found),
    )


def test_random_numbers_do_not_depend_on_the_members(use: Use) -> None:
    found = []
    for members in (1, 3):
        use(members)
        torch.manual_seed(5)
        numbers = [torch.randn(50, device="multigpu"), torch.rand(3, 4, device="multigpu").bernoulli()]
        generator = torch.Generator("multigpu").manual_seed(6)
        numbers.append(torch.randperm(20, generator=generator, device="multigpu").float())
        numbers.append(torch.nn.functional.dropout(torch.ones(64, device="multigpu")))
        found.append([one.cpu() for one in numbers])
        del numbers
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) and one.unique().numel() > 1


def test_copies_and_files(use: Use) -> None:
    use(2)
    values = torch.arange(60.0).view(6, 10)
    there = values.to("multigpu", non_blocking=True)
    assert there.device == torch.device("multigpu", 0) and there.is_multigpu  # type: ignore[attr-defined]
    assert torch.equal(there.t().cpu(), values.t()) and torch.equal(there[::2, 1].cpu(), values[::2, 1])
    half = torch.empty(6, 10, dtype=torch.float16)
    assert torch.equal(half.copy_(there), values.half())
    assert torch.equal(copy.deepcopy(there).cpu(), values) and there.sum().item() == values.sum().item()
    larger = there.flatten().clone().resize_(100)
    assert torch.equal(larger[:60].cpu(), values.flatten())
    file = io.BytesIO()
    torch.save({"values": there}, file)
    file.seek(0)
    loaded = torch.load(file)["values"]
    assert loaded.device == there.device and torch.equal(loaded.cpu(), values)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_fused_adam(use: Use, amsgrad: bool) -> None:
    use(3, small_bytes=64)
    trained = []
    for device in ("cpu", "multigpu"):
        parameters = [torch.linspace(-1, 1, n, device=device).requires_grad_() for n in (50, 7, 33)]
        optimizer = torch.optim.Adam(parameters, lr=0.1, fused=True, amsgrad=amsgrad, weight_decay=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            torch.stack([(one.exp() * one).sum() for one in parameters]).sum().backward()
            optimizer.step()
        trained.append([one.detach().cpu() for one in parameters])
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_not_distributed_is_said_once(use: Use) -> None:
    use(2)
    line = torch.arange(20.0, device="multigpu")
    with pytest.warns(UserWarning, match="aten::kthvalue.values is not distributed"):
        assert line.kthvalue(3).values.item() == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert line.kthvalue(4).values.item() == 3
        use_nothing = torch.nonzero(line > 15)
    assert use_nothing.flatten().tolist() == [16, 17, 18, 19]


def test_devices_do_not_mix(use: Use) -> None:
    use(2)
    there, here = torch.ones(4, 4, device="multigpu"), torch.ones(4, 4)
    assert (there + torch.tensor(1.0)).sum().item() == 32 and there[torch.tensor([1])].shape == (1, 4)
    for mixed in (lambda: there + here, lambda: there @ here, lambda: torch.where(there > 0, there, here)):
        with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device.*multigpu:0 and cpu"):
            mixed()
    with (
        pytest.raises(RuntimeError, match=r"aten::mm.out: `out` has another shape"),
        pytest.warns(UserWarning, match="resized"),
    ):
        torch.mm(there, there, out=torch.ones(4, 5, device="multigpu"))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        there @ there[:3]


def test_an_operator_without_backward(use: Use) -> None:
    use(2)
    line = torch.ones(9, device="multigpu", requires_grad=True)
    with pytest.raises(RuntimeError, match="derivative for 'nextafter' is not implemented"):
        torch.nextafter(line, line).sum().backward()


def test_an_operator_whose_sizes_are_not_known_before(use: Use) -> None:
    use(2)
    matrix, values = torch.eye(3) * 2 + 1, torch.arange(6.0).view(3, 2)
    found = torch.linalg.lstsq(matrix.to("multigpu"), values.to("multigpu")).solution
    torch.testing.assert_close(found.cpu(), torch.linalg.lstsq(matrix, values).solution)


def test_members_do_not_change_below_tensors(use: Use) -> None:
    use(2)
    kept = [torch.ones(1000, device="multigpu")]
    with pytest.raises(RuntimeError, match="cannot change while its tensors exist"):
        use(3)
    kept.clear()
    use(3)


def test_a_forked_process_is_refused(use: Use) -> None:
    use(2)
    line = torch.ones(9, device="multigpu")
    child = os.fork()
    if child == 0:  # pytest must not go on here: it leaves by _exit
        try:
            line.add_(1)
        except RuntimeError as error:
            os._exit(0 if "Cannot re-initialize multigpu in forked subprocess" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert line.add_(1).sum().item() == 18


def test_gpus_that_cannot_serve(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    use(1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    with pytest.raises(RuntimeError, match="GPU 0 cannot access the memory of GPU 1: multigpu needs peer access"):
        aggregate.use()
    for wrong in ([0, 0], [2]):
        with pytest.raises(ValueError, match="different numbers below 2"):
            aggregate.use(wrong)
    with pytest.raises(ValueError, match="Give numbers of GPUs"):
        aggregate.use([], host_members=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RuntimeError, match=r"No GPU is visible. aggregate.use\(host_members=2\)"):
        aggregate.use()
