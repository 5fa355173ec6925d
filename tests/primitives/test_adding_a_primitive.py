"""The primitive on the page that says how to add one: it keeps the law, and it learns as on one rank; the trainer takes
it, and goes on from its checkpoints."""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.collectives import add_up, all_gather_rows
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.primitive import Primitive
from ns_multigpu.core.schema import floats, names
from ns_multigpu.core.step.loss import photometric_loss
from ns_multigpu.core.types import Patch, Points, View
from strategies import STRATEGIES
from tests.lib.ranks import run_ranks
from tests.lib.training_run import follow, write_capture
from tests.strategies.scene import make_points, make_views
from tests.strategies.test_law import Outcome, check, stitch, take_step

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "adding-a-primitive.md"
STEPS, POINTS, VIEWS, SIZE = 200, 24, 3, (28, 40)


def blocks_of_the_page(count: int) -> dict[str, Any]:
    """Run the page's first blocks of code: one makes the primitive, two the method as well."""
    module = ModuleType("discs")
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[:count]:
        exec(compile(code, str(PAGE), "exec"), module.__dict__)
    return module.__dict__


def of_the_page() -> Primitive:
    return blocks_of_the_page(1)["Discs"]()


def discs(count: int, seed: int = 0) -> Points:
    made = make_points(count, torch.float64, seed=seed).params
    sources = {"means": "means", "sizes": "scales", "opacities": "opacities", "colors": "features_dc"}
    params = {name: made[source].detach() for name, source in sources.items()}
    params["sizes"] = params["sizes"][:, :1] + 0.7
    return Points({name: value.clone().requires_grad_() for name, value in params.items()})


def step(world: World, strategy: str, views: int, points: int) -> Outcome:
    kind = of_the_page(), discs(points)
    return take_step(STRATEGIES[strategy](world), "discs", views, points, torch.float64, kind=kind)


def test_new_schema_describes_a_point() -> None:
    schema, points = of_the_page().schema, discs(POINTS)
    assert names(schema) == tuple(points.params)
    assert [(POINTS, *parameter.shape) for parameter in schema] == [tuple(p.shape) for p in points.params.values()]
    assert floats(schema, 3) == 8


@pytest.mark.parametrize(
    ("strategy", "size"), [("single", 1), *((name, size) for name in ("batch", "tile") for size in (1, 2, 3))]
)
def test_it_keeps_the_law(strategy: str, size: int) -> None:
    expected = step(World.single(), "single", 5, 60)
    assert sum(float(image.std()) > 0.02 for image in stitch(expected["images"]).values()) >= 4
    assert all(float(gradient.abs().sum()) > 0 for gradient in expected["gradients"].values())
    check(run_ranks(step, size, strategy, 5, 60), expected, torch.float64)


@pytest.mark.parametrize("strategy", ["batch", "tile"])
@pytest.mark.parametrize(("views", "points"), [(1, 0), (2, 1)])
def test_ranks_without_views_and_models_without_points(strategy: str, views: int, points: int) -> None:
    check(run_ranks(step, 3, strategy, views, points), step(World.single(), "single", views, points), torch.float64)


def learn(world: World, strategy: str) -> list[float]:
    """Return the losses of Adam's steps from discs in grey towards images of others, of the whole batch."""
    kind, spread, views = of_the_page(), STRATEGIES[strategy](world), make_views(VIEWS, torch.float64, size=SIZE)
    targets = [picture(kind, discs(POINTS, seed=1), view) for view in views]
    start = discs(POINTS)
    held = spread.placement.hold(start, world)
    rates = {parameter.name: 10 * parameter.rate for parameter in kind.schema}
    adam = torch.optim.Adam([{"params": [p], "lr": rates[name]} for name, p in held.params.items()], eps=1e-8)
    losses = []
    for _ in range(STEPS):
        plan = spread.plan(views)
        rendering = spread.render(kind, held, views, plan)
        loss = sum((row.sum() * 0 for row in rendering.splats.rows.values() if row.requires_grad), torch.zeros(()))
        for pixels in rendering.pixels:
            view = views[pixels.patch.view]
            x0, y0, x1, y1 = pixels.patch.rendered(view)
            target = targets[pixels.patch.view][y0:y1, x0:x1]
            loss = loss + photometric_loss(pixels.color, target, pixels.patch, view, 0.2) / len(views)
        adam.zero_grad()
        spread.gradients.begin_backward(held.params.values())
        loss.backward()
        spread.gradients.end_backward()
        adam.step()
        losses.append(float(add_up(loss.detach().reshape(1), world)))
    return losses


def picture(kind: Primitive, points: Points, view: View) -> torch.Tensor:
    with torch.no_grad():
        splats = kind.splat(points, kind.cull(points, [view], [0]), [view])
        return kind.render(splats, [Patch.whole(0, view)], [view])[0].color


def test_it_learns_as_on_one_rank() -> None:
    (expected,) = run_ranks(learn, 1, "single")
    assert expected[-1] < 0.6 * expected[0]
    for losses in run_ranks(learn, 2, "tile"):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


def train(world: World, folder: Path, strategy: str, steps: int, begun: Path | None) -> tuple[dict[str, Any], int]:
    """Train it and leave a checkpoint in `folder`, and return sums over points, and the first step."""
    from nerfstudio.configs.method_configs import all_methods

    all_methods["discs"] = blocks_of_the_page(2)["method"]
    options: dict[str, Any] = {
        "pipeline.strategy": strategy, "pipeline.views_per_step": 2, "pipeline.model.num_downscales": 0,
        "load_dir": begun,
    }  # fmt: skip
    runs, saved = folder / f"runs-{strategy}-{world.size}-{steps}", folder / f"{strategy}-{steps}"
    trainer = follow(world, folder / "tiny", runs, options, steps, 1, method="discs", double=False)
    saved.mkdir(exist_ok=True)
    assert trainer.checkpoints.write(steps - 1, saved) == ""
    model = trainer.pipeline.model
    whole = {
        name: all_gather_rows(value.detach(), world)[0] if model.sharded else value.detach()
        for name, value in model.gauss_params.items()
    }
    # In `tile` points are in another order.
    return {name: value.sum(0) for name, value in whole.items()}, trainer._start_step


def test_trainer_trains_and_resumes_it(tmp_path: Path) -> None:
    write_capture(tmp_path / "tiny", wide=False)
    ((expected, start),) = run_ranks(train, 1, tmp_path, "batch", 12, None)
    assert start == 0 and expected.keys() == set(names(of_the_page().schema))
    run_ranks(train, 2, tmp_path, "tile", 6, None)
    for strategy, ranks in (("tile", 1), ("batch", 2)):
        for found, start in run_ranks(train, ranks, tmp_path, strategy, 12, tmp_path / "tile-6"):
            assert start == 6
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
