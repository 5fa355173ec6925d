"""The images that one rank holds, and how they reach the rank that renders them."""

from collections.abc import Callable, Sequence

import torch
from nerfstudio.utils.rich_utils import CONSOLE
from rich.progress import Progress
from torch import Tensor

from ns_multigpu.core.collectives import exchange_rows
from ns_multigpu.core.plan import Plan
from ns_multigpu.core.world import World
from ns_multigpu.plugin.capture.checks import raise_together
from ns_multigpu.plugin.capture.image_store import ImageData, ImageShape, ImageStore, from_bytes
from ns_multigpu.plugin.launch.launcher import cores

_MOST_THREADS = 16


class ImageError(RuntimeError):
    """An image could be read when training started, and cannot any more."""


class ImageShare:
    """View i of a split is held by rank i % world size, so that a machine holds its ranks' views once.

    A share that fits into `budget` is decoded at once, by several threads; of a larger one, images are decoded when
    they are needed, or before if `expect` told so. What is delivered is the same in both cases.

    Args:
        shapes: of all views' images, the same on every rank.
        decode: view -> its image; called from several threads.
        world: the ranks.
        label: what the progress bar and errors call the split.
        budget: bytes that this rank may hold; None for no limit.
        place: the device that holds them.
        pinned: keep the images in page-locked memory, for asynchronous copies to a GPU.

    Raises:
        InputError: on every rank, naming each image that could not be read, or that the budget is too small.
    """

    def __init__(
        self,
        shapes: Sequence[ImageShape],
        decode: Callable[[int], ImageData],
        world: World,
        *,
        label: str,
        budget: int | None = None,
        place: torch.device | str = "cpu",
        pinned: bool = False,
    ) -> None:
        self._world = world
        self._label = label
        self.shapes = list(shapes)
        self.own = list(range(world.rank, len(self.shapes), world.size))
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
        elif world.is_main:
            share = sum(self.shapes[index].nbytes for index in self.own)
            CONSOLE.print(
                f"{label.capitalize()} images: {self.store.nbytes / 1e9:.1f} GB are kept of this rank's "
                f"{share / 1e9:.1f} GB, the others are decoded when they are needed."
            )
        raise_together(problems, world, "{count} image(s) cannot be used:")

    def holder(self, index: int) -> int:
        """The rank that holds a view's image."""
        return index % self._world.size

    def expect(self, indices: Sequence[int]) -> None:
        """Starts to decode those of `indices`, in the order of need, that are held here and not yet decoded."""
        if not self.store.complete:
            self.store.expect([index for index in indices if self.holder(index) == self._world.rank])

    @property
    def lookahead(self) -> int:
        """How many coming views `expect` can make use of; 0 if all images held here are there."""
        return 0 if self.store.complete else self.store.depth * self._world.size

    def image(self, index: int, device: torch.device) -> ImageData:
        """The image of a view held here, on `device`.

        Raises:
            KeyError: another rank holds it.
            ImageError: an image that is decoded on demand cannot be read any more.
        """
        return from_bytes(self._read(index, device), self.shapes[index])

    def deliver(self, indices: Sequence[int], plan: Plan, device: torch.device) -> dict[int, ImageData]:
        """Brings each image of a batch to the ranks that render a patch of it.

        Every rank calls it with the same batch and plan. Nothing is sent when every image is where it is needed.

        Returns:
            position in the batch -> image on `device`, for the views of which this rank has a patch.

        Raises:
            ImageError: an image that is decoded on demand cannot be read any more.
        """
        world = self._world
        readers = [sorted({patch.view for patch in patches}) for patches in plan.owned]
        moves = [
            (self.holder(indices[position]), reader, position)
            for reader, positions in enumerate(readers)
            for position in positions
            if self.holder(indices[position]) != reader
        ]
        here = {
            position: self.image(indices[position], device)
            for position in readers[world.rank]
            if self.holder(indices[position]) == world.rank
        }
        if moves:
            here.update(self._receive(indices, moves, device))
        return here

    def fetch(self, index: int, device: torch.device) -> ImageData:
        """A view's image on every rank. Every rank calls it."""
        everyone = [(self.holder(index), rank, 0) for rank in range(self._world.size) if rank != self.holder(index)]
        if self.holder(index) == self._world.rank:
            if everyone:
                self._receive([index], everyone, device)
            return self.image(index, device)
        return self._receive([index], everyone, device)[0]

    def _read(self, index: int, device: torch.device) -> Tensor:
        if not 0 <= index < len(self.shapes) or self.holder(index) != self._world.rank:
            raise KeyError(f"view {index} of {len(self.shapes)} is not held by rank {self._world.rank}")
        try:
            return self.store.read(index, device)
        except Exception as error:
            raise ImageError(
                f"{self._label} view {index} could be read when training started and now cannot: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _receive(
        self, indices: Sequence[int], moves: Sequence[tuple[int, int, int]], device: torch.device
    ) -> dict[int, ImageData]:
        """Carries out the (from, to, position) moves; returns what came here."""
        world = self._world
        out = sorted((to, position) for source, to, position in moves if source == world.rank)
        into = sorted((source, position) for source, to, position in moves if to == world.rank)
        send, receive = [0] * world.size, [0] * world.size
        for to, position in out:
            send[to] += self.shapes[indices[position]].nbytes
        for source, position in into:
            receive[source] += self.shapes[indices[position]].nbytes
        payload = [self._read(indices[position], device) for _, position in out]
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        received = exchange_rows(torch.cat(payload) if payload else empty, send, receive, world)
        result: dict[int, ImageData] = {}
        start = 0
        for _, position in into:
            shape = self.shapes[indices[position]]
            result[position] = from_bytes(received[start : start + shape.nbytes], shape)
            start += shape.nbytes
        return result
