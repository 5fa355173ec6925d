"""nerfstudio's commands on a radiance field, with helpers: each has its cells, and all is as one process has it."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.model_components.renderers import background_color_override_context
from torch import Tensor

from ns_multigpu.core.dist.collectives import broadcast_object
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint.verify import read_checkpoint_file
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.helpers import obey
from ns_multigpu.plugin.launch.process_world import set_world
from ns_multigpu.plugin.radiance.run.team_plan import plan_for_field, ranks_for
from ns_multigpu.plugin.render.team import Devices
from ns_multigpu.plugin.run.config import read_config
from ns_multigpu.plugin.tools.models import load_model
from tests.lib.radiance_scene import rays
from tests.lib.ranks import run_ranks
from tests.plugin.radiance.run.test_radiance_run import CELLS
from tests.plugin.radiance.run.test_radiance_tools import write_run

GB = 10**9


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("field"))


def checkpoint_of(run: Path) -> Path:
    (checkpoint,) = (run.parent / "nerfstudio_models").glob("*.ckpt")
    return checkpoint


def loaded(world: World, run: Path) -> Any:
    """Return the pipeline as each of several processes has it."""
    set_world(world)
    torch.manual_seed(5)
    try:
        return load_model(read_config(run), checkpoint_of(run), world, "test")
    finally:
        set_world(None)


def looked(pipeline: Any) -> dict[str, Any]:
    """Return rank 0's results for images and rays, requested from this thread and from others."""
    model, seen = pipeline.model, dict[str, Any]()
    camera = pipeline.datamanager.eval_dataset.cameras[0:1]
    crop = OrientedBox.from_params((0.0, 0.0, 0.0), (0.0, 0.0, 0.3), (1.0, 1.0, 1.0))

    def look(name: str, box: OrientedBox | None) -> None:
        seen[name] = model.get_outputs_for_camera(camera, obb_box=box)

    # As nerfstudio's viewer does for two pages at once. It sets the background for all threads.
    threads = [threading.Thread(target=look, args=(name, None)) for name in ("there", "there too")]
    with background_color_override_context(torch.tensor([0.1, 0.2, 0.3])):
        look("here", None)
        look("crop", crop)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    bundle: RayBundle = rays()
    bundle.camera_indices = torch.zeros(len(bundle), 1, dtype=torch.int64)
    with torch.no_grad():
        seen["rays"] = model(bundle)
    seen["metrics"] = pipeline.get_average_eval_image_metrics(get_std=True)
    seen["view"] = pipeline.get_eval_image_metrics_and_images(0)
    seen["batch"] = pipeline.datamanager.next_train(0)[1]
    return seen


def led(world: World, run: Path) -> tuple[list[int], dict[str, Any], bool]:
    """As `main` of a helper has it, and rank 0 with its team; the cells of this rank, and what rank 0 has seen."""
    pipeline = loaded(world, run)
    cells = [int(number) for number in pipeline.model.cells]
    if not world.is_main:
        while (request := broadcast_object(None, 0, world)) is not None:
            obey(pipeline, request)
        return cells, {}, False
    pipeline.team = SimpleNamespace(call=lambda what, *args: broadcast_object((what, args, {}), 0, world))
    pipeline.renders.lead_always()
    seen = looked(pipeline)
    rate = pipeline.renders.rate is not None
    broadcast_object(None, 0, world)
    return cells, seen, rate


