"""Broken integrals against an unbroken quadrature, in double precision."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from nerfstudio.field_components.activations import trunc_exp
from torch import Tensor

from ns_multigpu.plugin.radiance.field.levels import Bins, Ends, by_weights, evenly, weights_of
from ns_multigpu.radiance import sums
from ns_multigpu.radiance.integrals import (
    BACKGROUND,
    COLOUR,
    DEPTH,
    MOMENT,
    TRANSMITTANCE,
    Distortion,
    Family,
    Samples,
    State,
    Weighted,
)
from ns_multigpu.radiance.sums import running_sum


@dataclass(frozen=True)
class SpreadOfColour:
    """One of a user's own: how much a ray's colours differ, the sum over pairs of w w |c - c'|^2 (property 1)."""

    name: str = "spread"
    width: int = 1
    empty: float = 0.0

    def within(self, samples: Samples) -> Tensor:
        w, c = samples.weights, samples.values["colour"]
        pairs = (c[:, :, None] - c[:, None]).square().sum(-1)
        return (w[:, :, None] * w[:, None] * pairs).sum((1, 2))[:, None]

    def join(self, front: State, back: State) -> Tensor:
        t = front[TRANSMITTANCE]
        a, b = 1 - t, 1 - back[TRANSMITTANCE]
        between = front["squares"] * b + a * back["squares"]
        between = between - 2 * (front["colour"] * back["colour"]).sum(1, keepdim=True)
        return front[self.name] + t.square() * back[self.name] + 2 * t * between


NORMAL = Weighted("normal", 3, lambda samples: samples.values["normal"])
SQUARES = Weighted("squares", 1, lambda samples: samples.values["colour"].square().sum(-1, keepdim=True))
FAMILY = Family([COLOUR, DEPTH, MOMENT, Distortion(), BACKGROUND, NORMAL, SQUARES, SpreadOfColour()])


def _ray(samples: int, rays: int = 5) -> Samples:
    g = torch.Generator().manual_seed(4)

    def drawn(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    edges = drawn(rays, samples + 1).sort(1).values * 4
    values = {"colour": drawn(rays, samples, 3), "normal": drawn(rays, samples, 3) - 0.5}
    return Samples(edges, 3 * drawn(rays, samples), edges / (1 + edges), values)


def _part(whole: Samples, first: int, last: int) -> Samples:
    values = {name: value[:, first:last] for name, value in whole.values.items()}
    edges = slice(first, last + 1)
    return Samples(whole.edges[:, edges], whole.density[:, first:last], whole.coordinates[:, edges], values)


@pytest.mark.parametrize("cuts", [(0, 24), (0, 7, 24), (0, 1, 2, 12, 23, 24), tuple(range(25))])
def test_broken_is_unbroken(cuts: tuple[int, ...]) -> None:
    whole = _ray(24)
    expected = FAMILY.unpacked(FAMILY.within(whole))
    parts = [FAMILY.within(_part(whole, a, b)) for a, b in pairwise(cuts)]
    rays = len(parts[0])
    order = torch.arange(len(parts) * rays).reshape(len(parts), rays).t()
    found, before = FAMILY.fold(torch.cat(parts), order)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13, msg=name)
    for k, cut in enumerate(cuts[:-1]):
        through = torch.exp(-whole.depth[:, :cut].sum(1))
        torch.testing.assert_close(before[order[:, k], 0], through)


