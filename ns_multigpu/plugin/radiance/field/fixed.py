"""Training steps whose shapes hardly depend on their rays, so that CUDA graphs can capture them.

Each cell has a slot for each ray, occupied or not (`radiance.slots`). With several cells, the number of occupied slots
is read back, and the step is padded to slightly more lines. Random numbers and all other host inputs are written into
tensors at fixed addresses.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from nerfstudio.cameras.rays import RayBundle
from torch import Tensor

from ns_multigpu.core.exchange.transport import Parts, launched
from ns_multigpu.plugin.radiance.field.draws import background, jitter
from ns_multigpu.plugin.radiance.field.figures import Figures
from ns_multigpu.plugin.radiance.field.sampling import Asked, CellSegments, Group, ProposalSampling, WholeRays
from ns_multigpu.plugin.radiance.field.shape_buckets import ShapeBuckets
from ns_multigpu.radiance.integrals import Breakable
from ns_multigpu.radiance.slots import Slots, all_slots, packed

if TYPE_CHECKING:
    from ns_multigpu.plugin.radiance.field.model import NerfactoXLModel, NerfactoXLModelConfig


def why_not(config: "NerfactoXLModelConfig", integrals: Sequence[Breakable]) -> str:
    """Return the option of a model that rules out fixed shapes; "" if none does."""
    if config.spread != "xl":
        return f"--pipeline.model.spread {config.spread}"
    if config.sampling != "proposals":
        return f"--pipeline.model.sampling {config.sampling}"
    return "integrals of the model's own" if integrals else ""


class StepNumbers:
    """Host inputs of a step, in tensors at fixed addresses.

    Args:
        seed: the run's. cells: this rank's. device: of rays.
        widths: random numbers of a ray in a cell by level, keyed by the number of segments that share a ray's samples.
        coloured: True if the background is random.

    Attributes:
        moved: by cell and number of sharing segments, random numbers [R, width] of each level.
        anneal: [] exponent of proposal weights. background: [R, 3] random colours; None if it is not random.
    """

    def __init__(
        self, seed: int, cells: range, widths: Mapping[int, Sequence[int]], device: torch.device, coloured: bool
    ) -> None:
        self._seed, self._widths = seed, widths
        self._jitters = {(cell, parts): torch.empty(0, device=device) for cell in cells for parts in widths}
        self._of: tuple[int, int] | None = None
        self._coloured = coloured
        self.moved: dict[tuple[int, int], list[Tensor]] = {}
        self.anneal = torch.ones((), device=device)
        self.background: Tensor | None = None

    def fill(self, step: int, rays: int, anneal: float) -> None:
        """Write a step's numbers unless they are already written."""
        if self._of == (step, rays):
            return
        if self._of is None or self._of[1] != rays:
            device = self.anneal.device
            self._jitters = {
                (cell, parts): torch.empty(rays * sum(self._widths[parts]), device=device)
                for cell, parts in self._jitters
            }
            self.background = torch.empty(rays, 3, device=device) if self._coloured else None
        self._of = (step, rays)
        self.moved = {
            (cell, parts): jitter(buffer, self._widths[parts], rays, self._seed, step, cell, parts)
            for (cell, parts), buffer in self._jitters.items()
        }
        self.anneal.fill_(anneal)
        if self.background is not None:
            background(self.background, self._seed, step)


