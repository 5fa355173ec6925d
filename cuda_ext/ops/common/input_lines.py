"""Device-side input queue: steps read numbers and images from tables filled by the host, and store their reports.

A graph repeats what it was captured with. So it does not know which step it is: the device counts, and each step takes
the line that is next.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY
from cuda_ext.dispatch.load import kernels_serve

MOST_TABLES = 4
"""Tables that lines are taken from at once, at most."""


@torch.no_grad()
def take_lines(tables: Sequence[Tensor], at: Tensor, into: Sequence[Tensor]) -> None:
    """Copy line `at` of each table to its place. Copies nothing if that line does not exist.

    Nothing is read back on CUDA, so a CUDA graph can contain it. The host must write a line before the step is
    launched, and keep it until the device has read it.

    Args:
        tables: 1 to 4 of [L, W], contiguous, of numbers of 4 bytes; on CUDA in page-locked memory of the host, or on
            the device.
        at: [1] int64, on the device.
        into: for each table W numbers of its dtype, contiguous, on the device.

    Raises:
        TypeError, ValueError: dtypes, shapes, numbers or devices are wrong.
        RuntimeError: on CUDA without our kernels.
        NativeBuildError: the operators cannot be compiled.
    """
    if not 1 <= len(tables) <= MOST_TABLES or len(tables) != len(into):
        raise ValueError(f"take_lines takes 1 to {MOST_TABLES} tables and as many places, not {len(tables)}.")
    _check_count(at)
    for k, (table, place) in enumerate(zip(tables, into, strict=True)):
        if table.dtype != place.dtype or table.element_size() != 4:
            raise TypeError(f"table {k} is {table.dtype}, its place {place.dtype}: need one dtype of 4 bytes.")
        fits = table.dim() == 2 and len(table) == len(tables[0]) and table.shape[1] == place.numel()
        if not (fits and table.is_contiguous() and place.is_contiguous()):
            raise ValueError(
                f"table {k} must be [{len(tables[0])}, {place.numel()}], not {list(table.shape)}, and it and its place "
                "contiguous."
            )
    _check_kernels(at)
    torch.ops.ns_multigpu.take_lines(list(tables), at, list(into))


@torch.no_grad()
def keep_line(line: Tensor, table: Tensor, at: Tensor) -> None:
    """Copy `line` to line `at` of the table, if that exists, and add 1 to `at`. A CUDA graph can contain it.

    Args:
        line: [W] float32. table: [L, W] float32. at: [1] int64. All contiguous, on one device.

    Raises:
        As `take_lines`.
    """
    _check_count(at)
    if line.dtype != torch.float32 or table.dtype != torch.float32:
        raise TypeError(f"line is {line.dtype} and table {table.dtype}; they must be torch.float32.")
    if line.dim() != 1 or table.dim() != 2 or table.shape[1] != len(line):
        raise ValueError(f"a line {list(line.shape)} does not fit a table {list(table.shape)}.")
    if not (line.is_contiguous() and table.is_contiguous()):
        raise ValueError("line and table must be contiguous.")
    _check_kernels(at)
    torch.ops.ns_multigpu.keep_line(line, table, at)


@torch.no_grad()
def show_patches(images: Tensor, chosen: Tensor, patches: Sequence[int], pictures: Tensor) -> None:
    """Copy rectangles of some images, one after the other. A CUDA graph can contain it.

    Args:
        images: [V, H, W, C], contiguous.
        chosen: [B] int32, an image for each place; of one that there is not nothing is copied.
        patches: 5 numbers each: a place, and x0, y0, x1, y1 in pixels.
        pictures: [n] of the images' dtype, large enough for all of them: each is [y1 - y0, x1 - x0, C].

    Raises:
        As `take_lines`.
    """
    if chosen.dtype != torch.int32 or images.dtype != pictures.dtype:
        raise TypeError(
            f"chosen is {chosen.dtype}, it must be torch.int32; images are {images.dtype} and pictures "
            f"{pictures.dtype}, they must be alike."
        )
    if images.dim() != 4 or chosen.dim() != 1 or pictures.dim() != 1 or len(patches) % 5:
        raise ValueError("need images [V, H, W, C], chosen [B], pictures [n], and 5 numbers a patch.")
    if not (images.is_contiguous() and pictures.is_contiguous()):
        raise ValueError("images and pictures must be contiguous.")
    height, width, channels = images.shape[1:]
    numbers = 0
    for k in range(0, len(patches), 5):
        place, x0, y0, x1, y1 = patches[k : k + 5]
        if not (0 <= place < len(chosen) and 0 <= x0 <= x1 <= width and 0 <= y0 <= y1 <= height):
            raise ValueError(f"patch {k // 5} does not lie in one of {len(chosen)} images of {width}x{height}.")
        numbers += (x1 - x0) * (y1 - y0) * channels
    if numbers > len(pictures):
        raise ValueError(f"the patches have {numbers} numbers, pictures {len(pictures)}.")
    _check_kernels(images)
    torch.ops.ns_multigpu.show_patches(images, chosen, list(patches), pictures)


def _check_count(at: Tensor) -> None:
    if at.shape != (1,) or at.dtype != torch.int64:
        raise ValueError(f"at must be [1] int64, not {list(at.shape)} {at.dtype}.")


def _check_kernels(tensor: Tensor) -> None:
    if tensor.device.type != "cpu" and not kernels_serve(tensor):
        raise RuntimeError(
            f"Only our CUDA kernels take lines on {tensor.device}, and they are switched off: unset "
            "NS_MULTIGPU_OPS=reference."
        )


def _take_lines(tables: Sequence[Tensor], at: Tensor, into: Sequence[Tensor]) -> None:
    line = int(at)
    if 0 <= line < len(tables[0]):
        for table, place in zip(tables, into, strict=True):
            place.view(-1).copy_(table[line])


def _keep_line(line: Tensor, table: Tensor, at: Tensor) -> None:
    if 0 <= int(at) < len(table):
        table[int(at)] = line
    at += 1


def _show_patches(images: Tensor, chosen: Tensor, patches: Sequence[int], pictures: Tensor) -> None:
    start, shown = 0, chosen.tolist()
    for k in range(0, len(patches), 5):
        place, x0, y0, x1, y1 = patches[k : k + 5]
        numbers = (x1 - x0) * (y1 - y0) * images.shape[3]
        if 0 <= shown[place] < len(images):
            pictures[start : start + numbers] = images[shown[place], y0:y1, x0:x1].reshape(-1)
        start += numbers


for _name, _composed in (("take_lines", _take_lines), ("keep_line", _keep_line), ("show_patches", _show_patches)):
    LIBRARY.impl(_name, _composed, "CPU")
