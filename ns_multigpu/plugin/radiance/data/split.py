"""Images of a split that rays are drawn from, sharded over the ranks: all of them, or a changing subset."""

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from nerfstudio.data.datasets.base_dataset import InputDataset
from nerfstudio.data.pixel_samplers import PixelSampler
from torch import Tensor

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.checks import list_problems, raise_together
from ns_multigpu.plugin.capture.image_reading import ImageReader, ImageType
from ns_multigpu.plugin.capture.reading import FAULTS, file_headers, image_shapes, reads_files, refuse_different
from ns_multigpu.plugin.radiance.data.held_images import DrawnPixels, HeldImages, Seen
from ns_multigpu.plugin.radiance.data.keypoints import Keypoints
from ns_multigpu.plugin.radiance.data.pixel_draws import PixelDraws
from ns_multigpu.plugin.radiance.field.draws import drawn

_SOME = 9
"""First seed number of the draws of image subsets."""


class ImageSplit:
    """A split's images, each held by one rank, and pixels drawn from them. All ranks create it together.

    Args:
        dataset, sampler: nerfstudio's. world: the ranks.
        key: of its seeds: the run's seed and the split's number.
        some: number of images in a subset; -1 for all.
        repeats: number of further draws from the same subset; -1 for no change.
        label: name of the split in errors. option: command-line option of the ray count, for errors.
        places: the devices that hold images and masks.

    Raises:
        InputError: on every rank, naming unreadable files or differences between ranks.
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
        # Keep the lens distortion: nerfacto's rays pass through the lens as well.
        self._reader = ImageReader(dataset, kind, world, lens=True)
        self._shapes = image_shapes(dataset, self._reader, file_headers(dataset, world), kind, world)
        self._some, self._repeats = some if 0 < some < len(dataset) else len(dataset), repeats
        self._turn = -1
        self._views, self._widths = torch.zeros(2, self._some, dtype=torch.int64, device=world.device)
        self._images: HeldImages | None = None
        self._draws: PixelDraws | None = None
        self._keypoints: Keypoints | None = None

    @property
    def changes(self) -> bool:
        """True if the subset of images changes during the run."""
        return self._some < len(self._shapes) and self._repeats >= 0

    @property
    def images(self) -> HeldImages | None:
        """The current images; None before the first are read."""
        return self._images

    def begin(self) -> None:
        """Read the images before the first draw, unless the subset depends on the draw. Every rank calls it."""
        if not self.changes:
            self._hold(0)

    def observe(self, keypoints: Keypoints) -> None:
        """Draw a share of each step's pixels at keypoints, by image index of the split. Every rank calls it with the
        same."""
        self._keypoints = replace(keypoints, points=keypoints.points.to(self._world.device))
        if self._images is not None:
            self._draws = self._new_draws(self._images)

    def _new_draws(self, images: HeldImages) -> PixelDraws:
        of_held = None if self._keypoints is None else self._keypoints.of_images(self._views.tolist())
        return PixelDraws(images, self._sampler, self._option, of_held)

    def pixels(self, draw: int, step: int) -> dict[str, Tensor]:
        """Return the pixels of a draw, on the ranks' devices. Every rank calls it and gets the same.

        Args:
            draw: number that selects the image subset. step: seed of the pixels.

        Returns:
            "indices" [R, 3] int64 (image, row, column), "image" [R, C] float32; with masks "mask" [R, 1] bool. With
            keypoints "points" [R, 3] seen in the pixels and "scales" [R, 1], the scene's size; 0 where none is known.
        """
        pixels, images = self.draw(draw, step)
        seen = images.look(pixels)
        return self.batch(pixels.rows.to(seen.at.device), seen)

    def draw(self, draw: int, step: int) -> tuple[DrawnPixels, HeldImages]:
        """Return the pixels of a draw and the images that contain them. See `pixels`."""
        self._hold(draw)
        assert self._draws is not None and self._images is not None
        with drawn("cpu", *self._key, step):
            return self._draws.draw(), self._images

    def batch(self, rows: Tensor, seen: Seen) -> dict[str, Tensor]:
        """Return the batch of `pixels` from `DrawnPixels.rows` and colours. Nothing is read back, and no shape depends
        on values."""
        images = rows[0]
        width = self._widths[images]
        indices = torch.stack([self._views[images], seen.at // width, seen.at % width], 1)
        batch = {"indices": indices, "image": seen.image, **({} if seen.mask is None else {"mask": seen.mask})}
        if self._keypoints is not None:
            batch["points"] = self._keypoints.points[rows[1].clamp_min(0)]
            batch["scales"] = (rows[1, :, None] >= 0) * self._keypoints.scale
        return batch

    def _hold(self, draw: int) -> None:
        """Read the images of a draw unless they are held."""
        turn = draw // (self._repeats + 1) if self.changes else 0
        if turn == self._turn:
            return
        seed, kind = self._key
        with drawn("cpu", *((seed, _SOME, kind, turn) if self.changes else self._key)):
            views = random.sample(range(len(self._shapes)), self._some)
        self._turn, self._images, self._draws = turn, None, None  # release the old images first: both might not fit
        shapes = [self._shapes[view] for view in views]
        self._images = HeldImages(
            shapes, lambda place: self._reader.read(views[place]), self._world, self._label, self._places
        )
        # In place: CUDA graphs read these addresses.
        self._views.copy_(torch.tensor(views))
        self._widths.copy_(torch.tensor([shape.width for shape in shapes]))
        self._draws = self._new_draws(self._images)


def _image_type(dataset: InputDataset) -> ImageType:
    """Return how images are stored: as uint8 if nerfstudio's dataset yields exactly their 255ths, else as float32."""
    kind, outputs = type(dataset), dataset._dataparser_outputs  # pyright: ignore[reportPrivateUsage]
    own = kind.get_data is not InputDataset.get_data or kind.get_image_float32 is not InputDataset.get_image_float32
    return "float32" if own or dataset.mask_color or outputs.alpha_color is not None else "uint8"


def _listed(dataset: InputDataset) -> Sequence[str]:
    """Return the problems of a dataset's file list, one line each."""
    if not reads_files(dataset) or len(dataset.image_filenames) != len(dataset.cameras):
        return []
    masks = dataset._dataparser_outputs.mask_filenames  # pyright: ignore[reportPrivateUsage]
    return list_problems(dataset.image_filenames, dataset.cameras, masks)
