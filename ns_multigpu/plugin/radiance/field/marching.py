"""Ray marching through occupied voxels: the sampling variant with occupancy grids."""

import torch
from nerfstudio.cameras.rays import Frustums, RayBundle, RaySamples
from nerfstudio.field_components.field_heads import FieldHeadNames
from nerfstudio.model_components.losses import scale_gradients_by_distance_squared
from torch import Tensor

from ns_multigpu.plugin.radiance.field.draws import drawn
from ns_multigpu.plugin.radiance.field.fields import Cell
from ns_multigpu.plugin.radiance.field.sampling import CellSegments, Group
from ns_multigpu.radiance.integrals import Samples
from ns_multigpu.radiance.occupancy import OccupancyGrid, between_gaps, kept_first, steps_along, with_gaps
from ns_multigpu.radiance.partition import spacing

_STEPS, _VOXELS = 9, 10
"""First seed numbers of the random draws."""
_EVERY, _FROM, _ALL_UNTIL, _CHUNK = 16, 256, 512, 1 << 20
"""Steps between grid updates; step of the first, until which no voxel is empty; step until which all voxels are updated
(later a quarter of them); points per chunk."""


class OccupancySampling:
    """Even steps along rays, without those in voxels that the cell's occupancy grid marks as empty.

    Args:
        seed: of random numbers.
        steps: of a whole ray. threshold: minimum opacity of an occupied voxel.
        scaled: True if gradients grow with the distance from the camera, as with `use_gradient_scaling`.
    """

    def __init__(self, seed: int, steps: int, threshold: float, scaled: bool) -> None:
        self.seed, self.steps, self.threshold, self.scaled, self.step = seed, steps, threshold, scaled, 0
        self.since_update = 0
        """Unused: this variant has no proposals."""

    def begin_step(self, step: int) -> None:
        """Set the step that seeds random numbers."""
        self.step = step

    @torch.no_grad()
    def end_step(self, cells: dict[int, Cell]) -> None:
        """Update grids every few steps: at first all voxels, later random and occupied ones."""
        if self.step < _FROM or self.step % _EVERY:
            return
        for number, cell in cells.items():
            grid = self._grid(cell)
            if self.step == _FROM:
                grid.values.zero_()
            device, count = grid.values.device, len(grid.values)
            with drawn(device, self.seed, _VOXELS, self.step, number):
                voxels = torch.arange(count, device=device)
                if self.step >= _ALL_UNTIL:
                    some = torch.randint(count, (count // 4,), device=device)
                    voxels = torch.cat([some, (grid.values >= grid.bar).nonzero()[:, 0]]).unique()
                places = torch.rand(len(voxels), 3, device=device)
            found = [
                self._opacity(cell, grid, voxels[i : i + _CHUNK], places[i : i + _CHUNK])
                for i in range(0, len(voxels), _CHUNK)
            ]
            grid.update(voxels, torch.cat(found))

    def sample(self, cell: Cell, number: int, parts: int, lines: CellSegments, training: bool) -> Group | None:
        """Return samples of those segments of a cell that have any, or None. See `ProposalSampling.sample`."""
        rows, bundle, ends = lines.rows, lines.bundle, lines.ends
        assert isinstance(rows, Tensor) and bundle.nears is not None and bundle.fars is not None
        shift = torch.zeros_like(bundle.nears)
        if training:
            with drawn(shift.device, self.seed, _STEPS, self.step, number, parts):
                shift = torch.rand_like(shift)
        with torch.no_grad():
            edges = steps_along((bundle.nears, bundle.fars), ends, self.steps, shift)
            middles = (edges[:, 1:] + edges[:, :-1]) / 2
            positions = bundle.origins[:, None] + bundle.directions[:, None] * middles[:, :, None]
            inside = (cell.coordinates(positions) + 2) / 4
            kept = self._grid(cell).occupied(inside) & (edges.diff(dim=1) > 0)
            (some,) = kept.any(1).nonzero(as_tuple=True)
        if not len(some):
            return None
        rows, bundle, edges, kept, ends = (
            rows[some],
            bundle[some],
            edges[some],
            kept[some],
            (ends[0][some], ends[1][some]),
        )
        places, there = kept_first(kept)
        starts, stops = edges[:, :-1].gather(1, places), edges[:, 1:].gather(1, places)
        # Pad segments with samples of zero length and the last colour: the last sample may be the background.
        last = there.sum(1, keepdim=True) - 1
        final = stops.gather(1, last.clamp_min(0))
        starts, stops = torch.where(there, starts, final), torch.where(there, stops, final)
        density, colour, count = self._looked(cell, bundle, starts, stops, there)
        colour = torch.where(there[..., None], colour, colour.gather(1, last[..., None].expand(-1, -1, 3)))
        spaced = with_gaps(starts, stops)
        taken = Samples(
            spaced, between_gaps(density), self.coordinates(spaced, *ends), {"colour": between_gaps(colour)}
        )
        return Group(rows, taken, count)

    def coordinates(self, t: Tensor, near: Tensor, far: Tensor) -> Tensor:
        """Normalise distances to [0, 1] along whole rays, in the coordinate of the distortion loss."""
        t, near, far = spacing(t), spacing(near), spacing(far)
        return (t - near) / (far - near)

    def losses(self, groups: list[Group], before: Tensor, rays: int) -> dict[str, Tensor]:
        """Return no losses: grids have no gradients."""
        del groups, before, rays
        return {}

    def _looked(
        self, cell: Cell, bundle: RayBundle, starts: Tensor, stops: Tensor, there: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """Evaluate the field at existing samples only.

        Returns:
            density [n, K], colour [n, K, 3], and the number of samples.
        """
        line, place = there.nonzero(as_tuple=True)
        rays, begin, end = bundle[line], starts[line, place, None], stops[line, place, None]
        frustums = Frustums(
            rays.origins[:, None], rays.directions[:, None], begin[:, None], end[:, None], rays.pixel_area[:, None]
        )
        cameras = None if rays.camera_indices is None else rays.camera_indices[:, None]
        samples = RaySamples(frustums=frustums, camera_indices=cameras)
        found = cell.field(samples)
        if self.scaled:
            found = scale_gradients_by_distance_squared(found, samples)
        density = starts.new_zeros(starts.shape).index_put((line, place), found[FieldHeadNames.DENSITY][:, 0, 0])
        colour = starts.new_zeros(*starts.shape, 3).index_put((line, place), found[FieldHeadNames.RGB][:, 0])
        return density, colour, len(line)

    def _grid(self, cell: Cell) -> OccupancyGrid:
        assert cell.occupancy is not None
        return OccupancyGrid(cell.occupancy.data, self.threshold)

    def _opacity(self, cell: Cell, grid: OccupancyGrid, voxels: Tensor, places: Tensor) -> Tensor:
        """Return the opacity [n] of voxels from the density at one position in each."""
        low, high = (cell.coordinates.outward(corner * 4 - 2) for corner in grid.diagonals(voxels))
        where = cell.coordinates.outward(grid.points(voxels, places) * 4 - 2)
        density = cell.field.density_fn(where[:, None])[:, 0, 0]
        return -torch.expm1(-density * (high - low).norm(dim=1).clamp_max(1e3))
