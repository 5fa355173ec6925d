"""A training step in shapes that do not depend on its rays: what a CUDA graph can hold.

Each cell has a slot for each ray, met or not (`radiance.slots`), so that nothing is counted and nothing is read back.
Random numbers, and all else that a step takes from the host, are written into tensors that stay where they are.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from nerfstudio.cameras.rays import RayBundle
from torch import Tensor

from ns_multigpu.plugin.radiance.draws import background, jitter
from ns_multigpu.plugin.radiance.figures import Figures
from ns_multigpu.plugin.radiance.sampling import Group, Lines, ProposalSampling
from ns_multigpu.radiance.integrals import Breakable
from ns_multigpu.radiance.slots import Slots, all_slots

if TYPE_CHECKING:
    from ns_multigpu.plugin.radiance.model import NerfactoXLModel, NerfactoXLModelConfig


def why_not(config: "NerfactoXLModelConfig", integrals: Sequence[Breakable]) -> str:
    """The option that steps of a model have no fixed shapes for; "" where they have."""
    if config.spread != "xl":
        return f"--pipeline.model.spread {config.spread}"
    if config.sampling != "proposals":
        return f"--pipeline.model.sampling {config.sampling}"
    if config.samples_per != "segment":
        return f"--pipeline.model.samples-per {config.samples_per}"
    if config.implementation != "torch":
        return f"--pipeline.model.implementation {config.implementation}"
    return "integrals of the model's own" if integrals else ""


class StepNumbers:
    """What a step takes from the host, in tensors that stay where they are.

    Args:
        seed: the run's. cells: this rank's. widths: random numbers of a ray in a cell, by level. device: of rays.
        coloured: whether the background is random.

    Attributes:
        moved: of each cell, of each level [R, its width] random numbers.
        anneal: [] how sharp proposals are. background: [R, 3] random colours; None where it is not random.
    """

    def __init__(self, seed: int, cells: range, widths: Sequence[int], device: torch.device, coloured: bool) -> None:
        self._seed, self._cells, self._widths = seed, cells, list(widths)
        self._room = {cell: torch.empty(0, device=device) for cell in cells}
        self._of: tuple[int, int] | None = None
        self._coloured = coloured
        self.moved: dict[int, list[Tensor]] = {}
        self.anneal = torch.ones((), device=device)
        self.background: Tensor | None = None

    def fill(self, step: int, rays: int, anneal: float) -> None:
        """Writes the numbers of a step with so many rays, unless they are there."""
        if self._of == (step, rays):
            return
        if self._of is None or self._of[1] != rays:
            device = self.anneal.device
            self._room = {cell: torch.empty(rays * sum(self._widths), device=device) for cell in self._cells}
            self.background = torch.empty(rays, 3, device=device) if self._coloured else None
        self._of = (step, rays)
        self.moved = {
            cell: jitter(room, self._widths, rays, self._seed, step, cell, 1) for cell, room in self._room.items()
        }
        self.anneal.fill_(anneal)
        if self.background is not None:
            background(self.background, self._seed, step)


class FixedShapes:
    """Renders the rays of a training step of a model with all ranks together. See `NerfactoXLModel.get_outputs`.

    Args:
        model: its cells placed, and with options that `why_not` has nothing against.
    """

    def __init__(self, model: "NerfactoXLModel") -> None:
        assert isinstance(model.sampling, ProposalSampling)
        self._model, self._sampling = model, model.sampling
        self._numbers: StepNumbers | None = None

    def numbers(self, rays: int) -> StepNumbers:
        """Those of the model's step, for so many rays."""
        model, sampling = self._model, self._sampling
        device = model.device
        if self._numbers is None or self._numbers.anneal.device != device:
            coloured = model.config.background_color == "random"
            self._numbers = StepNumbers(model.seed, model.numbers, sampling.widths(), device, coloured)
        self._numbers.fill(sampling.step, rays, sampling.anneal)
        return self._numbers

    def outputs(self, rays: RayBundle) -> dict[str, Any]:
        """Of rays [R] with `nears` and `fars`. Nothing is read back, and no shape depends on values."""
        model, sampling = self._model, self._sampling
        assert rays.nears is not None and rays.fars is not None
        numbers, slots, cells = self.numbers(len(rays)), model.spread.slots(rays), model.numbers
        groups = [self._group(cell, place, rays, slots, numbers) for place, cell in enumerate(cells)]
        live = slots.live[cells.start : cells.stop]
        none = model.family.empty(len(rays), rays.nears)
        own = [
            torch.where(there[:, None], model.family.within(group.taken), none)
            for group, there in zip(groups, live, strict=True)
        ]
        rows = all_slots(torch.stack(own), len(slots.live), model.world)
        whole, before = model.family.fold(rows.flatten(0, 1), slots.order)
        outputs = {**model.pixels(whole, rays), "distortion": whole["distortion"]}
        own_slots = slice(cells.start * len(rays), cells.stop * len(rays))
        outputs |= sampling.losses(groups, before[own_slots] * live.reshape(-1, 1), len(rays))
        taken = live.sum() * sampling.counts()[-1]
        model.figures = Figures(slots, taken, len(rays), 1 - (slots.counts > 0).float().mean())
        return outputs

    def _group(self, cell: int, place: int, rays: RayBundle, slots: Slots, numbers: StepNumbers) -> Group:
        """The samples of a cell's slots."""
        assert rays.nears is not None and rays.fars is not None
        bundle = RayBundle(
            rays.origins, rays.directions, rays.pixel_area, rays.camera_indices,
            slots.near[cell][:, None], slots.far[cell][:, None],
        )  # fmt: skip
        rows = slice(place * len(rays), (place + 1) * len(rays))
        lines = Lines(rows, None, len(rays), bundle, (rays.nears, rays.fars), slots.live[cell])
        return self._sampling.taken(self._model.cell(cell), 1, lines, numbers.moved[cell], numbers.anneal)