def _near(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name in expected.keys() - {"num_rays_per_sec", "fps", "num_rays_per_sec_std", "fps_std"}:
            _near(found[name], expected[name], f"{where} {name}")
    elif isinstance(expected, tuple):
        for a, b in zip(found, expected, strict=True):
            _near(a, b, where)
    elif isinstance(expected, Tensor):
        assert found.shape == expected.shape and torch.allclose(found.float(), expected.float(), atol=1e-5), where
    else:
        assert found == pytest.approx(expected, rel=1e-5), where


def test_helpers_render_what_one_process_renders(run: Path) -> None:
    expected = looked(loaded(World.single(), run))
    assert expected["here"]["rgb"].std() > 0.01 and not torch.equal(expected["here"]["rgb"], expected["crop"]["rgb"])
    found = run_ranks(led, 2, run)
    _near(found[0][1], expected, "seen")
    assert all(torch.equal(found[0][1][there]["rgb"], found[0][1]["here"]["rgb"]) for there in ("there", "there too"))
    assert found[0][2], "the viewer scales moving pictures by the rate"
    assert [cells for cells, *_ in found] == [[0], [1, 2]]


def _failing(world: World, run: Path) -> list[str]:
    """Return rank 0's results for an image that fails half way, and for the next one."""
    pipeline = loaded(world, run)
    if not world.is_main:
        obey(pipeline, broadcast_object(None, 0, world))
        return []
    pipeline.renders.lead_always()
    camera, said = pipeline.datamanager.eval_dataset.cameras[0:1], list[str]()
    usual = pipeline.model.get_outputs

    def fail(rays: RayBundle) -> Any:
        usual(rays)  # so that no rank waits for this one
        raise MemoryError("out of memory")

    pipeline.model.get_outputs = fail
    for _ in range(2):
        try:
            pipeline.model.get_outputs_for_camera(camera)
        except (MemoryError, RuntimeError) as error:
            said.append(str(error))
    return said


def test_failed_image_does_not_block_helpers(run: Path) -> None:
    said = run_ranks(_failing, 2, run)[0]
    assert said[0] == "out of memory" and "failed half way" in said[1]


# ---- how many processes, and who holds what ----


def test_number_of_processes_for_a_field() -> None:
    def ranks(
        cells: list[int], kind: Any = "cuda", count: int = 4, free_gb: float | None = 10, asked: int | None = None
    ):
        memory = None if free_gb is None else free_gb * GB
        return ranks_for([cell * GB for cell in cells], GB, Devices(kind, count, memory, asked))

    assert ranks([1, 1]) == 2, "no more than there are cells"
    assert ranks([1] * 8) == 4, "no more than there are GPUs"
    assert ranks([1]) == 1
    assert ranks([1] * 8, asked=3) == 3 and ranks([1] * 8, asked=16) == 4 and ranks([1] * 2, asked=3) == 2
    assert ranks([1] * 8, asked=1) == 1
    assert ranks([1] * 8, "cpu", 0, None) == 1, "on CPUs only if asked"
    assert ranks([1] * 8, "cpu", 0, None, asked=5) == 5 and ranks([1] * 3, "cpu", 0, None, asked=5) == 3
    assert ranks([9, 9, 9, 9]) == 4
    with pytest.raises(InputError, match=r"takes 13 GB, and 1 GPU of which each may hold 10 GB .* 2 are needed"):
        ranks([4, 4, 4], count=1)
    with pytest.raises(InputError, match=r"takes 17 GB, and 2 processes of which .* 4 cells: 3 are needed"):
        ranks([8, 2, 3, 3], "cpu", 0, 9.5, asked=2)
    with pytest.raises(InputError, match="train with more cells"):
        ranks([9, 10], asked=2)


def test_owners_of_cells_are_reported(run: Path, tmp_path: Path) -> None:
    def line(of: Path, asked: int, memory: float | None = None) -> str:
        checkpoint = checkpoint_of(of)
        state = read_checkpoint_file(checkpoint)["pipeline"]
        return plan_for_field(state, checkpoint, Devices("cpu", 0, memory, asked)).line

    assert line(run, 2) == "3 cells on 2 processes: cell 0; cells 1 to 2."
    assert line(run, 9) == "3 cells on 3 processes: cell 0; cell 1; cell 2."
    model = loaded(World.single(), run).model
    cells = [sum(p.nbytes for p in cell.parameters()) for cell in model.cells.values()]
    shared = sum(p.nbytes for p in model.shared_parameters().values())
    own = sum(p.nbytes for p in model.own_parameters().values())
    assert own > 2 * max(p.nbytes for p in model.own_parameters().values()) and len(cells) == CELLS
    assert line(run, 1, shared + own) != "" and line(run, 3, shared + own / 3 + 1) != ""
    with pytest.raises(InputError, match="3 are needed"):
        line(run, 2, shared + own / 3 + 1)
    with pytest.raises(InputError, match="2 are needed"):
        line(run, 1, shared + own - 1)
    one = write_run(tmp_path, spread="ddp")
    assert line(one, 2) == "One field on 2 processes: each holds all of it, and takes its share of rays."
