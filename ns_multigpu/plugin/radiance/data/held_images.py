"""Images that pixels are drawn from, each held by one rank; pixel colours are summed over all ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ns_multigpu.core.dist.collectives import sum_in_place
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.image_owners import image_owners_of
from ns_multigpu.plugin.capture.image_share import ImageShare
from ns_multigpu.plugin.capture.image_store import ImageData, ImageShape, shape_of
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.radiance.data.masks import Masks

_REMEDY = (
    "Use more machines, smaller images (--pipeline.datamanager.camera-res-scale-factor, or the dataparser's "
    "downscale-factor), or draw from some at a time (--pipeline.datamanager.train-num-images-to-sample-from, "
    "train-num-times-to-repeat-images):"
)


@dataclass(frozen=True)
class DrawnPixels:
    """Drawn pixels, the same on every rank, on the host.

    Attributes:
        images: [R] image index of each pixel among the held images.
        which: [R] row * width + column; if `numbered`, the pixel's index among those that the mask keeps.
        observed: [R] the row of the point that the pixel shows, of which `which` is never numbered; -1 for none. None
            if no pixel of the run shows one.
    """

    images: Tensor
    which: Tensor
    numbered: bool = False
    observed: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """Numbers of the pixels that all ranks have: [1, R] `images`, or [2, R] `images` and `observed`."""
        return torch.stack([self.images] if self.observed is None else [self.images, self.observed])


@dataclass(frozen=True)
class Seen:
    """Colours of drawn pixels, the same on every rank, on its device.

    Attributes:
        at: [R] row * width + column.
        image: [R, C] float32 colours, bit-identical to those of nerfstudio's datasets.
        mask: [R, 1] bool, True if the mask keeps the pixel; None without masks.
    """

    at: Tensor
    image: Tensor
    mask: Tensor | None


class HeldImages:
    """Some images of a split, sharded so that ranks hold about equal bytes. All ranks create it together.

    Args:
        shapes: of the images, masks included.
        read: function that returns an image and its mask by index; called from several threads.
        world: the ranks.
        label: name of the split in errors.
        places: the devices that hold images and masks.

    Raises:
        InputError: on every rank, if images cannot be read, exceed the hosts' memory, or differ in channels.
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
        formats = {(shape.channels, shape.dtype, shape.masks) for shape in shapes}
        if len(formats) != 1:
            raise InputError(
                f"The {label} images are of different kinds: {'; '.join(sorted(set(map(str, shapes)))[:4])}. Give all "
                "of them as many channels, and masks to all or none."
            )
        ((channels, dtype, masked),) = formats
        self._size = channels * dtype.itemsize
        self._floats = dtype != torch.uint8
        owners = image_owners_of([0] * len(shapes), shapes, 1, world.size)
        own = [place for place, home in enumerate(owners) if home == world.rank]
        self._owners_of_views = torch.tensor(owners)
        self.masks = Masks(shapes, own, places[1]) if masked else None

        def decode(place: int) -> ImageData:
            data = read(place)
            if found := str(shape_of(data)) if shape_of(data) != shapes[place] else "":
                raise ValueError(f"the image has {found}; expected were {shapes[place]}")
            if self.masks is not None:
                self.masks.put(place, data["mask"])
            return {"image": data["image"]}

        self._share = ImageShare(
            [ImageShape(shape.height, shape.width, channels, dtype, masks=0) for shape in shapes],
            decode,
            world,
            owners=owners,
            label=label,
            place=places[0],
            remedy=_REMEDY,
        )
        if self.masks is not None:
            self.masks.count(world)

    @property
    def nbytes(self) -> int:
        """Bytes of images on this rank."""
        return self._share.store.nbytes

    @property
    def kind(self) -> tuple[int, bool, bool]:
        """Key that determines the shapes of `table` and `seen`: bytes per pixel, float or not, masked or not."""
        return self._size, self._floats, self.masks is not None

    def look(self, pixels: DrawnPixels) -> Seen:
        """Return pixel colours, summed in one collective: one rank has each pixel, all others add zero.

        Every rank calls it with the same pixels.

        Raises:
            ValueError: pixels are numbered, but there are no masks.
        """
        table = self.table(pixels).to(self._world.device)
        sum_in_place(table, self._world)
        return self.seen(table)

    def table(self, pixels: DrawnPixels) -> Tensor:
        """Return this rank's values of pixels, [R, K] int32 on the host, with 0 for other ranks' pixels. See `look`."""
        if pixels.numbered and self.masks is None:
            raise ValueError("look: pixels of masks that are not there")
        (mine,) = (self._owners_of_views[pixels.images] == self._world.rank).nonzero(as_tuple=True)
        words = -(-self._size // 4)
        table = torch.zeros(len(pixels.images), words + 2, dtype=torch.int32)
        if len(mine):
            images, at = pixels.images[mine], pixels.which[mine]
            if self.masks is not None and pixels.numbered:
                counted = slice(None) if pixels.observed is None else pixels.observed[mine] < 0
                at[counted] = self.masks.nth(images[counted], at[counted]).cpu()
            colours = torch.zeros(len(mine), 4 * words, dtype=torch.uint8)
            colours[:, : self._size] = self._share.store.pixels(images, at).cpu()
            table[mine, :words] = colours.view(torch.int32)
            table[mine, words] = at.int()
            if self.masks is not None:
                table[mine, words + 1] = self.masks.values(images, at).cpu().int()
        return table

    def seen(self, table: Tensor) -> Seen:
        """Decode the sum of the ranks' tables on the device. Nothing is read back, and no shape depends on values."""
        words = table.shape[1] - 2
        raw = table[:, :words].contiguous().view(torch.uint8)[:, : self._size]
        if self._floats:
            image = raw.contiguous().view(torch.float32)
        else:
            # Divide by a tensor: with a scalar divisor, a GPU multiplies by its inverse, which rounds differently.
            image = raw.float() / torch.full((), 255.0, device=table.device)
        mask = None if self.masks is None else table[:, words + 1 :].bool()
        return Seen(table[:, words].long(), image, mask)

    def whole_masks(self) -> list[Tensor]:
        """Return all masks [H, W, 1] bool on every rank, on the host. Every rank calls it.

        Raises:
            ValueError: there are no masks.
        """
        if self.masks is None:
            raise ValueError("whole_masks: there are no masks")
        every: list[Tensor] = []
        for place, shape in enumerate(self.shapes):
            mask = torch.zeros(shape.height, shape.width, 1, dtype=torch.uint8, device=self._world.device)
            if int(self._owners_of_views[place]) == self._world.rank:
                mask.copy_(self.masks.whole(place))
            sum_in_place(mask, self._world)
            every.append(mask.bool().cpu())
        return every
