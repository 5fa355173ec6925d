"""Images held by one rank, and their exchange with the ranks that render them."""

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
from ns_multigpu.plugin.capture.image_moves import ImageMove, moves_of
from ns_multigpu.plugin.capture.image_owners import checked_owners
from ns_multigpu.plugin.capture.image_store import ImageData, ImageShape, ImageStore, aligned, from_bytes, into_bytes
from ns_multigpu.plugin.faults.host_memory import available_memory
from ns_multigpu.plugin.launch.processes import cores

_MOST_THREADS = 16


class ImageError(RuntimeError):
    """Image that was readable when training started and is unreadable now."""


class ImageShare:
    """Images of a split, distributed so that one rank holds each view.

    Images that fit into `budget` are decoded at once, by several threads. Otherwise images are decoded on demand, or
    earlier if `expect` named them. The delivered pixels are the same.

    Args:
        shapes: of all views' images, the same on every rank.
        decode: view -> its image; several threads call it.
        world: the ranks.
        owners: the rank that holds each view, the same on every rank; None: rank i % world size holds view i.
        label: name of the split in the progress bar and in errors.
        budget: bytes that this rank may hold; None for no limit.
        place: the device that holds them.
        pinned: keep the images in page-locked memory, for asynchronous copies to a GPU.
        remedy: sentence for images that exceed a machine's free memory; "" to not compare them with it.

    Raises:
        InputError: on every rank, naming each unreadable image, or if the budget is too small, or memory.
        ValueError: on every rank, if homes are not one rank per view, or differ between ranks.
    """

    def __init__(
        self,
        shapes: Sequence[ImageShape],
        decode: Callable[[int], ImageData],
        world: World,
        *,
        owners: Sequence[int] | None = None,
        label: str,
        budget: int | None = None,
        place: torch.device | str = "cpu",
        pinned: bool = False,
        remedy: str = "",
    ) -> None:
        self._world = world
        self._label = label
        self.shapes = list(shapes)
        self.owners = checked_owners(owners, len(self.shapes), label, world)
        """Rank that holds each view."""
        self.own = [index for index, home in enumerate(self.owners) if home == world.rank]
        """Views held by this rank."""
        if remedy and torch.device(place).type == "cpu":
            self._refuse_too_many(budget, remedy)
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

    def move(self, owners: Sequence[int]) -> None:
        """Change the rank that holds each view. A rank's images must keep their shapes: see `swapped_owners`.

        Ranks that hold all of their images in memory decode new ones from their files. Every rank calls it between
        steps, with the same owners.

        Raises:
            InputError: on every rank, naming each image that is unreadable now.
            ValueError: on every rank, if owners are not one rank per view, or differ between ranks.
        """
        found, rank = checked_owners(owners, len(self.shapes), self._label, self._world), self._world.rank
        gone = [view for view in self.own if found[view] != rank]
        come = [view for view, home in enumerate(found) if home == rank != self.owners[view]]
        self.owners, self.own = found, [view for view, home in enumerate(found) if home == rank]
        failed = self.store.replace(gone, {view: self.shapes[view] for view in come})
        problems = [f"{self._label} view {i}: {type(e).__name__}: {e}" for i, e in sorted(failed.items())]
        raise_together(problems, self._world, "{count} image(s) cannot be used:")

    def holder(self, index: int) -> int:
        """Return the rank that holds a view's image."""
        return self.owners[index]

    def expect(self, indices: Sequence[int]) -> None:
        """Start to decode, in this order, the views that this rank holds and has not decoded."""
        if not self.store.complete:
            self.store.expect([index for index in indices if self.holder(index) == self._world.rank])

    @property
    def lookahead(self) -> int:
        """Return the number of coming views that `expect` can use; 0 if all images are decoded already."""
        return 0 if self.store.complete else -(-self.store.depth * len(self.shapes) // len(self.own))

    def image(self, index: int, device: torch.device) -> ImageData:
        """Return the image of a view held by this rank, on `device`.

        Raises:
            KeyError: another rank holds it.
            ImageError: an image that is decoded on demand is unreadable now.
        """
        return self._rows(index, device)

    def deliver(
        self, indices: Sequence[int], plan: Plan, device: torch.device, views: Sequence[View]
    ) -> dict[Patch, ImagePart]:
        """Send the image parts that a batch's patches show to the ranks that own their pixels.

        Only rendered rectangles are sent, halos included, or the complete image: see `rectangles_of`. Each image is
        read once. No communication takes place if every rank holds the images it needs. Every rank calls it with the
        same views and plan.

        Args:
            indices: the batch's views by their number in the capture.
            plan: the owner of each pixel.
            device: destination of the images.
            views: the batch's, at the current resolution.

        Returns:
            by patch of this rank, an image part that covers `Patch.rendered`; the complete image if the view's
                resolution differs. Images held on `device` are not copied.

        Raises:
            ImageError: an image that is decoded on demand is unreadable now.
        """
        rank = self._world.rank
        moves = moves_of(indices, plan, views, self.shapes, self.holder)
        needed: dict[int, list[Rectangle]] = {}
        for move in moves:
            if move.source == rank:
                needed.setdefault(indices[move.position], []).append(move.rectangle)
        held: dict[int, ImagePart] = {}
        for index in dict.fromkeys(indices):  # in the order of `expect`
            if index in needed:
                top, bottom = min(r[1] for r in needed[index]), max(r[3] for r in needed[index])
                rows = self._rows(index, device, (top, bottom))
                held[index] = ImagePart((0, top, self.shapes[index].width, bottom), rows)
        # Local parts are not sent.
        here = {m.position: [held[indices[m.position]]] for m in moves if m.source == m.to == rank}
        for move, part in self._exchange([m for m in moves if m.source != m.to], indices, held, device):
            here.setdefault(move.position, []).append(part)
        return {
            patch: _under(patch, views[patch.view], self.shapes[indices[patch.view]], here.get(patch.view, []), device)
            for patch in plan.owned[rank]
        }

    def fetch(self, index: int, device: torch.device) -> ImageData:
        """Return a view's image on every rank. Every rank calls it."""
        return self.fetch_all([index], device)[0]

    def fetch_all(self, indices: Sequence[int], device: torch.device) -> list[ImageData]:
        """Return several views' images on every rank, with one message per pair of ranks. Every rank calls it with the
        same.
        """
        rank, moves, held = self._world.rank, list[ImageMove](), dict[int, ImagePart]()
        for position, index in enumerate(indices):
            home, shape = self.holder(index), self.shapes[index]
            whole = (0, 0, shape.width, shape.height)
            moves += [ImageMove(home, other, position, whole) for other in range(self._world.size) if other != home]
            if home == rank:
                held[index] = ImagePart(whole, self.image(index, device))
        received_parts = {indices[move.position]: part for move, part in self._exchange(moves, indices, held, device)}
        return [dict((held | received_parts)[index].data) for index in indices]

    def _rows(self, index: int, device: torch.device, rows: tuple[int, int] | None = None) -> ImageData:
        """Return some rows of a locally held image; all of them by default."""
        if not 0 <= index < len(self.shapes) or self.holder(index) != self._world.rank:
            raise KeyError(f"view {index} of {len(self.shapes)} is not held by rank {self._world.rank}")
        try:
            return self.store.rows(index, device, *(rows or (0, self.shapes[index].height)))
        except Exception as error:
            raise ImageError(f"{self._label} view {index} cannot be read: {type(error).__name__}: {error}") from error

    def _exchange(
        self, moves: Sequence[ImageMove], indices: Sequence[int], held: Mapping[int, ImagePart], device: torch.device
    ) -> list[tuple[ImageMove, ImagePart]]:
        """Exchange image parts between ranks; return the parts that this rank received.

        Args:
            moves: of all ranks, the same on every rank; none is local.
            indices: the batch's views by their number in the capture.
            held: this rank's image parts to send, by that number.
            device: device of the sent and received parts.
        """
        if not moves:
            return []
        world = self._world

        def shape(move: ImageMove) -> ImageShape:
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
        received_parts: list[tuple[ImageMove, ImagePart]] = []
        start = 0
        for move in into:
            end = start + shape(move).nbytes
            received_parts.append((move, ImagePart(move.rectangle, from_bytes(received[start:end], shape(move)))))
            start = end
        return received_parts

    def _refuse_too_many(self, budget: int | None, remedy: str) -> None:
        """Raise on every rank if a machine lacks memory for its ranks' images. Every rank calls it."""
        world, free = self._world, available_memory()
        needed = sum(aligned(self.shapes[index].nbytes) for index in self.own)
        of_ranks = all_gather_ints([needed if budget is None else min(needed, budget)], world)
        first = world.rank - world.rank % world.host_size
        here = sum(row[0] for row in of_ranks[first : first + world.host_size])
        lines: list[str] = []
        if free is not None and here > free:
            lines.append(f"{world.machine_name(world.machine)}: {here / 1e9:.3g} GB, and {free / 1e9:.3g} GB free")
        raise_together(lines, world, f"The {self._label} images do not fit the host's memory. {remedy}")

    def _say_what_is_kept(self) -> None:
        """Print a note if a rank decodes images on demand. Every rank calls it."""
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
    """Return the received image part that covers a patch."""
    rectangle = patch.rendered(view)
    if is_empty(rectangle):
        return ImagePart(rectangle, from_bytes(torch.empty(0, dtype=torch.uint8, device=device), shape.cut(rectangle)))
    if (view.width, view.height) != (shape.width, shape.height):
        return parts[0]  # the complete image
    return next(part for part in parts if contains(part.rectangle, rectangle))
