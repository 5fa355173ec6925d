"""Models on the aggregate device: splats and a diffusion model equal those on the CPU, for any number of members."""

import os
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import Library

import cuda_ext
import ns_multigpu
from ns_multigpu import aggregate
from tests.cuda_ext.scenes import random_scene
from tests.strategies.scene import make_points, make_views

EXAMPLES = Path(__file__).parents[3] / "examples"
SIZE = (40, 44)
Use = Callable[..., None]


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def drawn(device: str, count: int) -> list[Tensor]:
    """Return pixels, alphas, a loss and all gradients of a tiny model of splats in some views, on the CPU."""
    points, views = make_points(60, torch.float32, device), make_views(3, torch.float32, device, SIZE)[:count]
    params = {name: value.detach().requires_grad_() for name, value in points.params.items()}
    viewmats = torch.stack([view.viewmat for view in views]).requires_grad_()
    images, alphas, _ = ns_multigpu.render(
        params["means"], params["quats"], params["scales"].exp(), params["opacities"][:, 0].sigmoid(),
        torch.cat([params["features_dc"][:, None], params["features_rest"]], 1),
        viewmats, torch.stack([view.K for view in views]), *SIZE, sh_degree=3,
    )  # fmt: skip
    loss = images.square().mean() + alphas.mean()
    loss.backward()
    found = [images, alphas, loss, *(value.grad for value in params.values()), viewmats.grad]
    return [value.detach().cpu() for value in found]  # type: ignore[union-attr]


@pytest.mark.parametrize("members", [1, 2, 3])
@pytest.mark.parametrize(("operators", "views"), [("native", 1), ("native", 2), ("reference", 2)])
def test_splats_equal_single(use: Use, members: int, operators: str, views: int) -> None:
    """Compiled operators on each member, points by shard and tiles by member; and plain torch."""
    expected = drawn("cpu", views)
    use(members, small_bytes=1024 if views > 1 else 32)
    with cuda_ext.use_reference() if operators == "reference" else nullcontext():
        found = drawn("multigpu", views)
    assert min(aggregate.calls()) > (50 if operators == "reference" else 20)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-3 if operators == "reference" else 1e-5)
    assert float(expected[0].std()) > 0.01 and float(expected[3].abs().max()) > 1e-4


def test_rows_of_tiles_name_places_of_the_whole_lists(use: Use) -> None:
    """Two patches, cut between rows of tiles: each pixel's last splat, and the gradient of the probe."""
    found = []
    for device in ("cpu", "multigpu"):
        use(3, small_bytes=1024)
        scene = random_scene().on(device)
        view_ids, point_ids = scene.cull()
        means2d, conics, depths, opacities, radii = scene.project(view_ids, point_ids)
        patches = [0, 8, 3, 90, 61, 1, 0, 0, 80, 72]
        lists = cuda_ext.intersect(means2d, conics, opacities, radii, depths, view_ids, patches)
        probe = torch.zeros_like(means2d, requires_grad=True)
        colors = torch.stack([depths, opacities], 1)
        out, _, last = cuda_ext.rasterize(means2d, conics, opacities, colors, *lists, patches, absgrad_probe=probe)
        out.sum().backward()
        found.append([value.detach().cpu() for value in (out, last, probe.grad, *lists)])  # type: ignore[union-attr]
    assert min(aggregate.calls()) >= 5 and int(found[0][1].max()) > 100
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)


