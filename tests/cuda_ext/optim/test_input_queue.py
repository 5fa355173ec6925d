"""Input queue of steps: lines read from tables, patches copied from images, and stored reports."""

import pytest
import torch
from torch import Tensor

from cuda_ext import keep_line, show_patches, take_lines
from tests.lib.ranks import DEVICES

LINES = 5
HEIGHT, WIDTH = 12, 20


def tables_of(device: str) -> list[Tensor]:
    """Numbers and indices, as a host keeps them."""
    numbers = torch.arange(LINES * 300, dtype=torch.float32).view(LINES, 300) / 7
    indices = torch.arange(LINES * 3, dtype=torch.int32).view(LINES, 3)
    return [table.pin_memory() if device == "cuda" else table for table in (numbers, indices)]


@pytest.mark.parametrize("device", DEVICES)
def test_next_line_is_read(device: str) -> None:
    tables = tables_of(device)
    into = [torch.full((300,), -1.0, device=device), torch.full((3,), -1, dtype=torch.int32, device=device)]
    for line in (3, 0, LINES - 1):
        take_lines(tables, torch.tensor([line], device=device), into)
        assert all(torch.equal(found.cpu(), table[line]) for found, table in zip(into, tables, strict=True))
    for line in (-1, LINES):
        take_lines(tables, torch.tensor([line], device=device), into)
        assert torch.equal(into[0].cpu(), tables[0][LINES - 1]), "there is no such line"


@pytest.mark.parametrize("device", DEVICES)
def test_reports_are_kept_line_by_line(device: str) -> None:
    table, at = torch.zeros(2, 300, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    lines = torch.rand(3, 300, device=device)
    for line in lines:
        keep_line(line, table, at)
    assert int(at) == 3 and torch.equal(table, lines[:2]), "the third exceeds the capacity"


def images_of(device: str, kind: torch.dtype) -> Tensor:
    images = torch.randint(0, 256, (4, HEIGHT, WIDTH, 3), generator=torch.Generator().manual_seed(0))
    return images.to(kind).to(device)


PATCHES = {
    "whole": [(1, 0, 0, WIDTH, HEIGHT)],
    "bands": [(0, 0, 4, WIDTH, 8), (1, 0, 0, WIDTH, 4), (0, 0, 8, WIDTH, 12)],
    "aligned": [(0, 4, 1, 12, 9)],
    "anyhow": [(0, 1, 1, 18, 9), (1, 3, 0, 4, 12), (1, 5, 5, 5, 9)],
    "many": [(k % 2, k % 17, k % 9, k % 17 + 3, k % 9 + 2) for k in range(150)],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
@pytest.mark.parametrize("name", PATCHES)
def test_patches_of_chosen_images_are_copied(device: str, kind: torch.dtype, name: str) -> None:
    images, patches = images_of(device, kind), PATCHES[name]
    numbers = [number for patch in patches for number in patch]
    sizes = [3 * (x1 - x0) * (y1 - y0) for _, x0, y0, x1, y1 in patches]
    buffer = torch.full((sum(sizes) + 5,), 7, dtype=kind, device=device)
    for chosen in ([2, 0], [3, 3]):
        show_patches(images, torch.tensor(chosen, dtype=torch.int32, device=device), numbers, buffer)
        for found, (place, x0, y0, x1, y1) in zip(buffer[:-5].split(sizes), patches, strict=True):
            assert torch.equal(found.view(y1 - y0, x1 - x0, 3), images[chosen[place], y0:y1, x0:x1])
    assert bool((buffer[-5:] == 7).all())
    before = buffer.clone()
    show_patches(images, torch.tensor([4, -1], dtype=torch.int32, device=device), numbers, buffer)
    assert torch.equal(buffer, before), "there are no such images"


@pytest.mark.gpu
def test_a_graph_serves_step_after_step() -> None:
    """Also what the host writes between its launches."""
    numbers = torch.zeros(64, 130).pin_memory()
    indices = torch.zeros(64, 1, dtype=torch.int32).pin_memory()
    images = torch.randint(0, 256, (64, 540, 960, 3), dtype=torch.uint8, device="cuda")
    at, chosen = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    inputs, reports = torch.zeros(130, device="cuda"), torch.zeros(64, 131, device="cuda")
    buffer = torch.zeros(540 * 960 * 3, dtype=torch.uint8, device="cuda")

    def step() -> None:
        take_lines([numbers, indices], at, [inputs, chosen])
        show_patches(images, chosen, [0, 0, 0, 960, 540], buffer)
        keep_line(torch.cat([inputs * 2, buffer.sum(dtype=torch.int64).float()[None]]), reports, at)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for block in range(2):
        at.fill_(0)
        for k in range(64):
            numbers.numpy()[k] = 100 * block + k
            indices.numpy()[k] = (7 * k + block) % 64
            graph.replay()
        found = reports.cpu()
        assert torch.equal(found[:, 0], 2.0 * (100 * block + torch.arange(64)))
        sums = images.view(64, -1).sum(1, dtype=torch.int64).float().cpu()
        assert torch.equal(found[:, 130], sums[(7 * torch.arange(64) + block) % 64])


def test_schemas_are_right() -> None:
    tables, at = tables_of("cpu"), torch.tensor([2])
    ops, checks = torch.ops.ns_multigpu, ("test_schema", "test_faketensor")
    into = [torch.zeros(300), torch.zeros(3, dtype=torch.int32)]
    torch.library.opcheck(ops.take_lines.default, (tables, at, into), test_utils=checks)
    torch.library.opcheck(ops.keep_line.default, (torch.ones(3), torch.zeros(4, 3), at), test_utils=checks)
    images = images_of("cpu", torch.uint8)
    shown = (images, torch.tensor([1], dtype=torch.int32), [0, 0, 0, 4, 4], torch.zeros(48, dtype=torch.uint8))
    torch.library.opcheck(ops.show_patches.default, shown, test_utils=checks)


AT, INTS = torch.tensor([0]), torch.zeros(2, dtype=torch.int32)


@pytest.mark.gpu
def test_table_without_gpu_access_is_refused() -> None:
    with pytest.raises(TypeError, match="page-locked"):
        take_lines([torch.zeros(2, 3)], AT.cuda(), [torch.zeros(3, device="cuda")])
