"""Which pixels a step's rays go through: drawn by nerfstudio's samplers, on every rank the same, without the images.

A sampler looks at its images for their sizes and their masks alone. So it is given images that have sizes and take no
memory. Within masks, its rejection sampling draws pixels until all are let through; here their numbers among those that
are let through are drawn, which is the same distribution, in one go, and needs to know how many there are alone.
"""

import random
from typing import Any

import torch
from nerfstudio.data.pixel_samplers import PixelSampler
from nerfstudio.data.utils.pixel_sampling_utils import divide_rays_per_image
from torch import Tensor

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.radiance.data.held_images import HeldImages, Pixels


class PixelDraws:
    """Draws pixels of images. Every rank makes one, together.

    As with nerfstudio, each pixel of all images is equally likely where these are of one size; where they are not, each
    image has as many rays.

    Args:
        images: of which. sampler: nerfstudio's. option: of the command line, how many rays are drawn, for errors.

    Raises:
        InputError: the sampler cannot draw from these images.
    """

    def __init__(self, images: HeldImages, sampler: PixelSampler, option: str) -> None:
        self._sampler, self._option, self._label = sampler, option, images.label
        sizes = [(shape.height, shape.width) for shape in images.shapes]
        self._widths = torch.tensor([width for _, width in sizes])
        self._alike = len(set(sizes)) == 1
        plain = type(sampler) is PixelSampler
        if not self._alike and not plain:
            raise InputError(
                f"The {self._label} images are of different sizes: patches of pixels cannot be drawn from them. Leave "
                "out --pipeline.datamanager.patch-size, or give images of one size."
            )
        masked = images.masks is not None and not sampler.config.ignore_mask
        self._counts: Tensor | None = None
        if masked and plain:
            assert images.masks is not None
            self._counts = images.masks.counts
            if not int(self._counts.sum()):
                raise InputError(
                    f"The masks of the {self._label} images leave no pixel. White is what they let through; "
                    "--pipeline.datamanager.pixel-sampler.ignore-mask True draws from all pixels."
                )
        self._batch: dict[str, Any] = {"image_idx": torch.arange(len(sizes))}
        if self._alike:
            self._batch["image"] = torch.zeros(1, 1, 1, 1).expand(len(sizes), *sizes[0], 1)
        else:
            self._batch["image"] = [torch.zeros(1, 1, 1).expand(*size, 1) for size in sizes]
        if masked and not plain:  # patches are to lie within masks: that takes all of these
            self._batch["mask"] = torch.stack(images.whole_masks())

    def draw(self) -> Pixels:
        """A step's pixels: what follows from the generators of torch and Python.

        Raises:
            InputError: there cannot be so many rays.
        """
        rays = self._sampler.num_rays_per_batch
        if rays < 1:
            raise InputError(
                f"{self._option}: too few for a patch. Of patches, nerfstudio draws a multiple of 1,024 rays: give "
                "1,024 or more, or leave out --pipeline.datamanager.patch-size."
            )
        if self._counts is not None:
            images, numbers = self._numbers(rays, self._counts)
            return Pixels(images, numbers, numbered=True)
        if not self._alike and rays % 2:
            raise InputError(
                f"{self._option} {rays}: the {self._label} images are of different sizes. From such, nerfstudio's "
                "sampler draws an even number of rays. Give one."
            )
        try:
            found = self._sampler.sample(self._batch)["indices"]
        except ValueError as error:
            if "mask" not in self._batch:
                raise
            raise InputError(
                f"The masks of the {self._label} images leave no room for patches ({error}). Give a smaller "
                "--pipeline.datamanager.patch-size, or --pipeline.datamanager.pixel-sampler.ignore-mask True."
            ) from error
        return Pixels(found[:, 0], found[:, 1] * self._widths[found[:, 0]] + found[:, 2])

    def _numbers(self, rays: int, counts: Tensor) -> tuple[Tensor, Tensor]:
        """So many images, and in each the number of a pixel that its mask lets through: with `rejection_sample_mask`
        a pixel may come twice, as in nerfstudio."""
        twice = self._sampler.config.rejection_sample_mask
        if self._alike:
            total = int(counts.sum())
            numbers = torch.randint(total, (rays,)) if twice else self._some(total, rays)
            ends = counts.cumsum(0)
            images = torch.searchsorted(ends, numbers, right=True)
            return images, numbers - (ends - counts)[images]
        (there,) = counts.nonzero(as_tuple=True)
        shares = divide_rays_per_image(rays, len(there))
        images = there.repeat_interleave(torch.tensor(shares))
        if not twice:
            some = [self._some(int(counts[image]), share) for image, share in zip(there, shares, strict=True)]
            return images, torch.cat(some)
        return images, (torch.rand(rays, dtype=torch.float64) * counts[images]).long()

    def _some(self, total: int, rays: int) -> Tensor:
        """So many numbers below `total`, none of them twice."""
        if rays > total:
            raise InputError(
                f"{self._option}: masks of {self._label} images leave {total} pixels for {rays} rays, and none may "
                "come twice. Give fewer rays, or --pipeline.datamanager.pixel-sampler.rejection-sample-mask True."
            )
        return torch.tensor(random.sample(range(total), rays))
