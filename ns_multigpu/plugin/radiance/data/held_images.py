"""Images to draw rays from, each held by one rank: what colours single pixels have, all ranks learn together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ns_multigpu.core.dist.collectives import sum_in_place
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.checks import raise_together
from ns_multigpu.plugin.capture.image_homes import homes_of
from ns_multigpu.plugin.capture.image_share import ImageShare
from ns_multigpu.plugin.capture.image_store import ImageData, ImageShape, aligned, shape_of
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.faults.host_memory import available_memory
from ns_multigpu.plugin.radiance.data.masks import Masks


@dataclass(frozen=True)
class Pixels:
    """Which pixels to look at, the same on every rank, on the host.

    Attributes:
        images: [R] of which image, by its place among those held.
        which: [R] row * width + column in it; where `numbered`, the number of a pixel that its mask lets through.
    """

    images: Tensor
    which: Tensor
    numbered: bool = False


@dataclass(frozen=True)
class Seen:
    """What was seen there, the same on every rank, on its device.

    Attributes:
        at: [R] row * width + column.
        image: [R, C] colours as float32, those of nerfstudio's datasets to the bit.
        mask: [R, 1] bool, whether masks let them through; None without masks.
    """

    at: Tensor
    image: Tensor
    mask: Tensor | None


class HeldImages:
    """Some images of a split, as many bytes on each rank as can be. Every rank makes one, together.

    Args:
        shapes: theirs, masks included.
        read: the image and mask of one, by its place among them; called from several threads.
        world: the ranks.
        label: what errors call the split.
        places: the devices that hold images and masks.

    Raises:
        InputError: on every rank, that images cannot be read, do not fit the hosts' memory, or differ in channels.
    """

    def __init__(
        self,
        shapes: Sequence[ImageShape],
        read: Callable[[int], ImageData],
        world: World,
        label: str,
        places: tuple[torch.device | str, torch.device | str],
    ) -> None:
        self._world, self.label, self.shapes = world, label, list(shapes)
        kinds = {(shape.channels, shape.dtype, shape.masked) for shape in shapes}
        if len(kinds) != 1:
            raise InputError(
                f"The {label} images are of different kinds: {'; '.join(sorted(set(map(str, shapes)))[:4])}. Give all "
                "of them as many channels, and masks to all or none."
            )
        ((channels, dtype, masked),) = kinds
        self._size = channels * dtype.itemsize
        self._floats = dtype != torch.uint8
        homes = homes_of([0] * len(shapes), shapes, 1, world.size)
        self._refuse_too_many(homes, places)
        own = [place for place, home in enumerate(homes) if home == world.rank]
        self._homes = torch.tensor(homes)
        self.masks = Masks(shapes, own, places[1]) if masked else None

        def decode(place: int) -> ImageData:
            data = read(place)
            if found := str(shape_of(data)) if shape_of(data) != shapes[place] else "":
                raise ValueError(f"the image has {found}; expected were {shapes[place]}")
            if self.masks is not None:
                self.masks.put(place, data["mask"])
            return {"image": data["image"]}

        self._share = ImageShare(
            [ImageShape(shape.height, shape.width, channels, dtype, masked=False) for shape in shapes],
            decode,
            world,
            homes=homes,
            label=label,
            place=places[0],
        )
        if self.masks is not None:
            self.masks.count(world)

    @property
    def nbytes(self) -> int:
        """Bytes of images that this rank holds."""
        return self._share.store.nbytes

    @property
    def kind(self) -> tuple[int, bool, bool]:
        """What the shapes of `table` and `seen` follow from: bytes of a pixel, and whether they are floats; masks."""
        return self._size, self._floats, self.masks is not None

    def look(self, pixels: Pixels) -> Seen:
        """Colours of pixels, in one collective: each pixel is looked up by one rank, and the others add nothing to it.

        Every rank calls it with the same.

        Raises:
            ValueError: pixels are numbered, and there are no masks.
        """
        table = self.table(pixels).to(self._world.device)
        sum_in_place(table, self._world)
        return self.seen(table)

    def table(self, pixels: Pixels) -> Tensor:
        """What this rank knows of pixels, [R, K] int32 on the host, 0 of those that others hold. See `look`."""
        if pixels.numbered and self.masks is None:
            raise ValueError("look: pixels of masks that are not there")
        (mine,) = (self._homes[pixels.images] == self._world.rank).nonzero(as_tuple=True)
        words = -(-self._size // 4)
        table = torch.zeros(len(pixels.images), words + 2, dtype=torch.int32)
        if len(mine):
            images, at = pixels.images[mine], pixels.which[mine]
            if self.masks is not None and pixels.numbered:
                at = self.masks.nth(images, at).cpu()
            colours = torch.zeros(len(mine), 4 * words, dtype=torch.uint8)
            colours[:, : self._size] = self._share.store.pixels(images, at).cpu()
            table[mine, :words] = colours.view(torch.int32)
            table[mine, words] = at.int()
            if self.masks is not None:
                table[mine, words + 1] = self.masks.values(images, at).cpu().int()
        return table

    def seen(self, table: Tensor) -> Seen:
        """What the ranks' tables, summed on the device, say. Nothing is read back, and no shape depends on values."""
        words = table.shape[1] - 2
        raw = table[:, :words].contiguous().view(torch.uint8)[:, : self._size]
        if self._floats:
            image = raw.contiguous().view(torch.float32)
        else:
            # By a tensor, for by a number a GPU multiplies with the inverse, which rounds otherwise.
            image = raw.float() / torch.full((), 255.0, device=table.device)
        mask = None if self.masks is None else table[:, words + 1 :].bool()
        return Seen(table[:, words].long(), image, mask)

    def whole_masks(self) -> list[Tensor]:
        """All masks [H, W, 1] bool, on every rank, on the host. Every rank calls it.

        Raises:
            ValueError: there are none.
        """
        if self.masks is None:
            raise ValueError("whole_masks: there are no masks")
        every: list[Tensor] = []
        for place, shape in enumerate(self.shapes):
            mask = torch.zeros(shape.height, shape.width, 1, dtype=torch.uint8, device=self._world.device)
            if int(self._homes[place]) == self._world.rank:
                mask.copy_(self.masks.whole(place))
            sum_in_place(mask, self._world)
            every.append(mask.bool().cpu())
        return every

    def _refuse_too_many(self, homes: Sequence[int], places: tuple[torch.device | str, ...]) -> None:
        """Raises, on every rank, where a machine has no memory for what its ranks are to hold."""
        needed, free = 0, available_memory()
        if torch.device(places[0]).type == "cpu":
            here = set(self._world.ranks_of(self._world.machine))
            needed = sum(aligned(shape.nbytes) for shape, home in zip(self.shapes, homes, strict=True) if home in here)
        lines: list[str] = []
        if free is not None and needed > free:
            lines.append(
                f"{self._world.machine_name(self._world.machine)}: {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB free"
            )
        raise_together(
            lines,
            self._world,
            f"The {self.label} images do not fit the host's memory. Use more machines, smaller images "
            "(--pipeline.datamanager.camera-res-scale-factor, or the dataparser's downscale-factor), or draw from some "
            "at a time (--pipeline.datamanager.train-num-images-to-sample-from, train-num-times-to-repeat-images):",
        )
