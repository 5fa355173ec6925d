"""What steps work with that outlives a step made anew: transport, lists, and room for images that graphs read."""

from collections.abc import Sequence
from typing import Any

import torch
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from ns_multigpu.core.assign.assignment import Feedback
from ns_multigpu.core.assign.image_part import ImagePart
from ns_multigpu.core.dist.peer_memory import choose_transport
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.hierarchy import Relays
from ns_multigpu.core.exchange.pair_capacities import Pairs, pairs_of
from ns_multigpu.core.exchange.transports import Transport, make_transport, relays_serve
from ns_multigpu.core.kernels import Kernels
from ns_multigpu.core.step.step_settings import HALO, Status, StepSettings
from ns_multigpu.core.step.tile_lists import GatheredLists, SortedLists, TileLists
from ns_multigpu.core.types import Patch, View
from ns_multigpu.plugin.faults.errors import InputError


class StepBuffers:
    """The buffers of one rank's steps. Those of other sizes go before new ones are made: they take each other's memory.

    Args:
        pipeline: a `DistributedPipeline`: of its options `transport`, `tile_lists` and `wire`.
        world: the ranks.

    Raises:
        InputError: what is asked for about the exchange of rows cannot be had.

    Attributes:
        captures: whether CUDA graphs can hold steps.
        peer: whether all rows are written into the memory of other GPUs.
        tells: whether replicas so tell each other what they drew.
        relays: how rows are handed on over several machines; None where they are not.
        one_for_all: whether what rows travel through has one size for all pairs of ranks.
        pictures: [n] room for what graphs look for, see `places`.
    """

    def __init__(self, pipeline: Any, world: World) -> None:
        options, self._strategy, self._world = pipeline.config, pipeline.strategy, world
        self._transport: Transport | None = None
        self._shape: tuple[Any, ...] = ()
        self._lists: TileLists | None = None
        self._lists_shape: tuple[int, ...] = ()
        self.pictures = torch.zeros(0)
        self.peer, self._reach, self._by_sort = False, False, options.tile_lists == "sort"
        self.tells = False
        self.relays: Relays | None = None
        self._half = options.wire == "half"
        self.one_for_all = self._by_sort
        self.captures = world.device.type == "cuda" and not self._by_sort and self._strategy.assignment.recurs
        if self._by_sort and self._strategy.assignment.learns is not Feedback.WORK and self._strategy.rows.travels:
            raise InputError(
                f"--pipeline.tile-lists sort: sorted lists want bands of rows of tiles, and {self._strategy.name} cuts "
                "views into patches. Use --pipeline.tile-lists gather."
            )
        if not self._strategy.rows.travels and not (self._strategy.gradients.summed and world.size > 1):
            return
        try:
            handed_on = relays_serve(self._strategy.rows, world, peer=True) and not self._by_sort
            choice = choose_transport(world, options.transport, relayed=handed_on)
        except RuntimeError as error:
            raise InputError(f"--pipeline.transport {options.transport}: {error}") from error
        if not self._strategy.rows.travels:
            self.tells = choice.name == "peer"
            return
        self.peer, self._reach = choice.name == "peer", choice.peer
        if handed_on and relays_serve(self._strategy.rows, world, peer=choice.peer):
            self.relays = Relays.of(world)
        self.one_for_all = self.peer or self._by_sort
        if self._half and self.peer and world.size > 1:
            raise InputError(
                "--pipeline.wire half: that is for collectives, and splats travel through peer memory here. Leave it "
                "out, or add --pipeline.transport collective."
            )
        if world.is_main and world.size > 1:
            CONSOLE.print(choice.reason)

    def transport(self, settings: StepSettings, kernels: Kernels) -> Transport:
        """What carries rows, and their gradients."""
        rows, words = settings.rows, settings.words(self._strategy.assignment)
        pairs = self.pairs(settings.segment)
        old, shape = self._transport, (rows, pairs, words)
        if old is not None and type(old.kernels) is type(kernels):
            of_rows_alone = self._shape[1:] == shape[1:]  # they differ, if at all
            if self._shape == shape or (of_rows_alone and old.fit(rows)):
                self._shape = shape
                old.kernels = kernels  # what they differ in is not what a row is
                return old
        old = self._transport = None  # its memory is the next one's
        self._shape = shape
        self._transport = make_transport(
            self._strategy.rows, self._strategy.gradients, self._world, kernels, rows, pairs, words,
            peer=self._reach or self.tells, half=self._half, slots=self._by_sort,
        )  # fmt: skip
        return self._transport

    def spared(self) -> dict[str, bool]:
        """What may have room to spare: not what goes by collectives, which travels with its room."""
        replicas = self._strategy.gradients.summed and self._world.size > 1
        return {"rows": self.tells or not replicas, "pairs": self.peer}

    def pairs(self, segment: int | Pairs) -> Pairs:
        """The capacities of all pairs of ranks, or with relays of all that they count."""
        return pairs_of(segment, self._world.size, self.relays.numbers if self.relays else self._world.size)

    def forget(self) -> None:
        """The step goes. What rows travel through stays: it is made anew by all ranks together, and takes time."""
        if self._transport is not None and not self._transport.lasts:
            self._transport = None

    def lists(self, settings: StepSettings, kernels: Kernels, transport: Transport) -> TileLists:
        """What finds each tile's splats."""
        if not self._by_sort:
            return GatheredLists(kernels, settings.intersections)
        shape = (settings.width, settings.height, settings.rows, transport.lines, settings.intersections)
        if self._lists is None or self._lists_shape != shape:
            self._lists = None  # its memory is the next one's
            self._lists_shape = shape
            self._lists = SortedLists(settings, self._world, transport.lines, peer=self.peer)
        return self._lists

    def make_pictures(self, settings: StepSettings, kind: torch.dtype) -> None:
        """Makes room for the images of a step of graphs, which read them where they were when they were captured."""
        size = settings.views, settings.width, settings.height, self._world.size
        room = 3 * self._strategy.assignment.most_pixels(*size, HALO) if self.captures else 0
        if len(self.pictures) != room or self.pictures.dtype != kind:
            self.pictures = torch.empty(room, dtype=kind, device=self._world.device)

    def targets(self, parts: Sequence[ImagePart], patches: Sequence[Patch], views: Sequence[View]) -> list[Tensor]:
        """What lies of each image [h, w, 3] under a rendered rectangle, where a step finds it.

        Args:
            parts, patches: of this rank's patches.
            views: the batch's.
        """
        rectangles = [patch.rendered(views[patch.view]) for patch in patches]
        there = [part.under(one).data["image"] for part, one in zip(parts, rectangles, strict=True)]
        if not self.captures:
            return [image.contiguous() for image in there]
        return [place.copy_(image) for place, image in zip(self.places(patches, views), there, strict=True)]

    def places(self, patches: Sequence[Patch], views: Sequence[View]) -> list[Tensor]:
        """Where graphs look for what lies of each image [h, w, 3] under a rendered rectangle: one behind the other, and
        of one plan's patches always the same. Arguments as `targets`'."""
        found: list[Tensor] = []
        start = 0
        for patch in patches:
            x0, y0, x1, y1 = patch.rendered(views[patch.view])
            end = start + 3 * (y1 - y0) * (x1 - x0)
            found.append(self.pictures[start:end].view(y1 - y0, x1 - x0, 3))
            start = end
        return found

    def exchanges_in(self, part: str) -> bool:
        """Whether ranks meet within this part of a step without a collective, which would be measured by itself."""
        return part in (("send", "return") if self.peer and self._world.size > 1 else ("return",) if self.tells else ())

    def count_traffic(self, status: Status) -> None:
        """Counts what peers wrote to each other; collectives count for themselves."""
        if self._transport is not None:
            self._world.traffic.add(self._transport.written_bytes(status.done, status.rows, status.sent))
