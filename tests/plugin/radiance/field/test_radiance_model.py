"""nerfacto in cells: one cell is nerfacto, and N cells on N ranks are N cells on one."""

import functools
from typing import Any

import pytest
import torch
import tyro
from nerfstudio.data.scene_box import SceneBox
from nerfstudio.models.nerfacto import NerfactoModelConfig

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.radiance.field.draws import drawn, mixed
from ns_multigpu.plugin.radiance.field.model import NerfactoXLModel, NerfactoXLModelConfig
from ns_multigpu.radiance.exchange import sum_gradients
from ns_multigpu.radiance.integrals import Weighted
from ns_multigpu.radiance.segments import clip
from tests.lib.radiance_scene import IMAGES, SMALL, fog, model, moved_cameras, rays, truth
from tests.lib.ranks import run_ranks


def _nerfacto(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, Any]:
    """Return nerfstudio's own model, and ours with one cell that has its parameters."""
    ours = model(World.single(), 1, **options)
    # Its weights would be downloaded, and are not looked at.
    monkeypatch.setattr(
        "torchmetrics.image.lpip.LearnedPerceptualImagePatchSimilarity", lambda **_: torch.nn.Identity()
    )
    options.pop("density", None)
    theirs: Any = NerfactoModelConfig(**{**SMALL, **options}).setup(
        scene_box=SceneBox(torch.tensor([[-1.0, -1, -1], [1, 1, 1]])), num_train_data=IMAGES, seed_points=None,
        metadata={}, device="cpu", grad_scaler=None,
    )  # fmt: skip
    cell = ours.cells["0"]
    parts = (("grid.", "mlp_base.model.0."), ("density.", "mlp_base.model.1."))
    own = {**cell.field.state_dict(), **ours.shared.state_dict()}
    own |= {to + k.removeprefix(at): v for k, v in own.items() for at, to in parts if k.startswith(at)}
    theirs.field.load_state_dict(own, strict=False)
    assert {n for n, p in theirs.field.named_parameters() if not torch.equal(p, own[n])} == set()
    theirs.proposal_networks.load_state_dict(cell.proposal_networks.state_dict(), strict=False)
    return theirs, ours