def test_against_a_fine_quadrature() -> None:
    """The definitions (equations 1, 2 and 6), by brute force, of densities that are constant over samples."""
    whole = _ray(6, rays=3)
    edges = whole.edges
    fine = 1500
    steps = torch.arange(fine, dtype=torch.float64) + 0.5
    lengths = (edges[:, 1:] - edges[:, :-1]) / fine
    t = (edges[:, :-1, None] + lengths[..., None] * steps).reshape(3, -1)
    dt = lengths.repeat_interleave(fine, 1)
    density = whole.density.repeat_interleave(fine, 1)
    colour = whole.values["colour"].repeat_interleave(fine, 1)
    depth = (density * dt).cumsum(1)
    w = torch.exp(-(depth - density * dt / 2)) * density * dt
    found = FAMILY.unpacked(FAMILY.within(whole))
    torch.testing.assert_close(found["colour"], (w[..., None] * colour).sum(1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(1 - found[TRANSMITTANCE][:, 0], w.sum(1), rtol=1e-5, atol=1e-6)
    # Inside a sample, depth and distortion take weights to be spread evenly, as nerfstudio does.
    even = (whole.weights[..., None] / fine).expand(-1, -1, fine).reshape(3, -1)
    u = t / (1 + t)
    start, end = whole.coordinates[:, :-1, None], whole.coordinates[:, 1:, None]
    u = (start + (end - start) * steps / fine).reshape(3, -1)
    torch.testing.assert_close(found["depth"][:, 0], (even * t).sum(1), rtol=1e-9, atol=0)
    order = u.argsort(1)
    us, ws = u.gather(1, order), even.gather(1, order)
    pairs = 2 * (ws * (us * (ws.cumsum(1) - ws) - ((ws * us).cumsum(1) - ws * us))).sum(1)
    torch.testing.assert_close(found["distortion"][:, 0], pairs, rtol=1e-5, atol=1e-8)


def test_distortion_is_nerfstudios() -> None:
    from nerfstudio.model_components.losses import lossfun_distortion

    whole = _ray(30)
    expected = lossfun_distortion(whole.coordinates, whole.weights)
    torch.testing.assert_close(FAMILY.unpacked(FAMILY.within(whole))["distortion"][:, 0], expected)


def test_the_last_sample_counts_even_if_nothing_is_behind() -> None:
    whole = _ray(8)
    behind = _part(whole, 5, 8)
    behind.edges[3] = behind.edges[3, 0].clone()  # the fourth ray's last segment has no samples
    rows = torch.cat([FAMILY.within(_part(whole, 0, 5)), FAMILY.within(behind)])
    order = torch.tensor([[ray, 5 + ray] for ray in range(5)])
    order[2, 1] = len(rows)  # the third ray ends after the first segment
    found, _ = FAMILY.fold(rows, order)
    last = whole.values["colour"][:, -1].clone()
    last[2:4] = whole.values["colour"][2:4, 4]
    torch.testing.assert_close(found["background"][:, :3], last)


@pytest.mark.parametrize("columns", [1, 2, 3, 24, 64])
def test_ray_sums_are_independent_of_chunking(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many rows as a GPU takes in pieces: the last piece is a small one."""
    most = sums.most_rows(columns)
    assert most & (most - 1) == 0 and most * columns < 3e6
    rows = torch.rand(most + 3, columns, dtype=torch.float64, requires_grad=True)
    found, weights = sums.in_chunks(rows, most), torch.rand(most + 3, columns, dtype=torch.float64)
    assert torch.equal(found, rows.cumsum(1)) and torch.equal(found, running_sum(rows))
    (given,) = torch.autograd.grad((found * weights).sum(), rows)
    (expected,) = torch.autograd.grad((rows.cumsum(1) * weights).sum(), rows)
    assert torch.equal(given, expected)


def test_rays_without_segments_are_empty() -> None:
    found, before = FAMILY.fold(torch.zeros(0, FAMILY.width), torch.zeros(4, 0, dtype=torch.int64))
    assert before.shape == (0, 1) and bool((found[TRANSMITTANCE] == 1).all())
    assert all(bool((value == 0).all()) for name, value in found.items() if name != TRANSMITTANCE)


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="colour"):
        Family([COLOUR, COLOUR])


def test_thin_air_before_a_wall_keeps_its_weight() -> None:
    """In single precision, where a sum up to the wall less the wall would leave nothing of the air."""
    edges = torch.tensor([[0.0, 1.0, 2.0]])
    samples = Samples(edges, torch.tensor([[0.1, 1e8]]), edges, {})
    torch.testing.assert_close(samples.weights, torch.tensor([[0.0951626, 0.9048374]]))


def test_thin_sheet_has_its_density() -> None:
    """The bound of densities is beyond what differs from opaque."""
    edges = torch.tensor([[0.0, 1.0, 1.0 + 1e-5, 2.0]])
    samples = Samples(edges, torch.tensor([[0.0, 1e9, 0.0]]), edges, {})
    torch.testing.assert_close(samples.weights, torch.tensor([[0.0, 1.0, 0.0]]))


@pytest.mark.parametrize("logit", [100.0, 80.0])
def test_dense_samples_of_zero_length_have_finite_gradients(logit: float) -> None:
    """exp(100) is infinite in float32, and infinity times no length would be NaN, in all samples of the segment."""
    edges = torch.tensor([[0.0, 1.0, 1.0, 2.0, 1002.0]])
    logits = torch.tensor([[0.0, logit, logit, 1.0]], requires_grad=True)
    density = trunc_exp(logits)
    samples = Samples(edges, density, edges / 1002, {"colour": torch.rand(1, 4, 3)})
    seen = weights_of(Bins(edges, edges), density)
    (
        Family([COLOUR, DEPTH, MOMENT, Distortion(), BACKGROUND]).within(samples).sum() + (seen * torch.arange(4)).sum()
    ).backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())
    expected = torch.tensor([[1 - torch.e**-1, 0.0, torch.e**-1, 0.0]])
    torch.testing.assert_close(samples.weights, expected)
    torch.testing.assert_close(seen, expected)


def test_segments_of_a_few_roundings_length_have_finite_gradients() -> None:
    """A ray that grazes a cell has one. Its samples' edges are in disorder: what is dense must not make that NaN."""
    g = torch.Generator().manual_seed(2)
    near = torch.rand(500, 1, generator=g) + 0.1
    far = near + 1e-5 * torch.rand(500, 1, generator=g)
    ends = Ends(near, far, (torch.full_like(near, 0.05), torch.full_like(near, 1000.0)), uniform=False)
    first = evenly(ends, 64, torch.rand(500, 1, generator=g))
    bins = by_weights(ends, first, torch.rand(500, 64, generator=g), 48, torch.rand(500, 1, generator=g))
    bins = bins.up_to_faces(ends)
    assert bool((bins.edges.diff(dim=1) < 0).any()), "else this tests nothing"
    logits = torch.full((500, 48), 40.0, requires_grad=True)
    density = trunc_exp(logits)
    samples = Samples(bins.edges, density, bins.edges / 1000, {"colour": torch.rand(500, 48, 3, generator=g)})
    seen = weights_of(bins, density)
    (Family([COLOUR, DEPTH, MOMENT, Distortion(), BACKGROUND]).within(samples).sum() + seen.square().sum()).backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())
    for weights in (seen, samples.weights):
        assert bool((weights >= 0).all()) and float(weights.sum(1).max()) < 1 + 1e-5
