"""The images that one rank holds, and how they reach the rank that renders them."""

from collections.abc import Callable, Mapping, Sequence

import torch
from nerfstudio.utils.rich_utils import CONSOLE
from rich.progress import Progress

from ns_multigpu.core.assign.image_part import ImagePart, Rectangle, contains, is_empty
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.collectives import all_gather_ints, exchange_rows
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import Patch, View
from ns_multigpu.plugin.capture.checks import raise_together
from ns_multigpu.plugin.capture.image_homes import checked_homes
from ns_multigpu.plugin.capture.image_moves import Move, moves_of
from ns_multigpu.plugin.capture.image_store import ImageData, ImageShape, ImageStore, aligned, from_bytes, into_bytes
from ns_multigpu.plugin.launch.processes import cores

_MOST_THREADS = 16


class ImageError(RuntimeError):
    """An image could be read when training started, and cannot any more."""


class ImageShare:
    """Each view of a split is held by one rank, so that a machine holds its ranks' views once, and no others.

    A share that fits into `budget` is decoded at once, by several threads; of a larger one, images are decoded when
    they are needed, or before if `expect` told so. What is delivered is the same in both cases.

    Args:
        shapes: of all views' images, the same on every rank.
        decode: view -> its image; called from several threads.
        world: the ranks.
        homes: the rank that holds each view, the same on every rank; None: rank i % world size holds view i.
        label: what the progress bar and errors call the split.
        budget: bytes that this rank may hold; None for no limit.
        place: the device that holds them.
        pinned: keep the images in page-locked memory, for asynchronous copies to a GPU.

    Raises:
        InputError: on every rank, naming each image that could not be read, or that the budget is too small.
        ValueError: on every rank, that homes are not one rank a view, or differ between ranks.
    """

    def __init__(
        self,
        shapes: Sequence[ImageShape],
        decode: Callable[[int], ImageData],
        world: World,
        *,
        homes: Sequence[int] | None = None,
        label: str,
        budget: int | None = None,
        place: torch.device | str = "cpu",
        pinned: bool = False,
    ) -> None:
        self._world = world
        self._label = label
        self.shapes = list(shapes)
        self.homes = checked_homes(homes, len(self.shapes), label, world)
        """The rank that holds each view."""
        self.own = [index for index, home in enumerate(self.homes) if home == world.rank]
        """The views held here."""
        problems: list[str] = []
        try:
            self.store = ImageStore(
                {index: self.shapes[index] for index in self.own},
                decode,
                budget=budget,
                place=place,
                pinned=pinned,
                threads=max(1, min(_MOST_THREADS, cores() // world.host_size)),
                device=world.device,
            )
        except ValueError as error:
            problems.append(f"rank {world.rank}: {error}")
        raise_together(problems, world, f"The {label} images do not fit. Raise --pipeline.datamanager.image-memory-gb.")
        if self.store.complete:
            with Progress(console=CONSOLE, transient=True, disable=not world.is_main) as bar:
                task = bar.add_task(f"Loading {label} images", total=len(self.own))
                failed = self.store.load_all(lambda: bar.advance(task))
            problems = [f"{label} view {i}: {type(e).__name__}: {e}" for i, e in sorted(failed.items())]
        raise_together(problems, world, "{count} image(s) cannot be used:")
        self._say_what_is_kept()

    def holder(self, index: int) -> int:
        """The rank that holds a view's image."""
        return self.homes[index]

    def expect(self, indices: Sequence[int]) -> None:
        """Starts to decode those of `indices`, in the order of need, that are held here and not yet decoded."""
        if not self.store.complete:
            self.store.expect([index for index in indices if self.holder(index) == self._world.rank])

    @property
    def lookahead(self) -> int:
        """How many coming views `expect` can make use of; 0 if all images held here are there."""
        return 0 if self.store.complete else -(-self.store.depth * len(self.shapes) // len(self.own))

    def image(self, index: int, device: torch.device) -> ImageData:
        """The image of a view held here, on `device`.

        Raises:
            KeyError: another rank holds it.
            ImageError: an image that is decoded on demand cannot be read any more.
        """
        return self._rows(index, device)

    def deliver(
        self, indices: Sequence[int], plan: Plan, device: torch.device, views: Sequence[View]
    ) -> dict[Patch, ImagePart]:
        """Brings what a batch's patches show of its images to the ranks that own their pixels.

        Only the rectangles that are rendered travel, halos included, or the whole image: see `rectangles_of`. An image
        is read once, however many ranks need some of it. Nothing is sent, and nobody waits for others, when every image
        is where it is needed.

        Args:
            indices: the batch's views by their number in the capture.
            plan: whose pixels are whose.
            device: where the images are to be.
            views: the batch's, at the resolution of this moment. Every rank calls it with the same, and the same plan.

        Returns:
            by patch of this rank, a part of the image that reaches as far as `Patch.rendered`: the whole image where
            the view is drawn at another resolution. What is held on `device` is not copied.

        Raises:
            ImageError: an image that is decoded on demand cannot be read any more.
        """
        rank = self._world.rank
        moves = moves_of(indices, plan, views, self.shapes, self.holder)
        needed: dict[int, list[Rectangle]] = {}
        for move in moves:
            if move.source == rank:
                needed.setdefault(indices[move.position], []).append(move.rectangle)
        held: dict[int, ImagePart] = {}
        for index in dict.fromkeys(indices):  # in the order in which they are expected
            if index in needed:
                top, bottom = min(r[1] for r in needed[index]), max(r[3] for r in needed[index])
                rows = self._rows(index, device, (top, bottom))
                held[index] = ImagePart((0, top, self.shapes[index].width, bottom), rows)
        # What is needed where it is held stays as it is.
        here = {m.position: [held[indices[m.position]]] for m in moves if m.source == m.to == rank}
        for move, part in self._exchange([m for m in moves if m.source != m.to], indices, held, device):
            here.setdefault(move.position, []).append(part)
        return {
            patch: _under(patch, views[patch.view], self.shapes[indices[patch.view]], here.get(patch.view, []), device)
            for patch in plan.owned[rank]
        }

    def fetch(self, index: int, device: torch.device) -> ImageData:
        """A view's image on every rank. Every rank calls it."""
        return self.fetch_all([index], device)[0]

    def fetch_all(self, indices: Sequence[int], device: torch.device) -> list[ImageData]:
        """Several views' images on every rank, in one message between each two. Every rank calls it with the same."""
        rank, moves, held = self._world.rank, list[Move](), dict[int, ImagePart]()
        for position, index in enumerate(indices):
            home, shape = self.holder(index), self.shapes[index]
            whole = (0, 0, shape.width, shape.height)
            moves += [Move(home, other, position, whole) for other in range(self._world.size) if other != home]
            if home == rank:
                held[index] = ImagePart(whole, self.image(index, device))
        arrived = {indices[move.position]: part for move, part in self._exchange(moves, indices, held, device)}
        return [dict((held | arrived)[index].data) for index in indices]

    def _rows(self, index: int, device: torch.device, rows: tuple[int, int] | None = None) -> ImageData:
        """Some rows of an image that is held here; all of them unless told."""
        if not 0 <= index < len(self.shapes) or self.holder(index) != self._world.rank:
            raise KeyError(f"view {index} of {len(self.shapes)} is not held by rank {self._world.rank}")
        try:
            return self.store.rows(index, device, *(rows or (0, self.shapes[index].height)))
        except Exception as error:
            raise ImageError(
                f"{self._label} view {index} could be read when training started and now cannot: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _exchange(
        self, moves: Sequence[Move], indices: Sequence[int], held: Mapping[int, ImagePart], device: torch.device
    ) -> list[tuple[Move, ImagePart]]:
        """Carries out the moves of all ranks, of which none stays where it is; returns what came here.

        Args:
            moves: the same on every rank.
            indices: the batch's views by their number in the capture.
            held: by that number, what this rank sends of.
            device: where parts are and are to be.
        """
        if not moves:
            return []
        world = self._world

        def shape(move: Move) -> ImageShape:
            return self.shapes[indices[move.position]].cut(move.rectangle)

        # Both ends keep the order of `moves`, for each pair of ranks.
        out = sorted((m for m in moves if m.source == world.rank), key=lambda m: m.to)
        into = sorted((m for m in moves if m.to == world.rank), key=lambda m: m.source)
        send, receive = [0] * world.size, [0] * world.size
        for move in out:
            send[move.to] += shape(move).nbytes
        for move in into:
            receive[move.source] += shape(move).nbytes
        payload = torch.empty(sum(send), dtype=torch.uint8, device=device)
        start = 0
        for move in out:
            end = start + shape(move).nbytes
            into_bytes(held[indices[move.position]].under(move.rectangle).data, payload[start:end])
            start = end
        received = exchange_rows(payload, send, receive, world)
        arrived: list[tuple[Move, ImagePart]] = []
        start = 0
        for move in into:
            end = start + shape(move).nbytes
            arrived.append((move, ImagePart(move.rectangle, from_bytes(received[start:end], shape(move)))))
            start = end
        return arrived

    def _say_what_is_kept(self) -> None:
        """Says so where some rank decodes images when they are needed. Every rank calls it."""
        share = sum(aligned(self.shapes[index].nbytes) for index in self.own)
        table = all_gather_ints([self.store.nbytes, share, int(self.store.complete)], self._world)
        late = [rank for rank, (_, _, complete) in enumerate(table) if not complete]
        if not late or not self._world.is_main:
            return
        worst = max(late, key=lambda rank: table[rank][1] - table[rank][0])
        kept, images, _ = table[worst]
        CONSOLE.print(
            f"{self._label.capitalize()} images: {len(late)} of {self._world.size} rank(s) cannot keep all of theirs "
            f"and decode the others when they are needed; rank {worst} keeps {kept / 1e9:.1f} GB of its "
            f"{images / 1e9:.1f} GB. --pipeline.datamanager.image-memory-gb says how much a rank may keep.",
            soft_wrap=True,
        )


def _under(patch: Patch, view: View, shape: ImageShape, parts: Sequence[ImagePart], device: torch.device) -> ImagePart:
    """Of the parts of its image that are here, the one under a patch."""
    rectangle = patch.rendered(view)
    if is_empty(rectangle):
        return ImagePart(rectangle, from_bytes(torch.empty(0, dtype=torch.uint8, device=device), shape.cut(rectangle)))
    if (view.width, view.height) != (shape.width, shape.height):
        return parts[0]  # all of it
    return next(part for part in parts if contains(part.rectangle, rectangle))