@pytest.mark.skipif("NS_MULTIGPU_TEST_GPUS" in os.environ, reason="GPUs keep a state of their own")
def test_each_member_gets_its_state_back(use: Use) -> None:
    """Kernels of GPUs keep a state for the gradient, those of the CPU none: these stand in for them."""
    use(3, small_bytes=256)
    kept, given = list[Tensor](), list[Tensor]()

    def forward(means2d: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        pixels = sum((x1 - x0) * (y1 - y0) for _, x0, y0, x1, y1 in zip(*[iter(rest[5])] * 5, strict=True))
        kept.append(torch.rand(32 * (1 + len(kept))))
        return torch.zeros(pixels, 2), torch.zeros(pixels), torch.zeros(pixels, dtype=torch.int32), kept[-1]

    def backward(
        means2d: Tensor, conics: Tensor, opacities: Tensor, features: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        given.append(rest[6].clone())
        return *(torch.ones_like(value) for value in (means2d, conics, opacities, features)), torch.zeros(0, 2)

    scene = random_scene(views=1).on("multigpu")
    rows = scene.cull()
    means2d, conics, depths, opacities, radii = scene.project(*rows)
    lists = cuda_ext.intersect(means2d, conics, opacities, radii, depths, rows[0], [0, 0, 0, 90, 61])
    library = Library("ns_multigpu", "IMPL")
    library.impl("rasterize", forward, "CPU", allow_override=True)
    library.impl("rasterize_backward", backward, "CPU", allow_override=True)
    try:
        colors = torch.stack([depths, opacities], 1).requires_grad_()
        out, *_ = cuda_ext.rasterize(means2d, conics, opacities, colors, *lists, [0, 0, 0, 90, 61])
        out.sum().backward()
    finally:
        library._destroy()
    assert len(kept) == 3 and [len(one) for one in given] == [32, 64, 96]
    assert all(torch.equal(one, other) for one, other in zip(kept, given, strict=True))
    assert colors.grad is not None and float(colors.grad.cpu().max()) == 3


@pytest.mark.parametrize("size", [(40, 20), (13, 12)])
def test_the_loss_by_rows(use: Use, size: tuple[int, int]) -> None:
    """Bands of rows with halos, which overlap in the smaller image: sums and the gradient of L1 and SSIM."""
    height, width = size
    generator = torch.Generator().manual_seed(1)
    image, target = (torch.rand(height, width, 3, generator=generator) for _ in range(2))
    found = []
    for device in ("cpu", "multigpu"):
        use(3, small_bytes=256)
        pred = image.clone().to(device).requires_grad_()
        l1, ssim, _ = cuda_ext.l1_ssim(pred, target.to(device), (0, 2, width - 1, height))
        (0.3 * l1 - 2 * ssim).backward()
        found.append([value.detach().cpu() for value in (l1, ssim, pred.grad)])  # type: ignore[union-attr]
    assert min(aggregate.calls()) >= 2
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert float(found[0][2].abs().min(-1).values.max()) > 0.3


def test_lists_of_one_view(use: Use) -> None:
    """Points by shard and tiles by member give the rows and the lists of one device."""
    found = []
    for device in ("cpu", "multigpu"):
        use(3, small_bytes=256)
        scene = random_scene(views=1).on(device)
        before = aggregate.calls()
        view_ids, point_ids = scene.cull()
        means2d, conics, depths, opacities, radii = scene.project(view_ids, point_ids)
        lists = cuda_ext.intersect(means2d, conics, opacities, radii, depths, view_ids, [0, 8, 3, 90, 61])
        calls = [now - then for now, then in zip(aggregate.calls(), before, strict=True)]
        found.append([value.cpu() for value in (view_ids, point_ids, *lists)])
    assert min(calls) == 3, "each member culls, projects and lists"
    assert found[0][1].numel() > 20 and found[0][3].numel() > 200
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_splats_train(use: Use, examples: None) -> None:
    import aggregate_splats

    expected = aggregate_splats.train("cpu", 9, 24, 60)
    use(2, small_bytes=256)
    found = aggregate_splats.train("multigpu", 9, 24, 60)
    assert found == pytest.approx(expected, rel=1e-3) and found[8] < found[0]
    assert min(aggregate.calls()) > 100


def test_the_diffusion_example(
    use: Use, examples: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One member and three write the same pictures, every operator is distributed, and the CPU agrees."""
    import aggregate_diffusion

    files = []
    for members in (1, 3):
        use(members)
        files.append(tmp_path / f"{members}.ppm")
        words = ["--host-members", str(members), "--pictures", "5", "--output", str(files[-1])]
        monkeypatch.setattr(sys, "argv", ["aggregate_diffusion.py", *words])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            aggregate_diffusion.main()
    assert min(aggregate.calls()) > 300 and str(aggregate.calls()) in capsys.readouterr().out
    one, three = (torch.tensor(list(file.read_bytes()[13:])) for file in files)
    assert (one - three).abs().max() <= 1 and one.float().std() > 20
    pixels = (255 * torch.cat(list(aggregate_diffusion.sample("cpu", 5)), -1)).byte().permute(1, 2, 0).flatten()
    assert len(pixels) == len(one) and (pixels - one).abs().max() <= 1
