"""Rows that are put into the memory of other ranks: written addresses, skipped rows, and refused arguments."""

import pytest
import torch
from torch import Tensor

from cuda_ext import put_rows
from tests.lib.ranks import DEVICES

LINES, CAPACITY = 37, 41  # number of lines, and their capacity
WIDTHS = (1, 2, 3, 4, 16)
TAKEN = (1, 2, 3, 4, 12)
RANKS = 3
UNTOUCHED = -7


def arrays_of(device: str = "cpu") -> list[Tensor]:
    """Integers, and floats in the last one."""
    g = torch.Generator().manual_seed(0)
    made = [torch.randint(0, 99, (CAPACITY, width), generator=g, dtype=torch.int32) for width in WIDTHS[:-1]]
    return [
        array.to(device) for array in [made[0].flatten(), *made[1:], torch.randn(CAPACITY, WIDTHS[-1], generator=g)]
    ]


def gate_of(device: str = "cpu") -> Tensor:
    gate = torch.randn(CAPACITY, 3, generator=torch.Generator().manual_seed(1))
    gate[5, 1], gate[6] = 0.0, torch.nan
    return gate.to(device)


def memory_of(device: str = "cpu") -> tuple[list[list[Tensor]], Tensor]:
    """Return each rank's memory for each array, and the addresses."""
    there = [
        [torch.full((CAPACITY, width), UNTOUCHED, dtype=torch.int32, device=device) for width in WIDTHS]
        for _ in range(RANKS)
    ]
    return there, torch.tensor([[one.data_ptr() for one in rank] for rank in there], device=device)


def check(there: list[list[Tensor]], lines: int, *, gated: bool) -> None:
    arrays, gate = arrays_of(), gate_of()
    last = arrays[-1].clone()
    if gated:
        last[:, 6:9][gate <= 0] = 0.0
    arrays[-1] = last
    for rank in there:
        for found, array, taken in zip(rank, arrays, TAKEN, strict=True):
            expected = array.reshape(CAPACITY, -1).view(torch.int32)
            assert torch.equal(found.cpu()[:lines, :taken], expected[:lines, :taken])
            assert bool((found.cpu()[lines:] == UNTOUCHED).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("count", "lines"), [(LINES, LINES), (CAPACITY + 5, CAPACITY), (0, 0)])
def test_every_rank_receives_the_valid_lines(count: int, lines: int, gated: bool, device: str) -> None:
    there, places = memory_of(device)
    gate = gate_of(device) if gated else None
    put_rows(arrays_of(device), TAKEN, torch.tensor([count], device=device), places, gate, 6)
    check(there, lines, gated=gated)
    assert bool((there[0][-1][:, 12:] == UNTOUCHED).all()), "what is not taken"


@pytest.mark.parametrize("device", DEVICES)
def test_first_array_is_put_with_offset_and_some_are_skipped(device: str) -> None:
    there, places = memory_of(device)
    taken = [*TAKEN[:2], 0, 0, TAKEN[4]]
    put_rows(arrays_of(device), taken, torch.tensor([LINES], device=device), places, offset=5)
    first, second = arrays_of()[:2]
    for rank in there:
        assert torch.equal(rank[0].cpu()[:LINES, 0], first[:LINES] + 5)
        assert torch.equal(rank[1].cpu()[:LINES], second[:LINES])
        assert all(bool((one == UNTOUCHED).all()) for one in rank[2:4]) and bool((rank[4] != UNTOUCHED).any())


@pytest.mark.gpu
def test_many_lines_on_a_gpu() -> None:
    """More than all blocks take in one turn."""
    lines = 3_000_001
    array, there = torch.rand(lines, 16, device="cuda"), torch.zeros(lines, 16, device="cuda")
    ids = torch.arange(lines, dtype=torch.int32, device="cuda")
    kept = torch.zeros_like(ids)
    places = torch.tensor([[kept.data_ptr(), there.data_ptr()]], device="cuda")
    put_rows([ids, array], [1, 12], torch.tensor([lines], device="cuda"), places)
    assert torch.equal(kept, ids) and torch.equal(there[:, :12], array[:, :12])
