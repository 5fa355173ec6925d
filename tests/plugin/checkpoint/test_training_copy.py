"""Copies that checkpoints are written from: where they lie, and that they are copies."""

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.blocks.graphs import GraphPool
from ns_multigpu.plugin.checkpoint import saved_tensors, training_copy
from ns_multigpu.plugin.checkpoint.atomic_save import open_checkpoint
from ns_multigpu.plugin.checkpoint.background import CheckpointWriter
from ns_multigpu.plugin.checkpoint.held_rows import Rows
from ns_multigpu.plugin.checkpoint.to_host import to_host
from ns_multigpu.plugin.checkpoint.training_copy import Content
from tests.lib.ranks import DEVICES, run_ranks
from tests.lib.saving import ALONE, as_large_ones, disk

PIECE = 2 << 20


def content_of(world: World, rows: int = 6, device: torch.device | str = "cpu") -> Content:
    """Return a model, a tensor that all ranks have, and rows of which each rank has its own."""
    g = torch.Generator().manual_seed(7)
    model = {"_model.gauss_params.means": torch.rand(rows, 3, generator=g).to(device)}
    shared = {f"shared/{i}": torch.rand(rows, i + 1, generator=g).to(device) for i in range(3)}
    own = Rows(torch.full((rows, 2), float(world.rank), device=device), rows * world.rank, rows * world.size)
    return Content(lambda: model, {**shared, "rows": own}, {"list": [1, 2]})


def tensors_in(content: Content) -> dict[str, Tensor]:
    own = {name: value.own if isinstance(value, Rows) else value for name, value in content.tensors.items()}
    return {**own, **content.pipeline()}


# ---- where a copy lies ----


class Clones:
    """In the place of clones on a GPU: notes them, and runs out of memory at the clone of a number."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.made = list[Tensor]()
        self._fails_at = fails_at

    def __call__(self, value: Tensor) -> Tensor:
        if len(self.made) == self._fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.made.append(value.clone())
        return self.made[-1]


def _where(world: World, spare: list[int], fails_at: int | None) -> tuple[str, int]:
    """Return the place of a rank's copy for given free memory on the shared GPU, and the number of clones."""
    last = world.rank == world.size - 1
    usual = (training_copy._gpu, training_copy._on_its_device)
    clones = Clones(fails_at if last else None)
    training_copy._gpu, training_copy._on_its_device = lambda _: ("the only one", spare[world.rank]), clones
    try:
        copied = training_copy.training_copy(content_of(world), world)
    finally:
        training_copy._gpu, training_copy._on_its_device = usual
    assert copied is not None
    made = {value.data_ptr() for value in clones.made}
    on_gpu = {value.data_ptr() in made for value in tensors_in(copied).values()}
    assert len(on_gpu) == 1, "all of it lies in one place"
    return ("gpu" if on_gpu.pop() else "host"), len(clones.made)


MODEL, SHARED, ROWS = 6 * 3 * 4, 6 * (1 + 2 + 3) * 4, 6 * 2 * 4
NEEDED = 4 * (MODEL + SHARED + ROWS)


@pytest.mark.parametrize(
    ("less", "fails_at", "place"), [(0, None, "gpu"), (1, None, "host"), (0, 0, "host"), (0, 1, "host")]
)
def test_all_ranks_have_their_copies_in_one_kind_of_memory(less: int, fails_at: int | None, place: str) -> None:
    """Ranks share a GPU, so both copies count. One rank with too little memory, or a failed copy, is enough."""
    needed = 4 * (MODEL + SHARED + 2 * ROWS)
    results = run_ranks(_where, 2, [needed, needed - less], fails_at)
    assert [found for found, _ in results] == [place] * 2
    if place == "gpu":
        assert sum(clones for _, clones in results) == 6, "the model and what both have are copied once, rows by each"


def test_without_a_gpu_copies_are_the_host_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_copy, "_on_its_device", lambda _: pytest.fail("there is no GPU"))
    assert training_copy.training_copy(content_of(ALONE), ALONE) is not None
    monkeypatch.setattr(training_copy, "available_memory", lambda: NEEDED - 1)
    assert training_copy.training_copy(content_of(ALONE), ALONE) is None


def test_nothing_of_a_copy_is_training_s() -> None:
    content = content_of(ALONE)
    copied = training_copy.training_copy(content, ALONE)
    assert copied is not None and copied.values["list"] is not content.values["list"]
    expected = pickle.dumps((tensors_in(copied), dict(copied.values)))
    for value in tensors_in(content).values():
        value.zero_()
    assert pickle.dumps((tensors_in(copied), dict(copied.values))) == expected


# ---- to the host ----


def _bits(value: Tensor) -> bytes:
    return value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


