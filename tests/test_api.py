"""The library: `ns_multigpu.render`, `ns_multigpu.Step` and the example, where nerfstudio cannot be imported."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ns_multigpu
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import Points
from ns_multigpu.primitives.gaussians.functions import Gaussians
from tests.lib.ranks import run_ranks
from tests.strategies.scene import make_points, make_views

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "tile_minimal.py"
SIZE = (64, 48)


@pytest.fixture
def without_nerfstudio(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a process in which importing nerfstudio or gsplat raises."""
    for name in ("nerfstudio", "gsplat"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f'raise ImportError("{name} is not for the library")\n')
    return {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


def run(environment: dict[str, str], *arguments: str) -> str:
    """Return the output of python with these arguments."""
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def model(count: int = 120) -> dict[str, torch.Tensor]:
    """Return a model with gsplat's keys."""
    raw = {name: value.detach() for name, value in make_points(count, torch.float32).params.items()}
    return {
        **{name: raw[name] for name in ("means", "quats", "scales")}, "opacities": raw["opacities"][:, 0],
        "sh0": raw["features_dc"][:, None], "shN": raw["features_rest"],
    }  # fmt: skip


def cameras(count: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return viewmats, Ks."""
    views = make_views(count, torch.float32, size=SIZE)
    return torch.stack([v.viewmat for v in views]), torch.stack([v.K for v in views])


def drawn(splats: dict[str, torch.Tensor], **options: object) -> tuple[torch.Tensor, torch.Tensor, dict[str, object]]:
    """Return `render` of a model from `cameras`."""
    harmonics = torch.cat([splats["sh0"], splats["shN"]], 1)
    return ns_multigpu.render(
        splats["means"], splats["quats"], splats["scales"].exp(), splats["opacities"].sigmoid(), harmonics, *cameras(),
        *SIZE, sh_degree=3, **options,  # type: ignore[arg-type]
    )  # fmt: skip


def test_importing_the_package_is_cheap(without_nerfstudio: dict[str, str]) -> None:
    said = run(
        without_nerfstudio, "-c",
        "import sys, ns_multigpu; print('torch' in sys.modules, ns_multigpu.__version__, 'render' in dir(ns_multigpu))",
    )  # fmt: skip
    assert said.split() == ["False", ns_multigpu.__version__, "True"]
    with pytest.raises(AttributeError, match="no attribute 'rendre'"):
        _ = ns_multigpu.rendre  # type: ignore[attr-defined]


def test_the_readmes_five_lines_render(without_nerfstudio: dict[str, str]) -> None:
    lines = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf8"), re.DOTALL)[0]
    assert len([line for line in lines.splitlines() if line]) == 5 and "ns_multigpu.render" in lines
    said = run(without_nerfstudio, "-c", f"{lines}print(*images.shape, *alphas.shape, float(alphas.mean()) > 0.05)")
    assert said.split() == ["1", "128", "128", "3", "1", "128", "128", "1", "True"]


def test_images_are_those_of_the_primitive() -> None:
    splats = model()
    backgrounds = torch.rand(4, 3, generator=torch.Generator().manual_seed(3))
    limits = {"far_plane": 3.3, "radius_clip": 5.0}
    images, alphas, info = drawn(splats, backgrounds=backgrounds, render_mode="RGB+ED", **limits)
    views = make_views(4, torch.float32, size=SIZE)
    spread, kind = ns_multigpu.make_strategy("single"), Gaussians(3, depth=True, far=3.3, radius_clip=5.0)
    points = make_points(120, torch.float32)
    expected = spread.render(kind, points, views, spread.plan(views))
    for piece in expected.pixels:
        view = piece.patch.view
        assert torch.allclose(alphas[view], piece.alpha, atol=1e-5)
        wanted = piece.color + (1 - piece.alpha) * backgrounds[view]
        assert torch.allclose(images[view, ..., :3], wanted, atol=1e-5)
        assert torch.allclose(images[view, ..., 3:], piece.depth, atol=1e-4)  # type: ignore[arg-type]
    assert (info["n_cameras"], info["width"], info["height"]) == (4, *SIZE)
    assert len(info["means2d"]) == len(info["gaussian_ids"]) == len(info["radii"]) > 0  # type: ignore[arg-type]
    assert info["patches"] == [(i, 0, 0, *SIZE) for i in range(4)]


def test_plain_colors_and_gradients() -> None:
    splats = {name: value.clone().requires_grad_() for name, value in model().items()}
    colors = torch.rand(120, 3, generator=torch.Generator().manual_seed(4)).requires_grad_()
    plain = (splats["means"], splats["quats"], splats["scales"].exp(), splats["opacities"].sigmoid(), colors)
    images, alphas, info = ns_multigpu.render(*plain, *cameras(), *SIZE, absgrad=True)
    harmonics = (colors.detach()[:, None] - 0.5) / 0.28209479177387814
    same, _, _ = ns_multigpu.render(*plain[:4], harmonics, *cameras(), *SIZE, sh_degree=0)
    assert torch.allclose(images, same, atol=1e-6) and images.shape == (4, 48, 64, 3)
    (images.square().sum() + alphas.sum()).backward()
    for name in ("means", "quats", "scales", "opacities"):
        assert bool(splats[name].grad.isfinite().all()) and float(splats[name].grad.abs().max()) > 0  # type: ignore[union-attr]
    assert float(colors.grad.abs().max()) > 0  # type: ignore[union-attr]
    probe = info["probe"].grad  # type: ignore[attr-defined]
    assert bool((probe >= 0).all()) and float(probe.max()) > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"colors": torch.zeros(5, 4)}, "colors must be"),
        ({"colors": torch.zeros(5, 3, 3), "sh_degree": 1}, "sh_degree 1 wants colors"),
        ({"Ks": torch.zeros(2, 3, 3)}, "viewmats and Ks"),
    ],
)
def test_wrong_shapes_are_named(change: dict[str, object], said: str) -> None:
    given: dict[str, object] = {
        "means": torch.zeros(5, 3), "quats": torch.ones(5, 4), "scales": torch.ones(5, 3), "opacities": torch.ones(5),
        "colors": torch.zeros(5, 3), "viewmats": torch.eye(4)[None], "Ks": torch.eye(3)[None], "width": 32,
        "height": 32, **change,
    }  # fmt: skip
    with pytest.raises(ValueError, match=said):
        ns_multigpu.render(**given)  # type: ignore[arg-type]


def test_a_strategy_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="there is no strategy 'tiles': choose from single, batch, tile"):
        ns_multigpu.make_strategy("tiles")
    with pytest.raises(ValueError, match="splats must have the keys"):
        ns_multigpu.Step({"means": torch.zeros(1, 3)}, *SIZE)


def trained(world: World, strategy: str, steps: int = 4) -> dict[str, object]:
    """Return the results of a few steps of two views, each starting with exceeded capacities."""
    viewmats, Ks = cameras()
    images = drawn(model())[0].clamp(0, 1).detach()
    splats = {**model(), "sh0": torch.zeros(120, 1, 3)}
    step = ns_multigpu.Step(splats, *SIZE, 2, ns_multigpu.make_strategy(strategy, world), lr={"sh0": 0.05})
    small = step._settings
    step._settings = type(small)(*SIZE, 2, 0.2, 32, 32, 64)
    step._step = step._made()
    losses, psnrs = [], []
    for number in range(steps):
        some = [2 * number % 4, 2 * number % 4 + 1]
        losses.append(step(viewmats[some], Ks[some], images[some], torch.full((3,), 0.2)))
        psnrs.append(step.psnr())
    return {"losses": losses, "psnrs": psnrs, "model": step.gather(), "held": len(step.splats["means"])}


@pytest.mark.parametrize("strategy", ["tile", "batch"])
def test_two_ranks_train_as_one_does(strategy: str) -> None:
    expected = trained(World.single(), "single")
    losses = torch.tensor(expected["losses"])
    assert losses[-1] < losses[1] and expected["psnrs"][-1] > expected["psnrs"][1]  # type: ignore[index]
    outcomes = run_ranks(trained, 2, strategy)
    for outcome in outcomes:
        assert torch.allclose(torch.tensor(outcome["losses"]), losses, rtol=1e-4)
        assert outcome["psnrs"] == pytest.approx(expected["psnrs"], abs=1e-3)
        order, wanted = (found["model"]["means"][:, 0].argsort() for found in (outcome, expected))  # type: ignore[index]
        for name, value in expected["model"].items():  # type: ignore[attr-defined]
            assert torch.allclose(outcome["model"][name][order], value[wanted], atol=2e-3), name
    assert sum(outcome["held"] for outcome in outcomes) == (120 if strategy == "tile" else 240)


def test_images_of_two_ranks_add_up() -> None:
    whole = drawn(model())[0]
    assert torch.allclose(sum(run_ranks(piece_of, 2)), whole, atol=1e-5)  # type: ignore[arg-type]


def piece_of(world: World) -> torch.Tensor:
    """Return the part of the images that a rank of `tile` renders."""
    spread = ns_multigpu.make_strategy("tile", world)
    held = spread.placement.hold(Points(model()), world).params
    images, _, info = drawn(dict(held), strategy=spread)
    assert info["patches"] and float(images.abs().sum()) > 0
    return images.detach()


def test_the_example_trains_with_two_workers(without_nerfstudio: dict[str, str]) -> None:
    assert len(EXAMPLE.read_text("utf8").splitlines()) <= 150
    said = run(
        without_nerfstudio, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE),
        "--device", "cpu", "--steps", "20", "--size", "48", "--points", "300", "--print-every", "10",
    )  # fmt: skip
    found = re.findall(r"^step (\d+): loss ([\d.]+), PSNR ([\d.]+) dB$", said, re.MULTILINE)
    assert [int(number) for number, _, _ in found] == [1, 10, 20], said
    losses, psnrs = ([float(row[k]) for row in found] for k in (1, 2))
    assert losses[0] > losses[1] > losses[2] and psnrs[2] > psnrs[0] + 3
