"""Pixels of a step's rays, drawn by nerfstudio's samplers without the images, the same on every rank.

A sampler reads only sizes and masks of its images, so it gets expanded dummy images without memory. nerfstudio draws
pixels within masks by rejection sampling. This module draws pixel numbers among the kept pixels instead: the same
distribution, without rejections, from the counts alone.
"""

import random
from typing import Any

import torch
from nerfstudio.data.pixel_samplers import PixelSampler
from nerfstudio.data.utils.pixel_sampling_utils import divide_rays_per_image
from torch import Tensor

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.radiance.data.held_images import DrawnPixels, HeldImages
from ns_multigpu.plugin.radiance.data.keypoints import Keypoints


class PixelDraws:
    """Sampler of image pixels. All ranks create it together.

    As in nerfstudio, all pixels are equally likely if all images have one size; otherwise each image has the same
    number of rays.

    Args:
        images: to draw from. sampler: nerfstudio's. option: command-line option of the ray count, for errors.
        keypoints: of the images, which are among the drawn pixels; None for none.

    Raises:
        InputError: the sampler cannot draw from these images.
    """

    def __init__(
        self, images: HeldImages, sampler: PixelSampler, option: str, keypoints: Keypoints | None = None
    ) -> None:
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
        if masked and not plain:  # nerfstudio needs the complete masks to place patches within them
            self._batch["mask"] = torch.stack(images.whole_masks())
        if keypoints is not None and masked:
            mask = images.look(DrawnPixels(keypoints.images, keypoints.at)).mask
            assert mask is not None
            keypoints = keypoints.where(mask[:, 0].cpu())
        self._keypoints = keypoints

    def draw(self) -> DrawnPixels:
        """Draw a step's pixels from the generators of torch and Python.

        Raises:
            InputError: the images do not allow this number of rays.
        """
        pixels = self._draw()
        return pixels if self._keypoints is None else self._keypoints.put_into(pixels)

    def _draw(self) -> DrawnPixels:
        rays = self._sampler.num_rays_per_batch
        if rays < 1:
            raise InputError(
                f"{self._option}: too few for a patch. Of patches, nerfstudio draws a multiple of 1,024 rays: give "
                "1,024 or more, or leave out --pipeline.datamanager.patch-size."
            )
        if self._counts is not None:
            images, numbers = self._numbers(rays, self._counts)
            return DrawnPixels(images, numbers, numbered=True)
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
                f"The masks of the {self._label} images leave no pixels for patches ({error}). Give a smaller "
                "--pipeline.datamanager.patch-size, or --pipeline.datamanager.pixel-sampler.ignore-mask True."
            ) from error
        return DrawnPixels(found[:, 0], found[:, 1] * self._widths[found[:, 0]] + found[:, 2])

    def _numbers(self, rays: int, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Draw images and, for each, the number of a kept pixel. With `rejection_sample_mask` a pixel may repeat, as in
        nerfstudio."""
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
        """Draw distinct numbers below `total`."""
        if rays > total:
            raise InputError(
                f"{self._option}: masks of {self._label} images leave {total} pixels for {rays} rays, and none may "
                "come twice. Give fewer rays, or --pipeline.datamanager.pixel-sampler.rejection-sample-mask True."
            )
        return torch.tensor(random.sample(range(total), rays))