STREAMS = 32
"""Streams of a priority that torch hands out in turn."""
SOURCES: dict[str, Callable[[torch.device | str], Tensor]] = {
    "small": lambda d: torch.arange(10, device=d),
    "none": lambda d: torch.empty(0, 3, device=d),
    "one number": lambda d: torch.tensor(2.5, device=d),
    "less than a piece": lambda d: torch.rand(100_001, 3, device=d),
    "whole pieces": lambda d: torch.arange(3 * PIECE // 8, device=d),
    "pieces and a byte": lambda d: torch.randint(0, 255, (2 * PIECE + 1,), dtype=torch.uint8, device=d),
    "halves": lambda d: torch.rand(PIECE, 5, device=d).bfloat16(),
    "every other row": lambda d: torch.rand(400_000, 7, device=d)[::2],
    "the other way round": lambda d: torch.rand(3, 300_000, device=d).t(),
    "with a gradient": lambda d: torch.rand(300_000, 3, device=d).requires_grad_(),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("source", SOURCES)
def test_host_copy_is_bitwise_equal(source: str, device: str) -> None:
    value = SOURCES[source](device)
    found = to_host(value)
    assert (found.device.type, found.dtype, found.shape) == ("cpu", value.dtype, value.shape)
    assert found.is_contiguous() and not found.requires_grad and _bits(found) == _bits(value.detach())
    assert found.untyped_storage().nbytes() == found.nbytes, "torch would save more than it"
    if found.numel():
        before = _bits(found)
        value.detach().zero_()
        assert _bits(found) == before


@pytest.mark.gpu
def test_host_copy_follows_earlier_work_of_the_stream() -> None:
    value = torch.zeros(4 << 20, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        value.fill_(3.0)
        assert bool(to_host(value).eq(3).all())


@pytest.mark.gpu
def test_a_copy_to_the_host_leaves_other_threads_their_gpu() -> None:
    """While another stream's work keeps the GPU busy, a copy on this thread's own stream does not wait for it."""
    value, other = torch.rand(4 << 20, device="cuda"), torch.cuda.Stream()
    to_host(value)  # page-locks memory
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(2_000_000_000)
        busy = torch.cuda.Event()
        busy.record()
    to_host(value)
    assert not busy.query()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_copying_thread_keeps_its_gpu() -> None:
    """Threads begin with GPU 0. With one GPU in sight this says nothing."""
    last = torch.cuda.device_count() - 1
    value = torch.ones(1 << 20, device=f"cuda:{last}")
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(to_host, value).result().eq(1).all()
        assert thread.submit(torch.cuda.current_device).result() == last


@pytest.mark.gpu
def test_copies_do_not_disturb_captures_of_another_thread() -> None:
    device = torch.device("cuda:0")
    value, total = torch.arange(100_000.0, device=device), torch.zeros(1, device=device)
    copies: list[Tensor] = []

    def copy_often() -> None:
        torch.cuda.set_device(device)
        copies.extend(to_host(value) for _ in range(STREAMS + 1))

    def part() -> None:
        total.add_(1)
        saver = threading.Thread(target=copy_often)
        saver.start()
        saver.join()
        total.add_(1)

    pool = GraphPool(device)
    pool.prepare()
    pool.capture(part).replay()
    assert total.item() == 2
    assert len(copies) == STREAMS + 1
    assert all(torch.equal(copy, value.cpu()) for copy in copies)


# ---- checkpoints from a GPU ----


def _saved(world: World, models: Path, gpu_has_memory: bool) -> tuple[bool, list[str]]:
    """Save in the background, changes everything at once, and compares what is read; whether the copy was on a GPU."""
    where: list[bool] = []
    usual = training_copy.training_copy, training_copy.free_bytes
    if not gpu_has_memory:
        training_copy.free_bytes = lambda _: 0

    def noted(content: Content, within: World) -> Content | None:
        copied = usual[0](content, within)
        assert copied is not None
        where.extend(value.is_cuda for value in tensors_in(copied).values())
        return copied

    from ns_multigpu.plugin.checkpoint import background

    background.training_copy = noted
    content = content_of(world, 300_000, world.device)
    expected = {name: value.cpu() for name, value in tensors_in(content).items()}
    writer = CheckpointWriter(models, 0, world, pytest.fail)
    try:
        assert writer.save(1, lambda: content, background=True)
        for value in tensors_in(content).values():
            value.zero_()
        writer.finish()
    finally:
        background.training_copy, training_copy.free_bytes = usual
    opened = open_checkpoint(models / "step-000000001.ckpt", world)
    assert opened.tensors is not None
    found = opened.tensors.read(opened.tensors.names)
    wrong = [
        name for name, value in expected.items() if name.startswith("shared") and not torch.equal(found[name], value)
    ]
    wrong += [] if torch.equal(found["rows"][300_000 * world.rank :][:300_000], expected["rows"]) else ["rows"]
    means = "_model.gauss_params.means"
    wrong += [] if torch.equal(opened.content["pipeline"][means], expected[means]) else [means]
    assert len(set(where)) == 1
    return where[0], wrong


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("gpu_has_memory", [True, False])
def test_a_checkpoint_from_a_gpu_is_of_its_step(tmp_path: Path, ranks: int, gpu_has_memory: bool) -> None:
    found = run_ranks(_saved, ranks, tmp_path / "nerfstudio_models", gpu_has_memory, device="cuda")
    assert found == [(gpu_has_memory, [])] * ranks


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("background", [True, False])
def test_files_are_written_from_the_host_s_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, background: bool
) -> None:
    """Files are written in parallel and one by one: torch itself copies nothing to the host."""
    as_large_ones(monkeypatch)
    written: list[int] = []
    resolve = saved_tensors.RowsPlanner.resolve_data

    def noted(planner: Any, item: Any) -> Any:
        found = resolve(planner, item)
        assert found.is_cpu
        written.append(found.nbytes)
        return found

    monkeypatch.setattr(saved_tensors.RowsPlanner, "resolve_data", noted)
    world = ALONE if device == "cpu" else World.single("cuda:0")
    content = content_of(world, 2_000, device)
    writer = CheckpointWriter(tmp_path / "nerfstudio_models", 0, world, pytest.fail)
    with disk(lambda _: None):
        assert writer.save(1, lambda: content, background=background)
        writer.finish()
    assert sum(written) == 2_000 * (1 + 2 + 3 + 2) * 4
    model = torch.load(tmp_path / "nerfstudio_models" / "step-000000001.ckpt", weights_only=True)["pipeline"]
    assert all(value.is_cpu for value in model.values()), "it loads where there is no GPU"
