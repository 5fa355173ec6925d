"""gsplat's 2D Gaussians, as `benchmarks.captures.recipes` puts them into splatfacto."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gsplat import DefaultStrategy

from benchmarks.captures.gsplat_surfels import FLAT, Peer
from ns_multigpu.core.types import Patch, Pixels, View
from ns_multigpu.primitives.surfels.losses import normal_loss, normals_of_depth

SIZE = (9, 7)


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
