"""`benchmarks.captures.surfels`: what it runs, and that gsplat's 2D Gaussians are put into splatfacto rightly."""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gsplat import DefaultStrategy

from benchmarks.captures import surfels
from benchmarks.captures.gsplat_surfels import FLAT, Peer
from benchmarks.captures.recipe_run import draw_normals
from benchmarks.captures.surfels import Comparison, arguments, table, words_of
from ns_multigpu.core.types import Patch, Pixels, View
from ns_multigpu.primitives.surfels.losses import normal_loss, normals_of_depth

END = ["--", "colmap", "--data", "fox"]
SIZE = (9, 7)


def test_both_get_the_same_arguments(tmp_path: Path) -> None:
    options = arguments(["--images", "70", "--normal-loss", "0.1", "--output", str(tmp_path), *END])
    ours, theirs = (words_of(way, 3, tmp_path, options) for way in ("ours", "gsplat"))
    for words in (ours, theirs):
        assert words[-3:] == END[1:]
        named = dict(pairwise(words))
        assert {named.get(name) for name in ("--images", "--max-num-images")} == {"70", None}
        assert {named.get(name) for name in ("--normal-loss", "--pipeline.model.normal-loss")} == {"0.1", None}
        start = {named.get(name) for name in ("--normal-loss-start", "--pipeline.model.normal-loss-start")}
        assert start == {"35", None}
        assert {named.get(name) for name in ("--seed", "--machine.seed")} == {"3", None}
    assert any("densify-grad-thresh 0.0002" in word for word in theirs) and theirs[-4] == "--"


