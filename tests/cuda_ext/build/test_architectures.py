"""Architectures of the GPUs to compile for, read from NVML where that is sufficient."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cuda_ext.build import toolkit


class Management:
    """NVML of a machine with these GPUs, as (major, minor); `fails` names a function of it that says so."""

    def __init__(self, gpus: Sequence[tuple[int, int]], fails: str = "") -> None:
        self._gpus, self._fails = gpus, fails

    def nvmlInit_v2(self) -> int:
        return int(self._fails == "init")

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self._gpus)
        return int(self._fails == "count")

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, gpu: Any) -> int:
        gpu._obj.value = number + 1
        return int(self._fails == "handle")

    def nvmlDeviceGetCudaComputeCapability(self, gpu: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self._gpus[gpu.value - 1]
        return int(self._fails == "capability")


def machine(
    monkeypatch: pytest.MonkeyPatch, gpus: Sequence[tuple[int, int]], seen: Sequence[int], fails: str = ""
) -> list[str]:
    """Return a machine with these GPUs, of which torch sees some; returns what torch is asked that starts the
    driver."""
    asked: list[str] = []

    def available() -> bool:
        asked.append("available")
        return True

    def capability(number: int) -> tuple[int, int]:
        asked.append("capability")
        return gpus[seen[number]]

    def library() -> Management:
        if fails == "library":
            raise OSError("libnvidia-ml.so.1: cannot open shared object file")
        return Management(gpus, fails)

    monkeypatch.setattr(toolkit, "_nvml", library)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    return asked


def test_equal_gpus_need_no_driver_query(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = machine(monkeypatch, [(9, 0)] * 4, [2, 3])
    assert toolkit.visible_architectures() == ("90",) and not asked


@pytest.mark.parametrize(("seen", "found"), [([1], ("80",)), ([0, 1], ("80", "120"))])
def test_devices_that_torch_sees_take_precedence(
    monkeypatch: pytest.MonkeyPatch, seen: list[int], found: tuple[str, ...]
) -> None:
    asked = machine(monkeypatch, [(12, 0), (8, 0)], seen)
    assert toolkit.visible_architectures() == found and "capability" in asked


@pytest.mark.parametrize("fails", ["library", "init", "count", "handle", "capability"])
def test_driver_is_queried_without_the_library(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    asked = machine(monkeypatch, [(9, 0)] * 2, [0, 1], fails)
    assert toolkit.visible_architectures() == ("90",)
    assert asked == ["available", "capability", "capability"]


def test_initialized_driver_is_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is quicker then."""
    asked = machine(monkeypatch, [(9, 0), (8, 0)], [1])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(toolkit, "_nvml", lambda: pytest.fail("the driver knows"))
    assert toolkit.visible_architectures() == ("80",) and asked == ["available", "capability"]


def test_gpus_that_torch_does_not_see_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, [(9, 0)], [])
    assert toolkit.visible_architectures() == ()


@pytest.mark.gpu
def test_both_methods_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.cuda.init()
    by_driver = toolkit.visible_architectures()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("the library is enough"))
    assert toolkit.visible_architectures() == by_driver != ()
