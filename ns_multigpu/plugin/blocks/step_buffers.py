"""Resources that outlive a rebuilt step: transport, tile lists, and image buffers that graphs read."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from ns_multigpu.core.assign.assignment import Feedback
from ns_multigpu.core.assign.image_part import ImagePart
from ns_multigpu.core.dist.peer_memory import choose_transport
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.hierarchy import Hierarchy
from ns_multigpu.core.exchange.pair_capacities import Pairs, pairs_of
from ns_multigpu.core.exchange.transports import Transport, is_hierarchical, make_transport
from ns_multigpu.core.kernels import Kernels
from ns_multigpu.core.step.step_settings import HALO, Status, StepSettings
from ns_multigpu.core.step.tile_lists import GatheredLists, SortedLists, TileLists
from ns_multigpu.core.types import Patch, View
from ns_multigpu.plugin.faults.errors import InputError

if TYPE_CHECKING:
    from ns_multigpu.plugin.splats.pipeline import DistributedPipeline


class StepBuffers:
    """Buffers of one rank's steps. Those of other sizes are freed before new ones are made, to reuse their memory.

    Args:
        pipeline: a `DistributedPipeline`; its strategy and its option `transport` are used.
        world: the ranks.

    Raises:
        InputError: the options for the exchange of rows cannot be met.

    Attributes:
        captures: True if CUDA graphs can hold steps, and plans recur.
        peer: True if all rows are written into the memory of other GPUs.
        uses_peer_replicas: True if replicas exchange the rows that they drew through peer memory.
        hierarchy: forwards rows between machines; None if rows are sent directly.
        one_for_all: True if the transport's buffers have one size for all pairs of ranks.
        pictures: [n] buffer of the images that graphs read, see `places`.
    """

    def __init__(self, pipeline: "DistributedPipeline", world: World) -> None:
        transport, self._strategy, self._world = pipeline.config.transport, pipeline.strategy, world
        rows = self._strategy.rows
        self._transport: Transport | None = None
        self._shape: tuple[Any, ...] = ()
        self._lists: TileLists | None = None
        self._lists_shape: tuple[int, ...] = ()
        self.pictures, self._channels = torch.zeros(0), 3
        self.peer, self._peer_reachable, self._by_sort = False, False, rows.slots
        self.uses_peer_replicas = False
        self.hierarchy: Hierarchy | None = None
        self.one_for_all = self._by_sort
        self.captures = self._can_capture()
        if self._by_sort and self._strategy.assignment.learns is not Feedback.WORK and rows.is_exchanged:
            raise InputError(
                f"--pipeline.tile-lists sort: sorted lists want bands of rows of tiles, and {self._strategy.name} cuts "
                "views into patches. Use --pipeline.tile-lists gather."
            )
        if not rows.is_exchanged and not (self._strategy.gradients.summed and world.size > 1):
            return
        try:
            can_forward_rows = is_hierarchical(rows, world, peer=True)
            choice = choose_transport(world, transport, relayed=can_forward_rows)
        except RuntimeError as error:
            raise InputError(f"--pipeline.transport {transport}: {error}") from error
        if not rows.is_exchanged:
            self.uses_peer_replicas = choice.name == "peer"
            return
        self.peer, self._peer_reachable = choice.name == "peer", choice.peer
        if can_forward_rows and is_hierarchical(rows, world, peer=choice.peer):
            self.hierarchy = Hierarchy.of(world)
        self.one_for_all = self.peer or self._by_sort
        for part in (self._strategy.assignment, self._strategy.pixels):
            part.fast_links = choice.peer and world.size > 1
        self.captures = self._can_capture()
        if rows.half and self.peer and world.size > 1:
            raise InputError(
                "--pipeline.wire half: it is for collectives; splats are exchanged through peer memory here. Leave it "
                "out, or add --pipeline.transport collective."
            )
        if world.is_main and world.size > 1:
            CONSOLE.print(choice.reason)

    def _can_capture(self) -> bool:
        return self._world.device.type == "cuda" and not self._by_sort and self._strategy.assignment.recurs

    def transport(self, settings: StepSettings, kernels: Kernels) -> Transport:
        """Return the transport of rows and their gradients."""
        size = settings.views, settings.width, settings.height, self._world.size
        pixels = self._strategy.assignment.most_exchanged(*size) if self.peer else 0
        self._strategy.pixels.prepare(pixels, self._world)
        rows, words = settings.rows, settings.words(self._strategy.assignment)
        pairs = self.pairs(settings.segment)
        old, shape = self._transport, (rows, pairs, words)
        if old is not None and type(old.kernels) is type(kernels):
            of_rows_alone = self._shape[1:] == shape[1:]  # True if shapes differ in `rows` at most
            if self._shape == shape or (of_rows_alone and old.fit(rows)):
                self._shape = shape
                old.kernels = kernels  # a row's layout is the same
                return old
        old = self._transport = None  # free its memory for the next one
        self._shape = shape
        self._transport = make_transport(
            self._strategy.rows, self._strategy.gradients, self._world, kernels, rows, pairs, words,
            peer=self._peer_reachable or self.uses_peer_replicas,
        )  # fmt: skip
        return self._transport

    def spared(self) -> dict[str, bool]:
        """Return which capacities may have a margin: none that collectives transfer, as those of `batch`, and of pairs
        inside one of several machines."""
        replicas = self._strategy.gradients.summed and self._world.size > 1
        return {"rows": self.uses_peer_replicas or not replicas, "pairs": self.peer}

    def pairs(self, segment: int | Pairs) -> Pairs:
        """Return the capacities of all pairs of ranks, or with a hierarchy of each rank's counts."""
        return pairs_of(segment, self._world.size, self.hierarchy.num_counts if self.hierarchy else self._world.size)

    def forget(self) -> None:
        """Release the step's buffers. A lasting transport is kept: rebuilding it is slow and needs all ranks."""
        if self._transport is not None and not self._transport.is_reusable:
            self._transport = None

    def lists(self, settings: StepSettings, kernels: Kernels, transport: Transport) -> TileLists:
        """Return the builder of each tile's list of splats."""
        if not self._by_sort:
            return GatheredLists(kernels, settings.intersections)
        shape = (settings.width, settings.height, settings.rows, transport.lines, settings.intersections)
        if self._lists is None or self._lists_shape != shape:
            self._lists = None  # free its memory for the next one
            self._lists_shape = shape
            self._lists = SortedLists(settings, self._world, transport.lines, peer=self.peer)
        return self._lists

    def make_pictures(self, settings: StepSettings, kind: torch.dtype) -> None:
        """Allocate the image buffer of captured steps, which read images at fixed addresses."""
        size = settings.views, settings.width, settings.height, self._world.size
        self._channels = settings.channels
        numbers = self._channels * self._strategy.assignment.most_pixels(*size, HALO) if self.captures else 0
        if len(self.pictures) != numbers or self.pictures.dtype != kind:
            self.pictures = torch.empty(numbers, dtype=kind, device=self._world.device)

    def targets(self, parts: Sequence[ImagePart], patches: Sequence[Patch], views: Sequence[View]) -> list[Tensor]:
        """Return the part [h, w, channels] of each photograph under a rendered rectangle, in the buffer of a step.

        Args:
            parts, patches: those of this rank.
            views: the batch's views.
        """
        rectangles = [patch.rendered(views[patch.view]) for patch in patches]
        there = [part.under(one).data["image"] for part, one in zip(parts, rectangles, strict=True)]
        if not self.captures:
            return [image.contiguous() for image in there]
        return [place.copy_(image) for place, image in zip(self.places(patches, views), there, strict=True)]

    def places(self, patches: Sequence[Patch], views: Sequence[View]) -> list[Tensor]:
        """Return the buffers [h, w, channels] from which graphs read the photographs under rendered rectangles.

        They are consecutive, and the same for every step of a plan. See `targets` for the arguments.
        """
        found: list[Tensor] = []
        start = 0
        for patch in patches:
            x0, y0, x1, y1 = patch.rendered(views[patch.view])
            end = start + self._channels * (y1 - y0) * (x1 - x0)
            found.append(self.pictures[start:end].view(y1 - y0, x1 - x0, self._channels))
            start = end
        return found

    def exchanges_in(self, part: str) -> bool:
        """Return whether this part of a step exchanges data without a collective, which is timed separately."""
        if not self.peer or self._world.size == 1:
            return part == "return" and self.uses_peer_replicas
        return part in ("send", "return") or (part == "pixels" and not self._strategy.pixels.whole)

    def count_traffic(self, status: Status) -> None:
        """Count bytes that peers wrote to each other; collectives count their own."""
        if self._transport is not None:
            self._world.traffic.add(self._transport.written_bytes(status.done, status.rows, status.sent))