class FixedShapes:
    """Renderer of a training step's rays in fixed shapes, with all ranks. See `NerfactoXLModel.get_outputs`.

    Segments are packed into lines (`radiance.slots.packed`) by cell and by class. If a ray's segments share its samples
    (`samples_per`), a class is the segments of rays with the same number of segments. Otherwise it is all segments.

    Args:
        model: with placed cells, and options for which `why_not` returns "".
    """

    def __init__(self, model: "NerfactoXLModel") -> None:
        assert isinstance(model.sampling, ProposalSampling) and model.partition is not None
        self._model, self._sampling = model, model.sampling
        self._numbers: StepNumbers | None = None
        self._whole = self._sampling.networks is not None  # samples of whole rays, cut at faces
        shared = model.config.samples_per == "ray" and not self._whole
        self._classes = range(1, model.partition.cells + 1) if shared else range(1, 2)

    @property
    def counts(self) -> bool:
        """True if the number of lines depends on the rays: with several cells."""
        assert self._model.partition is not None
        return self._model.partition.cells > 1

    def numbers(self, rays: int) -> StepNumbers:
        """Return the host inputs of the model's step for a number of rays."""
        model, sampling = self._model, self._sampling
        device = model.device
        if self._numbers is None or self._numbers.anneal.device != device:
            coloured = model.background == "random"
            widths = {parts: sampling.widths(parts) for parts in self._classes}
            cells = range(1) if self._whole else model.numbers
            self._numbers = StepNumbers(model.seed, cells, widths, device, coloured)
        self._numbers.fill(sampling.step, rays, sampling.anneal)
        return self._numbers

    @torch.no_grad()
    def clipped(self, rays: RayBundle) -> tuple[Slots, Tensor]:
        """Clip rays [R] with `nears` and `fars` at cells. Nothing is read back.

        Returns:
            the slots, and the number of this rank's segments, [its cells, classes] int64.
        """
        slots, cells = self._model.spread.slots(rays), self._model.numbers
        live = slots.live[cells.start : cells.stop]
        if len(self._classes) == 1:
            return slots, live.sum(1, keepdim=True)
        return slots, torch.stack([(live & (slots.counts == parts)).sum(1) for parts in self._classes], 1)

    def outputs(self, rays: RayBundle) -> dict[str, Any]:
        """Render rays [R] with `nears` and `fars`. Waits for the device with several cells."""
        slots, counts = self.clipped(rays)
        buckets = tuple(map(tuple, counts.tolist())) if self.counts else self.all_buckets(len(rays))
        return launched(self.parts(rays, slots, buckets))

    def all_buckets(self, rays: int) -> ShapeBuckets:
        """Return the maximum capacities: one cell with a segment of every ray."""
        return ((rays,) * len(self._classes),)

    def parts(self, rays: RayBundle, slots: Slots, buckets: ShapeBuckets) -> Parts[dict[str, Any]]:
        """Render as `outputs` does, with collectives yielded. Nothing is read back, and no shape depends on values.

        Args:
            rays: [R] with `nears` and `fars`. slots: of the rays. buckets: capacities in lines of their segments.
        """
        model, sampling = self._model, self._sampling
        numbers, cells = self.numbers(len(rays)), model.numbers
        assert rays.nears is not None
        groups, own = list[Group](), list[Tensor]()
        whole = sampling.whole(rays, numbers.moved[0, 1], numbers.anneal) if self._whole else None
        taken = torch.zeros((), dtype=torch.int64, device=rays.nears.device)
        for place, cell in enumerate(cells):
            states = model.family.empty(len(rays) + 1, rays.nears)  # the last row receives the results of padding lines
            given = zip(self._classes, buckets[place], strict=True)
            lines = {parts: self._lines(cell, parts, capacity, slots) for parts, capacity in given if capacity}
            asked = [self._asked(cell, place, parts, at, rays, slots, numbers, whole) for parts, at in lines.items()]
            found = sampling.taken(model.cell(cell), asked, numbers.anneal) if asked else []
            for one, at, group in zip(asked, lines.values(), found, strict=True):
                states = states.index_copy(0, at, model.family.within(group.taken).to(states))
                assert one.lines.live is not None
                taken += one.lines.live.sum() * sampling.counts(one.parts)[-1]
            groups += found
            own.append(states[:-1])
        rows = yield from all_slots(torch.stack(own), len(slots.live), model.world)
        whole, before = model.family.fold(rows.flatten(0, 1), slots.order)
        outputs = {**model.pixels(whole, rays), "distortion": whole["distortion"]}
        own_slots = slice(cells.start * len(rays), cells.stop * len(rays))
        outputs |= sampling.losses(groups, torch.cat([before[own_slots], before.new_zeros(1, 1)]), len(rays))
        model.figures = Figures(slots, taken, len(rays), 1 - (slots.counts > 0).float().mean())
        return outputs

    def _lines(self, cell: int, parts: int, capacity: int, slots: Slots) -> Tensor:
        """Return the rays of a class of a cell's segments, [capacity] int64; padding lines have the number of rays."""
        live = slots.live[cell]
        return packed(live if len(self._classes) == 1 else live & (slots.counts == parts), capacity)

    def _asked(
        self, cell: int, place: int, parts: int, at: Tensor, rays: RayBundle, slots: Slots, numbers: StepNumbers,
        whole: WholeRays | None,
    ) -> Asked:  # fmt: skip
        """Return the sampling request of some lines."""
        ray = at.clamp_max(len(rays) - 1)
        bundle = rays[ray]
        nears, fars = bundle.nears, bundle.fars
        assert nears is not None and fars is not None
        bundle.nears, bundle.fars = slots.near[cell][ray, None], slots.far[cell][ray, None]
        there = at < len(rays)
        rows = torch.where(there, place * len(rays) + at, len(self._model.numbers) * len(rays))
        lines = CellSegments(rows, ray, len(rays), bundle, (nears, fars), there)
        if whole is not None:
            return Asked(parts, lines, None, whole.of(ray))
        return Asked(parts, lines, [level[ray] for level in numbers.moved[cell, parts]])
