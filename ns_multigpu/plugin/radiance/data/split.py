"""The images of a split that rays are drawn from, spread over the ranks: all of them, or some at a time."""

import random
from collections.abc import Sequence

import torch
from nerfstudio.data.datasets.base_dataset import InputDataset
from nerfstudio.data.pixel_samplers import PixelSampler
from torch import Tensor

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.checks import list_problems, raise_together
from ns_multigpu.plugin.capture.image_reading import ImageReader, ImageType
from ns_multigpu.plugin.capture.reading import FAULTS, file_headers, image_shapes, reads_files, refuse_different
from ns_multigpu.plugin.radiance.data.held_images import HeldImages, Pixels, Seen
from ns_multigpu.plugin.radiance.data.pixel_draws import PixelDraws
from ns_multigpu.plugin.radiance.field.draws import drawn

_SOME = 9
"""First number of the seeds of which images are drawn from, where they change."""


class Split:
    """A split's images, each held by one rank, and pixels drawn from them. Every rank makes one, together.

    Args:
        dataset, sampler: nerfstudio's. world: the ranks.
        key: of its seeds: the run's seed, and a number of its own.
        some: from how many images at a time pixels are drawn; -1 for all.
        repeats: for how many draws more than one; -1 for ever.
        label: what errors call it. option: of the command line, how many rays are drawn, for errors.
        places: the devices that hold images and masks.

    Raises:
        InputError: on every rank, naming what cannot be read, or what differs between ranks.
    """

    def __init__(
        self,
        dataset: InputDataset,
        sampler: PixelSampler,
        world: World,
        key: tuple[int, int],
        *,
        some: int,
        repeats: int,
        label: str,
        option: str,
        places: tuple[torch.device | str, torch.device | str],
    ) -> None:
        self._world, self._sampler, self._key = world, sampler, key
        self._label, self._option, self._places = label, option, places
        refuse_different([dataset], world)
        raise_together(_listed(dataset), world, FAULTS)
        kind = _image_type(dataset)
        # As they come through the lens: nerfacto's rays go through it, too.
        self._reader = ImageReader(dataset, kind, world, lens=True)
        self._shapes = image_shapes(dataset, self._reader, file_headers(dataset, world), kind, world)
        self._some, self._repeats = some if 0 < some < len(dataset) else len(dataset), repeats
        self._turn = -1
        self._views, self._widths = torch.zeros(2, self._some, dtype=torch.int64, device=world.device)
        self._images: HeldImages | None = None
        self._draws: PixelDraws | None = None

    @property
    def changes(self) -> bool:
        """Whether other images are drawn from after a while."""
        return self._some < len(self._shapes) and self._repeats >= 0

    @property
    def images(self) -> HeldImages | None:
        """Those that are drawn from; None before the first are there."""
        return self._images

    def begin(self) -> None:
        """Reads images before the first draw, unless it is that draw which says which. Every rank calls it."""
        if not self.changes:
            self._hold(0)

    def pixels(self, draw: int, step: int) -> dict[str, Tensor]:
        """The pixels of a draw, on the ranks' devices. Every rank calls it and gets the same.

        Args:
            draw: its number, which says from which images. step: what it is drawn by.

        Returns:
            "indices" [R, 3] int64 (image, row, column), "image" [R, C] float32; with masks "mask" [R, 1] bool.
        """
        pixels, images = self.draw(draw, step)
        seen = images.look(pixels)
        return self.batch(pixels.images.to(seen.at.device), seen)

    def draw(self, draw: int, step: int) -> tuple[Pixels, HeldImages]:
        """Which pixels a draw is of, and the images that they are in. See `pixels`."""
        self._hold(draw)
        assert self._draws is not None and self._images is not None
        with drawn("cpu", *self._key, step):
            return self._draws.draw(), self._images

    def batch(self, images: Tensor, seen: Seen) -> dict[str, Tensor]:
        """What `pixels` returns, of pixels of images [R], by their places among those held, and what was seen there.
        Nothing is read back, and no shape depends on values."""
        width = self._widths[images]
        indices = torch.stack([self._views[images], seen.at // width, seen.at % width], 1)
        return {"indices": indices, "image": seen.image, **({} if seen.mask is None else {"mask": seen.mask})}

    def _hold(self, draw: int) -> None:
        """Has those images read that a draw is from, if they are not there."""
        turn = draw // (self._repeats + 1) if self.changes else 0
        if turn == self._turn:
            return
        seed, kind = self._key
        with drawn("cpu", *((seed, _SOME, kind, turn) if self.changes else self._key)):
            views = random.sample(range(len(self._shapes)), self._some)
        self._turn, self._images, self._draws = turn, None, None  # first forget the last: both might not fit
        shapes = [self._shapes[view] for view in views]
        self._images = HeldImages(
            shapes, lambda place: self._reader.read(views[place]), self._world, self._label, self._places
        )
        self._draws = PixelDraws(self._images, self._sampler, self._option)
        # Where they were: a CUDA graph reads them there.
        self._views.copy_(torch.tensor(views))
        self._widths.copy_(torch.tensor([shape.width for shape in shapes]))


def _image_type(dataset: InputDataset) -> ImageType:
    """How images are kept: as bytes where 255ths of them are what nerfstudio's dataset makes floats of, to the bit."""
    kind, outputs = type(dataset), dataset._dataparser_outputs  # pyright: ignore[reportPrivateUsage]
    own = kind.get_data is not InputDataset.get_data or kind.get_image_float32 is not InputDataset.get_image_float32
    return "float32" if own or dataset.mask_color or outputs.alpha_color is not None else "uint8"


def _listed(dataset: InputDataset) -> Sequence[str]:
    """What is wrong with a dataset's list of files, a line each."""
    if not reads_files(dataset) or len(dataset.image_filenames) != len(dataset.cameras):
        return []
    masks = dataset._dataparser_outputs.mask_filenames  # pyright: ignore[reportPrivateUsage]
    return list_problems(dataset.image_filenames, dataset.cameras, masks)
