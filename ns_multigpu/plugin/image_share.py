"""The images that one rank decodes and holds, and how they reach the rank that renders them."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from nerfstudio.utils.rich_utils import CONSOLE
from rich.progress import track
from torch import Tensor

from ns_multigpu.core.collectives import all_gather_objects, exchange_rows
from ns_multigpu.core.placement import Plan
from ns_multigpu.core.world import World
from ns_multigpu.plugin.errors import InputError

ImageData = dict[str, Tensor]
"""`image` [H, W, 3 or 4] and perhaps `mask` [H, W, 1] bool, on the host."""


@dataclass(frozen=True)
class ImageShape:
    """What every rank must know of an image that another rank holds."""

    height: int
    width: int
    channels: int
    dtype: torch.dtype
    masked: bool

    @property
    def nbytes(self) -> int:
        """Bytes on the wire: the image, then its mask."""
        pixels = self.height * self.width
        return pixels * self.channels * self.dtype.itemsize + (pixels if self.masked else 0)


class ImageShare:
    """View i of a split is held by rank i % world size. Decoded in parallel, once, by whoever holds it.

    Args:
        count: number of views in the split.
        decode: view -> its image; called from several threads.
        world: the ranks.
        pinned: keep the images in page-locked memory, for asynchronous copies to a GPU.
        label: what the progress bar and errors call the split.

    Raises:
        InputError: on every rank, naming each image that could not be read.
    """

    def __init__(
        self, count: int, decode: Callable[[int], ImageData], world: World, *, pinned: bool, label: str
    ) -> None:
        self._world = world
        self._images: dict[int, ImageData] = {}
        mine = range(world.rank, count, world.size)
        failed: list[str] = []
        workers = max(1, (os.cpu_count() or 1) // world.local_size)

        def attempt(index: int) -> tuple[int, ImageData | Exception]:
            try:
                return index, decode(index)
            except Exception as error:  # an unreadable image may fail in many ways; all are reported below
                return index, error

        with ThreadPoolExecutor(max_workers=workers) as pool:
            done = pool.map(attempt, mine)
            if world.is_main:
                done = track(done, f"Loading {label} images", total=len(mine), console=CONSOLE, transient=True)
            for index, result in done:
                if isinstance(result, Exception):
                    failed.append(f"{label} view {index}: {type(result).__name__}: {result}")
                    continue
                self._images[index] = {k: v.contiguous().pin_memory() if pinned else v for k, v in result.items()}
        every = all_gather_objects(({i: _shape(d) for i, d in self._images.items()}, failed), world)
        problems = sorted(line for _, lines in every for line in lines)
        if problems:
            raise InputError(f"{len(problems)} image(s) cannot be used:\n  " + "\n  ".join(problems))
        self.shapes: dict[int, ImageShape] = {i: shape for shapes, _ in every for i, shape in shapes.items()}

    def holder(self, index: int) -> int:
        """The rank that holds a view's image."""
        return index % self._world.size

    @property
    def own(self) -> list[int]:
        """The views held here."""
        return sorted(self._images)

    def __getitem__(self, index: int) -> ImageData:
        """The image of a view held here, on the host.

        Raises:
            KeyError: another rank holds it.
        """
        return self._images[index]

    def deliver(self, indices: Sequence[int], plan: Plan, device: torch.device) -> dict[int, ImageData]:
        """Brings each image of a batch to the ranks that render a patch of it.

        Every rank calls it with the same batch and plan. Nothing is sent when every image is where it is needed.

        Returns:
            position in the batch -> image on `device`, for the views of which this rank has a patch.
        """
        world = self._world
        readers = [sorted({patch.view for patch in patches}) for patches in plan]
        moves = [
            (self.holder(indices[position]), reader, position)
            for reader, positions in enumerate(readers)
            for position in positions
            if self.holder(indices[position]) != reader
        ]
        here = {
            position: {k: v.to(device, non_blocking=True) for k, v in self._images[indices[position]].items()}
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
            return {k: v.to(device) for k, v in self._images[index].items()}
        return self._receive([index], everyone, device)[0]

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
        payload = [_to_bytes(self._images[indices[position]], device) for _, position in out]
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        received = exchange_rows(torch.cat(payload) if payload else empty, send, receive, world)
        result: dict[int, ImageData] = {}
        start = 0
        for _, position in into:
            shape = self.shapes[indices[position]]
            result[position] = _from_bytes(received[start : start + shape.nbytes], shape)
            start += shape.nbytes
        return result


def _shape(data: ImageData) -> ImageShape:
    height, width, channels = data["image"].shape
    return ImageShape(height, width, channels, data["image"].dtype, "mask" in data)


def _to_bytes(data: ImageData, device: torch.device) -> Tensor:
    parts = [data["image"].to(device, non_blocking=True).contiguous().view(torch.uint8).reshape(-1)]
    if "mask" in data:
        parts.append(data["mask"].to(device, non_blocking=True).contiguous().view(torch.uint8).reshape(-1))
    return torch.cat(parts)


def _from_bytes(data: Tensor, shape: ImageShape) -> ImageData:
    pixels = shape.height * shape.width
    size = pixels * shape.channels * shape.dtype.itemsize
    # A copy, because a slice need not start where a wider type may.
    image = data[:size].clone().view(shape.dtype).reshape(shape.height, shape.width, shape.channels)
    result = {"image": image}
    if shape.masked:
        result["mask"] = data[size:].view(torch.bool).reshape(shape.height, shape.width, 1)
    return result