@pytest.mark.parametrize("wrong", [["--images", "0"], ["--device", "cpu"], ["--ways", "nobody"]])
def test_unavailable_variant_is_reported(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments([*wrong, *END])
    assert wrong[0] in capsys.readouterr().err


def test_results_are_kept_and_missing_ones_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def called(function: str, words: Any, log: Path, output: Path, *more: Any, seconds: float | None) -> float | None:
        given.append((function, more, seconds))
        if function == "train_splatfacto":
            return None
        scores = {"psnr": 20.0, "ssim": 0.5, "gaussians": 7, "train_seconds": 1.0, "peak_mib": None}
        output.write_text(json.dumps(scores))
        return 2.0

    monkeypatch.setattr(surfels, "called", called)
    words = ["--apart", "--output", str(tmp_path), "--picture", str(tmp_path / "a.png"), "--seeds", "1", "2"]
    comparison = Comparison(arguments([*words, "--seconds", "9", *END]))
    assert comparison.go() == 2
    assert [(one["way"], one["seed"]) for one in comparison.results] == [("ours", 1), ("ours", 2)]
    pictures = [more for function, more, _ in given if function == "train_ours"]
    assert pictures == [((3, tmp_path / "a.png"),), (None,)] and {seconds for *_, seconds in given} == {9.0}
    assert table(comparison.results).row_count == 2 and comparison.summary()["options"]["images"] == 7000


def drawing(means: torch.Tensor, *args: Any, **options: Any) -> Any:
    """Stand in for gsplat's function: some image of the points, with its gradient for densification."""
    width, height = args[6:8]
    gradient = torch.zeros(1, len(means), 2, requires_grad=True)
    value = (means.sum() + gradient.sum()).expand(1, height, width, 4) * torch.tensor([1.0, 2.0, 3.0, 4.0])
    normals = torch.nn.functional.normalize(
        torch.arange(height * width * 3.0).view(1, height, width, 3) % 7 - 3, dim=-1
    )
    info = {"gradient_2dgs": gradient, "radii": torch.ones(1, len(means)), "width": width, "height": height}
    info |= {"n_cameras": 1, "gaussian_ids": None}
    drawing.asked = options  # type: ignore[attr-defined]
    alpha = torch.full((1, height, width, 1), 0.5)
    return value, alpha, normals, normals[0].flip(0), None, None, info


class Model:
    """As much of splatfacto's as the peer looks at."""

    def __init__(self) -> None:
        shapes = {"means": 3, "scales": 3, "quats": 4, "opacities": 1}
        self.gauss_params = {name: torch.nn.Parameter(torch.ones(5, size)) for name, size in shapes.items()}
        self.strategy, self.training, self.step = DefaultStrategy(refine_start_iter=0, refine_every=1), True, 10

    def get_loss_dict(self, *_: Any) -> dict[str, torch.Tensor]:
        return {"main_loss": torch.zeros(())}


def draw(peer: Peer, model: Model, **options: Any) -> Any:
    width, height = SIZE
    p: Any = model.gauss_params
    usual = {"near_plane": 0.01, "far_plane": 1e10, "sh_degree": 0, "render_mode": "RGB", "rasterize_mode": "classic"}
    usual |= {"packed": False, "sparse_grad": False, "absgrad": False, "tile_size": 16}
    return peer.rasterization(
        p["means"], p["quats"], p["scales"].exp(), p["opacities"], p["means"], torch.eye(4)[None], torch.eye(3)[None],
        width, height, **{**usual, **options},
    )  # fmt: skip


def test_gsplats_2d_gaussians_in_splatfacto() -> None:
    peer, model = Peer(0.5, 11, drawing), Model()
    peer.join(SimpleNamespace(pipeline=SimpleNamespace(model=model)))
    assert bool((model.gauss_params["scales"][:, 2] == FLAT).all()) and bool((model.gauss_params["scales"] == 1).any())
    image, alpha, info = draw(peer, model)
    assert image.shape == (1, SIZE[1], SIZE[0], 3) and alpha.shape[-1] == 1
    assert draw(peer, model, render_mode="RGB+ED")[0].shape[-1] == 4
    assert drawing.asked["render_mode"] == "RGB+ED" and drawing.asked["far_plane"] == 1e10  # type: ignore[attr-defined]
    image, alpha, info = draw(peer, model)
    state = model.strategy.initialize_state()
    optimizers = {name: torch.optim.Adam([p]) for name, p in model.gauss_params.items()}
    model.strategy.step_pre_backward(model.gauss_params, optimizers, state, 10, info)
    image.sum().backward()
    model.strategy._update_state(model.gauss_params, state, info)
    assert bool((state["grad2d"] > 0).all()), "the gradient of 2D Gaussians is what counts"
    assert set(model.get_loss_dict()) == {"main_loss"}
    model.step = 11
    assert float(model.get_loss_dict()["normals_loss"]) == pytest.approx(0.5 * float(peer.normal_loss()))
    model.training = False
    assert set(model.get_loss_dict()) == {"main_loss"}
    for wrong in ({"absgrad": True}, {"packed": True}, {"rasterize_mode": "antialiased"}):
        with pytest.raises(NotImplementedError):
            draw(peer, model, **wrong)


def test_normal_loss_equals_ours() -> None:
    width, height = SIZE
    g = torch.Generator().manual_seed(1)
    view = View(torch.eye(4), torch.tensor([[8.0, 0, 4.5], [0, 8, 3.5], [0, 0, 1]]), width, height)
    depth, alpha = 1 + torch.rand(height, width, 1, generator=g), torch.rand(height, width, 1, generator=g)
    normals = torch.randn(height, width, 3, generator=g)
    pixels = Pixels(Patch.whole(0, view), normals, alpha, depth, extra={"normals": normals})
    peer = Peer(1.0, 0)
    peer._normals = (normals, normals_of_depth(depth, view, (0, 0)), alpha)
    torch.testing.assert_close(peer.normal_loss(), normal_loss(pixels, view))


def test_the_picture_has_photographs_renderings_and_normals(tmp_path: Path) -> None:
    class Cameras:
        def __getitem__(self, some: slice) -> int:
            return some.start

    class Views:
        cameras = Cameras()

        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"image": torch.full((4, 6, 4), index / 10)}

    def outputs(camera: int) -> dict[str, torch.Tensor]:
        return {"rgb": torch.full((4, 6, 3), 0.5), "normals": torch.full((4, 6, 3), 1.0 - camera / 10)}

    model = SimpleNamespace(get_outputs_for_camera=outputs)
    data = SimpleNamespace(eval_dataset=Views())
    pipeline = SimpleNamespace(eval=lambda: None, datamanager=data, model=model)
    draw_normals(pipeline, 2, tmp_path / "a.png")
    from PIL import Image

    with Image.open(tmp_path / "a.png") as image:
        assert image.size == (18, 8)
        assert [image.getpixel((x, y)) for y in (0, 4) for x in (0, 6, 12)] == [
            (v, v, v) for v in (0, 128, 255, 51, 128, 204)
        ]
