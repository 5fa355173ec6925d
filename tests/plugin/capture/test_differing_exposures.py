"""Whether photographs differ in exposure: known exposures are found again, and what would mislead is left out."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig
from torch import Tensor

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import View
from ns_multigpu.plugin.capture.differing_exposures import MANY, Exposures, compared, differ, measured
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.splats import exposure_choice
from ns_multigpu.plugin.splats.exposure_choice import exposures_of
from tests.lib.captures import manager, read_by, write_capture
from tests.lib.ranks import run_ranks

FOX = Path(__file__).parents[4] / "shared" / "data" / "fox"
STOPS = [-1.0, -0.5, 0.0, 0.5, 1.0]
WIDTH, HEIGHT = 96, 72


def wall(count: int = 4000, depth: float = 2.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points of a wall in front of the cameras, and their colours: bands, each a little brighter than the next."""
    points = torch.rand(count, 3, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    points[:, 2] = depth
    colours = (60 + 40 * (points[:, :1] * 6).floor() / 6).expand(-1, 3) * torch.tensor([1.0, 0.8, 1.2])
    return points, colours


def look(shift: float) -> View:
    matrix = torch.eye(4)
    matrix[0, 3] = shift
    K = torch.tensor([[90.0, 0, WIDTH / 2], [0, 90.0, HEIGHT / 2], [0, 0, 1]])
    return View(matrix, K, WIDTH, HEIGHT)


VIEWS = [look(0.05 * k) for k in range(len(STOPS))]


def photograph(view: View, points: Tensor, colours: Tensor, stops: float) -> Tensor:
    """Every pixel has the colour of the point next to it."""
    local = points + view.viewmat[:3, 3]
    x, y = (local[:, k] / local[:, 2] * view.K[k, k] + view.K[k, 2] for k in (0, 1))
    ys, xs = torch.meshgrid(torch.arange(HEIGHT) + 0.5, torch.arange(WIDTH) + 0.5, indexing="ij")
    near = torch.cdist(torch.stack([xs.flatten(), ys.flatten()], 1), torch.stack([x, y], 1)).argmin(1)
    light = (colours[near] / 255) ** 2.2 * 2**stops
    return (light.clamp(max=1) ** (1 / 2.2) * 255).round().to(torch.uint8).view(HEIGHT, WIDTH, 3)


def of_wall(change: Any = lambda image: image, more: float = 0.0) -> Exposures | None:
    points, colours = wall()
    images = [photograph(view, points, colours, stops + more) for view, stops in zip(VIEWS, STOPS, strict=True)]
    return measured(points, VIEWS, lambda k: change(images[k]))


@pytest.mark.parametrize("change", [lambda image: image, lambda image: image.float() / 255], ids=["uint8", "float"])
def test_known_exposures_are_found_again(change: Any) -> None:
    found = of_wall(change)
    assert found is not None and found.stops == pytest.approx(STOPS, abs=0.05)
    assert found.spread == pytest.approx(0.9, abs=0.05), "5 / 4 of their deviation: the others are neighbours"
    assert differ(found) and not differ(Exposures(found.stops, 0.9 * MANY))


def test_each_photograph_has_a_thread_and_torch_its_own_number_behind_it() -> None:
    within: set[tuple[bool, int]] = set()

    def note(image: Tensor) -> Tensor:
        within.add((threading.current_thread() is threading.main_thread(), torch.get_num_threads()))
        return image

    def fail(image: Tensor) -> Tensor:
        raise ValueError("cut short")

    def redistributed() -> int:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(torch.get_num_threads).result()

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        of_wall(note)
        assert within == {(False, 1)} and redistributed() == 3
        with pytest.raises(ValueError, match="cut short"):
            of_wall(fail)
        assert redistributed() == 3
    finally:
        torch.set_num_threads(before)


def along(gains: Tensor, light: float = 0.0) -> float:
    """Return the spread of photographs along a path, each of which shows points that its neighbours show, too.

    Args:
        light: standard deviation of what else makes a point brighter or darker in a photograph.
    """
    views, points = len(gains), 12 * len(gains)
    drawn = torch.randn(views, points, generator=torch.Generator().manual_seed(1)) * light
    place = torch.arange(points) / 12
    shown = (torch.arange(views)[:, None] - place).abs() < 8
    return compared(torch.where(shown, gains[:, None] + drawn, torch.nan)).spread


def test_gains_count_that_neighbours_do_not_have() -> None:
    """A camera that walks into the sun differs by two stops, and needs no correction."""
    path = torch.linspace(-1, 1, 40)
    mixed = path[torch.randperm(40, generator=torch.Generator().manual_seed(2))]
    assert along(mixed) > 2 * MANY and along(path) < MANY / 4


def test_gains_count_as_far_as_they_explain_other_points() -> None:
    """Light that changes from point to point, as shadows and shine do, is no exposure."""
    gains = torch.rand(40, generator=torch.Generator().manual_seed(3)) - 0.5
    assert along(gains) > MANY and along(gains, light=1.0) < MANY / 4 and along(0 * gains, light=1.0) < MANY / 4


def test_common_brightness_does_not_count() -> None:
    found = of_wall(more=0.4)
    assert found is not None and found.stops == pytest.approx(STOPS, abs=0.05)


def test_points_behind_the_wall_do_not_count() -> None:
    """Three points of four are behind the wall, far brighter than it."""
    points, colours = wall()
    behind, _ = wall(12000, depth=3.0, seed=1)
    behind[:, :2] *= 1.5
    images = [photograph(view, points, colours, stops) for view, stops in zip(VIEWS, STOPS, strict=True)]
    found = measured(torch.cat([behind, points]), VIEWS, lambda k: images[k])
    assert found is not None and found.stops == pytest.approx(STOPS, abs=0.1)


@pytest.mark.parametrize("value", [255, 3])
def test_pixels_that_are_white_or_black_do_not_count(value: int) -> None:
    """Two of three rows of pixels are cut off in the brightest photograph."""

    def cut(image: Tensor) -> Tensor:
        image = image.clone()
        if int(image.max()) > 150:
            image[: 2 * HEIGHT // 3] = value
        return image

    found = of_wall(cut)
    assert found is not None and found.stops == pytest.approx(STOPS, abs=0.05)


def test_too_few_points_give_no_estimate() -> None:
    points, colours = wall()
    images = [photograph(view, points, colours, 0.0) for view in VIEWS]
    assert measured(points[:20], VIEWS, lambda k: images[k]) is None, "points"
    assert measured(points, VIEWS[:2], lambda k: images[k]) is None, "photographs"
    assert measured(-points, VIEWS, lambda k: images[k]) is None, "points in front of cameras"
    assert exposures_of(SimpleNamespace(), None, World.single()) is None, "seed points"


def _on_rank(world: World, folder: Path) -> Any:
    data = manager(folder, world)
    reader, reads = data.train_reader, []
    read = reader.read
    reader.read = lambda index: reads.append(index) or read(index)  # type: ignore[method-assign]
    points = torch.rand(6000, 3, generator=torch.Generator().manual_seed(2)) * 2 - 1
    return exposures_of(data, (points, torch.full((6000, 3), 128.0)), world), len(reads)


def test_one_rank_reads_and_all_know(tmp_path: Path) -> None:
    folder = write_capture(tmp_path / "capture")
    (first, reads), (second, none) = run_ranks(_on_rank, 2, folder)
    assert isinstance(first, Exposures) and first == second and (reads, none) == (9, 0)


def test_photographs_are_spread_over_the_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposure_choice, "LOOKED_AT", 3)
    data = manager(write_capture(tmp_path / "capture"), World.single())
    read, reads = data.train_reader.read, []
    data.train_reader.read = lambda index: reads.append(index) or read(index)  # type: ignore[method-assign]
    exposures_of(data, (torch.rand(500, 3), torch.full((500, 3), 128.0)), World.single())
    assert sorted(reads) == [0, 4, 8], "of nine"


def test_a_photograph_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    data = manager(write_capture(tmp_path / "capture"), World.single())

    def damaged(index: int) -> Any:
        raise ValueError(f"photo_{index:02d}.png: broken")

    data.train_reader.read = damaged  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"A photograph cannot be read:\n.*photo_\d\d.png: broken"):
        exposures_of(data, (torch.rand(500, 3), torch.full((500, 3), 128.0)), World.single())


@pytest.mark.skipif(not FOX.is_dir(), reason="the fox's photographs are not here")
def test_the_fox_does_not_differ_until_it_is_made_to() -> None:
    parser = ColmapDataParserConfig(data=FOX, colmap_path=Path("sparse/0"), downscale_factor=4, load_3D_points=True)
    data = read_by(parser)
    seeds = data.train_dataparser_outputs.metadata
    points = seeds["points3D_xyz"], seeds["points3D_rgb"]
    found = exposures_of(data, points, World.single())
    assert found is not None and not differ(found)
    read = data.train_reader.read
    order = torch.randperm(len(data.train_dataset), generator=torch.Generator().manual_seed(3))
    factors = 2 ** torch.linspace(-1, 1, len(order))[order]

    def changed(index: int) -> Any:
        data_of = read(index)
        return {"image": (data_of["image"] * factors[index] ** (1 / 2.2)).clamp(max=255).to(torch.uint8)}

    data.train_reader.read = changed  # type: ignore[method-assign]
    found = exposures_of(data, points, World.single())
    assert found is not None and differ(found)