@pytest.mark.parametrize(
    "options", [{}, {"density": "cell"}, {"background_color": "white"}, {"proposal_initial_sampler": "uniform"}]
)
def test_one_cell_is_nerfacto(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the unit cube, where both contractions leave positions as they are."""
    theirs, ours = _nerfacto(monkeypatch, far_plane=0.6, **options)
    for one in (theirs, ours):
        one.eval()
    with torch.no_grad():
        expected, found = theirs(rays()), ours(rays())
    for name in ("rgb", "accumulation", "depth", "expected_depth"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5, msg=name)
    assert 0.5 < float(expected["accumulation"].min()) < float(expected["accumulation"].max()) < 0.95


def test_a_config_older_than_shared_density_networks() -> None:
    """Its cells have networks of their own."""
    config = NerfactoXLModelConfig()
    state = {name: value for name, value in vars(config).items() if name != "density"}
    config.__setstate__(state)
    assert config.density == "cell" and NerfactoXLModelConfig().density == "shared"


def test_fields_run_in_torch() -> None:
    """Also those of a run whose config.yml names tiny-cuda-nn, which earlier versions only used if installed."""
    assert model(World.single(), 1, implementation="tcnn").config.implementation == "torch"
    with pytest.raises(SystemExit):
        tyro.cli(NerfactoXLModelConfig, args=["--implementation", "tcnn"])


def test_cells_begin_differently_and_alike_on_any_rank() -> None:
    """Each from the run's seed and its own number."""
    ours, again = model(World.single(), 3), model(World.single(), 3)
    tables = [dict(cell.named_parameters()) for cell in ours.cells.values()]
    for name, value in tables[0].items():
        if float(value.detach().std()) > 0:  # not biases that begin with zeros
            assert not torch.equal(value, tables[1][name]) and not torch.equal(value, tables[2][name]), name
    for name, value in ours.named_parameters():
        assert torch.equal(value, dict(again.named_parameters())[name]), name


def test_one_cell_has_nerfactos_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = _nerfacto(monkeypatch, far_plane=0.6, camera_optimizer=NerfactoModelConfig().camera_optimizer)
    ours.begin_step(0)
    with drawn("cpu", ours.seed, 3, 0, 0, 1):  # as ours draws
        theirs.proposal_sampler.set_anneal(0.0)
        expected = theirs(rays())
    found = ours(rays())
    losses = []
    for one, outputs in ((theirs, expected), (ours, found)):
        metrics = one.get_metrics_dict(outputs, truth())
        losses.append(one.get_loss_dict(outputs, truth(), metrics))
    assert losses[0].keys() == losses[1].keys()
    for name, value in losses[0].items():
        torch.testing.assert_close(losses[1][name], value, rtol=1e-4, atol=1e-7, msg=name)
    assert min(losses[0][name].item() for name in ("interlevel_loss", "distortion_loss")) > 0


def step_of(world: World, cells: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return a training step and an image's rays, on the ranks' cells."""
    ours = model(world, cells, **options)
    moved_cameras(ours)
    batch = truth(4 if "background_color" in options else 3)
    ours.begin_step(3)
    outputs = ours(rays(2.0).to(world.device))
    metrics = ours.get_metrics_dict(outputs, batch)
    losses = ours.get_loss_dict(outputs, batch, metrics)
    loss = functools.reduce(torch.add, losses.values())
    if loss.requires_grad:
        loss.backward()
    sum_gradients(ours.summed_parameters(), world)
    gradients = {name: p.grad.cpu() for name, p in ours.named_parameters() if p.grad is not None}
    ours.eval()
    with torch.no_grad():
        seen = ours(rays(2.0).to(world.device))
    pixels = {name: value.cpu() for name, value in seen.items()}
    return {
        "rgb": outputs["rgb"].detach().cpu(), "rgb_loss": losses["rgb_loss"].detach().cpu(),
        "distortion": losses["distortion_loss"].detach().cpu(), "gradients": gradients, "pixels": pixels,
        "interlevel": losses.get("interlevel_loss", torch.zeros(())).detach().cpu(),
        "depth": losses.get("depth_loss", torch.zeros(())).detach().cpu(),
        "outside": float(ours.figures.outside), "samples": ours.figures.samples,
    }  # fmt: skip


def compare(one: dict[str, Any], found: list[dict[str, Any]], exact: bool) -> None:
    near: dict[str, float] = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-5}
    seen = set[str]()
    for outcome in found:
        for name in ("rgb", "rgb_loss", "distortion", "depth"):
            torch.testing.assert_close(outcome[name], one[name], **near, msg=name)
        for name, value in outcome["pixels"].items():
            torch.testing.assert_close(value, one["pixels"][name], **near, msg=name)
        for name, gradient in outcome["gradients"].items():
            scale = float(one["gradients"][name].abs().max())
            torch.testing.assert_close(gradient, one["gradients"][name], rtol=1e-3, atol=1e-5 * scale + 1e-9, msg=name)
        seen |= outcome["gradients"].keys()
    assert seen == one["gradients"].keys()
    torch.testing.assert_close(sum(o["interlevel"] for o in found), one["interlevel"], rtol=1e-4, atol=1e-9)
    assert sum(o["samples"] for o in found) == one["samples"]


@pytest.mark.parametrize(
    ("cells", "options", "background"),
    [
        (1, {}, "last_sample"), (2, {}, "mean"), (2, {"spread": "ddp"}, "last_sample"),
        (3, {"sampling": "occupancy"}, "mean"), (2, {"background_color": "last_sample"}, "last_sample"),
        (1, {"background_color": "mean"}, "mean"), (2, {"background_color": "random"}, "random"),
    ],
)  # fmt: skip
def test_background_behind_cells(cells: int, options: dict[str, Any], background: str) -> None:
    """With several cells the ray's own mean. What is random is so in training; in pictures it is black."""
    ours = model(World.single(), cells, **options)
    bundle, losses = rays(), list[float]()
    for step in (3, 4):
        ours.begin_step(step)
        outputs = ours(bundle)
        seen = outputs["rgb"].detach()
        outputs["rgb"], outputs["accumulation"] = torch.zeros_like(seen), torch.zeros_like(outputs["accumulation"])
        losses.append(float(ours.get_loss_dict(outputs, {"image": torch.zeros(len(seen), 3)}, None)["rgb_loss"]))
    random = background == "random"
    assert (losses[0] != losses[1]) == random and (losses[0] > 0.2) == random
    assert ours.renderer_rgb.background_color == ("black" if background == "mean" else background)
    colour, last = torch.tensor([[0.1, 0.2, 0.3]]), torch.full((1, 3), 0.5)
    shown = ours._on_background(colour, torch.full((1, 1), 0.6), last, torch.zeros(1, 3))
    expected = {"random": colour, "mean": colour / 0.4, "last_sample": colour + 0.3}
    torch.testing.assert_close(shown, expected[background])


@pytest.mark.parametrize(
    ("cells", "ranks", "options"),
    [
        (2, 2, {}),
        (4, 3, {"disable_scene_contraction": True}),
        (4, 4, {"background_color": "last_sample"}),
        (4, 2, {"background_color": "random"}),
        (4, 3, {"samples_per": "segment"}),
        (4, 3, {"background_color": "sky"}),
        (4, 3, {"proposals": "shared", "background_color": "last_sample"}),
        (4, 3, {"depth_loss": 0.3}),
        (3, 2, {"spread": "ddp", "depth_loss": 0.3}),
        (4, 2, {"density": "cell"}),
        (3, 2, {"density": "cell", "sampling": "occupancy"}),
        (3, 2, {"sampling": "occupancy"}),
        (3, 2, {"spread": "ddp"}),
        (3, 2, {"spread": "ddp", "background_color": "sky"}),
    ],
)
def test_any_number_of_ranks_is_one(cells: int, ranks: int, options: dict[str, Any]) -> None:
    one = step_of(World.single(), cells, options)
    groups = {"cells", "camera_optimizer", "shared"}
    groups |= {"sky"} if options.get("background_color") == "sky" else set()
    groups |= {"proposal_networks"} if "proposals" in options else set()
    assert {name.split(".")[0] for name in one["gradients"]} == groups
    assert (one["outside"] > 0) == ("disable_scene_contraction" in options), "some rays miss a box"
    assert (one["depth"] > 0) == ("depth_loss" in options)
    found = run_ranks(step_of, ranks, cells, options)
    compare(one, found, exact=True)


@pytest.mark.gpu
def test_any_number_of_gpus_is_one() -> None:
    compare(step_of(World.single("cuda:0"), 4, {}), run_ranks(step_of, 2, 4, {}, device="cuda"), exact=False)


class _WithSpread(NerfactoXLModel):
    """The example of docs/methods/nerfacto-xl.md: how uncertain the depth is."""

    integrals = (Weighted("depth_squared", 1, lambda samples: samples.middles[:, :, None] ** 2),)

    def get_outputs(self, ray_bundle: Any) -> dict[str, Any]:
        outputs = super().get_outputs(ray_bundle)
        mean = outputs["expected_depth"] * outputs["accumulation"]
        outputs["depth_variance"] = outputs["depth_squared"] - mean**2
        return outputs


def _uncertain(world: World, cells: int) -> dict[str, torch.Tensor]:
    ours = model(world, cells, _target=_WithSpread)
    ours.eval()
    with torch.no_grad():
        return ours(rays(2.0))


def test_an_integral_of_ones_own() -> None:
    one = _uncertain(World.single(), 3)
    for found in run_ranks(_uncertain, 2, 3):
        assert torch.equal(found["depth_squared"], one["depth_squared"])
    opaque = one["accumulation"][:, 0] > 0.99
    assert int(opaque.sum()) > 3
    # A mean of squares is the square of the mean, at least.
    assert float(one["depth_variance"][opaque].min()) > -1e-3
    assert float(one["depth_variance"][opaque].max()) > 1e-3


def test_data_parallel_is_one_field() -> None:
    """Three shares of the rays, on whatever ranks, are the batch of one field."""
    one, three = (step_of(World.single(), cells, {"spread": "ddp"}) for cells in (1, 3))
    assert three["gradients"].keys() == one["gradients"].keys()
    for name, value in one["pixels"].items():
        assert torch.equal(three["pixels"][name], value), name
    assert three["samples"] == one["samples"] == 48 * 8
    together = step_of(
        World.single(), 1, {"density": "cell"}
    )  # what is drawn at random depends on shares; one share is one cell
    torch.testing.assert_close(one["rgb_loss"], together["rgb_loss"], rtol=0, atol=0)


def test_grids_skip_empty_space() -> None:
    """The grid of a cell with fog in one half skips the other; pixels are the same with half the samples."""
    grids = {"sampling": "occupancy", "grid_resolution": 16, "march_steps": 200}
    ours = model(World.single(), 1, **grids, average_init_density=1.0, background_color="white")
    cell = ours.cells["0"]
    density = cell.field.get_density

    def half(samples: Any) -> Any:
        value, features = density(samples)
        return 40 * value * (samples.frustums.get_positions()[..., :1] > 0), features

    cell.field.get_density = half
    with torch.no_grad():
        for name, param in ours.named_parameters():
            if ".field." in name:
                param.zero_()
    seen: list[tuple[int, dict[str, torch.Tensor]]] = []
    ours.sampling.end_step({0: cell})  # too early: densities are those of the start
    assert bool((cell.occupancy == 1).all())
    for _ in range(2):
        ours.eval()
        with torch.no_grad():
            pixels = ours(rays(2.0))
        ours.train()
        ours(rays(2.0))
        seen.append((ours.figures.samples, pixels))
        ours.sampling.step = 256  # what was taken for occupied is forgotten
        ours.sampling.end_step({0: cell})
    (every, expected), (few, found) = seen
    assert 0.2 * every < few < 0.7 * every
    opaque = expected["accumulation"][:, 0] > 0.9
    for name in ("rgb", "accumulation", "depth"):
        which = opaque if name == "depth" else slice(None)
        torch.testing.assert_close(found[name][which], expected[name][which], rtol=1e-3, atol=2e-2)
    assert float(expected["accumulation"].amin()) < 0.1 and float(expected["accumulation"].amax()) > 0.9


@pytest.mark.parametrize(("asked", "least", "most"), [(None, 1.0, 1.4), ("ray", 1.0, 1.4), ("segment", 2.0, 4.0)])
def test_segments_share_the_samples_of_a_ray_or_have_as_many_each(asked: str | None, least: float, most: float) -> None:
    """With cells that most rays cross; by default a ray's."""
    options = {} if asked is None else {"samples_per": asked}
    one, four = (step_of(World.single(), cells, options)["samples"] for cells in (1, 4))
    assert one == 48 * 8 and least * one <= four < most * one
    assert asked != "segment" or four % 8 == 0  # each segment has a ray's 8


def _set_alike(ours: NerfactoXLModel) -> None:
    """Make all cells one fog whose density and colour vary along no axis but a world position's."""
    for cell in ours.cells.values():
        density, colour = cell.field.get_density, cell.field.get_outputs

        def of_place(samples: Any, density: Any = density) -> Any:
            value, features = density(samples)
            x = samples.frustums.get_positions()
            return 0 * value + (2 + 2 * torch.sin(3 * x).prod(-1, keepdim=True)), features

        def of_colour(samples: Any, density_embedding: Any = None, colour: Any = colour) -> Any:
            found = colour(samples, density_embedding)
            x = samples.frustums.get_positions()
            return {name: 0 * value + 0.5 + 0.5 * torch.sin(5 * x) for name, value in found.items()}

        cell.field.get_density, cell.field.get_outputs = of_place, of_colour
        cell.field.together = lambda several, field=cell.field: [field(one) for one in several]


def test_shared_proposals_sample_as_one_field_does() -> None:
    """Whatever the cells: edges differ by cuts at faces only, and so do pixels and the proposal loss."""
    found, edges = list[dict[str, torch.Tensor]](), list[set[float]]()
    for cells in (1, 4):
        ours = model(World.single(), cells, proposals="shared", background_color="last_sample", far_plane=3.0)
        assert ours.partition is not None and ours.proposal_networks is not None
        assert not any(len(cell.proposal_networks) for cell in ours.cells.values())
        _set_alike(ours)
        ours.begin_step(3)
        bundle = ours.collider(rays())
        segments = clip(bundle.origins, bundle.directions, bundle.nears[:, 0], bundle.fars[:, 0], ours.spread._worlds)
        groups = ours.own_segments(bundle, segments, 0)
        for group in groups:
            assert group.bins is not None
            torch.testing.assert_close(group.bins.spaced, group.taken.coordinates, rtol=0, atol=1e-5)
        if cells > 1:
            ray = int(segments.counts.argmax())
            assert int(segments.counts[ray]) > 2
            edges.append(_edges(groups, segments, ray))
            one = model(World.single(), 1, proposals="shared", background_color="last_sample", far_plane=3.0)
            one.begin_step(3)
            whole = clip(bundle.origins, bundle.directions, bundle.nears[:, 0], bundle.fars[:, 0], one.spread._worlds)
            edges.append(_edges(one.own_segments(bundle, whole, 0), whole, ray))
            faces = {float(t) for at in (segments.ray == ray).nonzero() for t in (segments.near[at], segments.far[at])}
            assert edges[1] - edges[0] == set() and edges[0] - edges[1] <= faces
        outputs = ours.of_segments(bundle, segments)
        losses = {"interlevel": outputs["interlevel"], "distortion": outputs["distortion"].mean()}
        found.append({name: outputs[name].detach() for name in ("rgb", "accumulation")} | losses)
    for name, atol in (("accumulation", 1e-3), ("rgb", 1e-2), ("distortion", 3e-4), ("interlevel", 4e-4)):
        torch.testing.assert_close(found[1][name], found[0][name], rtol=0, atol=atol, msg=name)


def test_cells_with_one_table_are_one_field() -> None:
    """Cells that share a density network differ in their tables only: voxels, features and densities are those of one
    field."""
    one, four = (model(World.single(), cells, density="shared") for cells in (1, 4))
    assert four.partition is not None
    (whole,) = (cell.field for cell in one.cells.values())
    table = whole.grid.hash_table
    with torch.no_grad():
        table.uniform_(-3, 3)
    points = torch.randn(200, 3) * 2
    owners = four.partition.of(points)
    for number, cell in four.cells.items():
        assert not any("layers" in name for name, _ in cell.field.named_parameters())
        with torch.no_grad():
            cell.field.grid.hash_table.copy_(table)
        mine = points[owners == int(number)]
        expected = whole.density_fn(mine[:, None])
        assert len(mine) and float(expected.std()) > 0
        torch.testing.assert_close(cell.field.density_fn(mine[:, None]), expected, rtol=0, atol=0)


def test_one_field_on_every_gpu_shares_nothing() -> None:
    """With ddp the option has no effect, as its note says."""
    names = [
        [name for name, _ in model(World.single(), 2, spread="ddp", density=density).named_parameters()]
        for density in ("cell", "shared")
    ]
    assert names[0] == names[1]


def _edges(groups: list[Any], segments: Any, ray: int) -> set[float]:
    """Return the edges of a ray's samples."""
    return {
        float(edge)
        for group in groups
        for row, edges in zip(group.rows, group.taken.edges, strict=True)
        if int(segments.ray[row]) == ray
        for edge in edges
    }


def test_proposal_loss_is_weighted_by_transmittance() -> None:
    """A segment's part of the proposal loss is that of its samples in a whole ray: twice the light, twice the loss."""
    ours = model(World.single(), 4)
    bundle = ours.collider(rays(2.0))
    segments = clip(bundle.origins, bundle.directions, bundle.nears[:, 0], bundle.fars[:, 0], ours.partition.boxes())
    groups = ours.own_segments(bundle, segments, 0)
    whole = torch.ones(len(segments), 1)
    full, half, none = (float(ours.sampling.losses(groups, part * whole, 48)["interlevel"]) for part in (1.0, 0.5, 0.0))
    assert full > 1e-5 and none == 0 and half == pytest.approx(full / 2, rel=1e-3)


def test_distortion_is_measured_along_the_whole_ray() -> None:
    """Of a fog that is the same everywhere, it does not depend on cells."""
    found: list[float] = []
    for cells in (1, 4):
        ours = fog(cells, num_nerf_samples_per_ray=64).train()
        found.append(float(ours(rays())["distortion"].mean().detach()))
    assert found[1] == pytest.approx(found[0], rel=0.1)


def test_no_seam_at_faces() -> None:
    """Samples extend to the faces between cells: in fog of density 1, only a ray's two ends are not sampled."""
    left_out: list[torch.Tensor] = []
    for cells in (1, 4):
        with torch.no_grad():
            through = 1 - fog(cells)(rays())["accumulation"][:, 0]
        left_out.append(0.85 + through.log())
    assert float(left_out[0].min()) > 0.03, "nerfstudio's samples stop before both ends"
    several = left_out[1] < left_out[0] - 1e-4
    assert int(several.sum()) > 10, "some rays cross a face"
    assert float((left_out[1] / left_out[0])[several].mean()) < 0.75


def test_seeds_differ() -> None:
    keys = [(a, b, c) for a in range(3) for b in range(40) for c in range(5)]
    assert len({mixed(*key) for key in keys}) == len(keys) and all(0 <= mixed(*key) < 1 << 63 for key in keys)
    before = torch.random.get_rng_state()
    with drawn("cpu", 1, 2):
        torch.rand(3)
    assert torch.equal(torch.random.get_rng_state(), before)
