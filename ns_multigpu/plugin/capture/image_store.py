"""Store of decoded images in one block of memory, with the threads that decode them.

Images of some megabytes each would fragment the heap, and torch rounds each page-locked allocation up to a power of
two. One block avoids both.
"""

import os
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ns_multigpu.core.assign.image_part import Rectangle

ImageData = dict[str, Tensor]
"""`image` [H, W, 3 or 4] and perhaps `mask` [H, W, 1 or 2] bool: pixels that train colours, and those of the sky."""

_ALIGNMENT = 64
"""Alignment in bytes: images may be of any dtype."""


@dataclass(frozen=True)
class ImageShape:
    """Shape of an image, known to every rank before it is decoded.

    Attributes:
        masks: channels of its mask, 0 to 2.
    """

    height: int
    width: int
    channels: int
    dtype: torch.dtype
    masks: int

    @property
    def nbytes(self) -> int:
        """Return the bytes in memory and in messages: the image, then its mask."""
        pixels = self.height * self.width
        return pixels * (self.channels * self.dtype.itemsize + self.masks)

    def cut(self, rectangle: Rectangle) -> "ImageShape":
        """Return the shape of a rectangle of the image."""
        x0, y0, x1, y1 = rectangle
        return replace(self, height=y1 - y0, width=x1 - x0)

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        mask = ("without a mask", "with a mask", "with masks of the sky")[self.masks]
        return f"{self.width}x{self.height} pixels, {self.channels} channels, {kind}, {mask}"


class ImageStore:
    """Images of some views: all of them (`complete`), or as many as the budget allows.

    If not all fit, `expect` names the next views and threads decode them. The image used *last* is evicted: each view
    comes once per epoch, so that one is needed latest. A budget for a fraction f of the images then spares a fraction f
    of the decoding, the optimum. Evicting the least recently used would spare f^2 / 2.

    One thread calls it.

    Args:
        shapes: of each view's image.
        decode: view -> its image, on the host; several threads call it.
        budget: largest number of bytes; None for all images.
        place: the device whose memory holds the images.
        pinned: page-lock the host's memory, for asynchronous copies to a GPU.
        threads: number of decoding threads.
        device: the CUDA device that decoding may use, made current in the threads.

    Attributes:
        complete: True if all images fit.
        place: the device whose memory holds the images.
        decoded: number of images decoded so far, repeats included.
        waited: seconds that readers have waited for decoding.

    Raises:
        ValueError: the budget is below two images.
    """

    def __init__(
        self,
        shapes: Mapping[int, ImageShape],
        decode: Callable[[int], ImageData],
        *,
        budget: int | None = None,
        place: torch.device | str = "cpu",
        pinned: bool = False,
        threads: int = 1,
        device: torch.device | None = None,
    ) -> None:
        self._shapes = dict(shapes)
        self._decode = decode
        sizes = {index: aligned(shape.nbytes) for index, shape in self._shapes.items()}
        self.nbytes = sum(sizes.values())
        self.complete = budget is None or self.nbytes <= budget
        if self.complete:
            starts, start = [], 0
            for size in sizes.values():
                starts.append(start)
                start += size
        else:
            assert budget is not None
            largest = max(sizes.values())
            if budget < 2 * largest:
                raise ValueError(
                    f"their share of the memory, {budget / 1e9:.3g} GB, is too small for two images of "
                    f"{largest / 1e9:.3g} GB"
                )
            starts = [slot * largest for slot in range(budget // largest)]
            self.nbytes = len(starts) * largest
        self.capacity = len(starts)
        self.depth = min(max(1, self.capacity // 2), max(8, 4 * threads))
        self.place = torch.device(place)
        self._block = torch.empty(self.nbytes, dtype=torch.uint8, device=place)
        self._locked = pinned and self.nbytes > 0 and _lock_pages(self, self._block)
        self._free = starts[::-1]
        self._starts: dict[int, int] = {}  # by view, the most recently used at the end
        self._filling: dict[int, Future[None]] = {}
        self._leaving: dict[int, torch.cuda.Event] = {}  # by start: copies to the device that may be in progress
        self.decoded, self.waited = 0, 0.0
        self._table: tuple[Tensor, Tensor] | None = None  # start of each image, and offsets of a pixel's bytes

        def enter() -> None:
            if device is not None and device.type == "cuda":
                torch.cuda.set_device(device)

        self._pool = ThreadPoolExecutor(max_workers=threads, initializer=enter, thread_name_prefix="images")
        weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    def load_all(self, each: Callable[[], None] = lambda: None) -> dict[int, Exception]:
        """Decode all images of a complete store.

        Args:
            each: called after each image.

        Returns:
            the error of each unreadable image, by view.
        """
        for index in self._shapes:
            self._start(index, self._free.pop())
        return self._started(list(self._shapes), each)

    def replace(self, gone: Sequence[int], come: Mapping[int, ImageShape]) -> dict[int, Exception]:
        """Replace some views by as many of the same shapes, and decode these if the store is complete.

        Args:
            gone: views of this store. come: others, with their images' shapes.

        Returns:
            the error of each unreadable image, by view.
        """
        if self._locked or self._block.is_cuda:
            torch.cuda.synchronize()  # copies of images that are about to be overwritten
        slots: defaultdict[ImageShape, list[int]] = defaultdict(list)
        for index in gone:
            filling = self._filling.pop(index, None)
            if filling is not None:
                filling.exception()
            shape = self._shapes.pop(index)
            if index in self._starts:
                (slots[shape] if self.complete else self._free).append(self._starts.pop(index))
        self._shapes.update(come)
        self._table = None
        if not self.complete:
            return {}
        for index, shape in come.items():
            self._start(index, slots[shape].pop())
        return self._started(list(come), lambda: None)

    def _started(self, indices: Sequence[int], each: Callable[[], None]) -> dict[int, Exception]:
        """Wait for images that are being decoded; return the error of each unreadable one, by view."""
        failed: dict[int, Exception] = {}
        for index in indices:
            try:
                self._finish(index)
            except Exception as error:  # decoders raise various errors; the caller reports them all
                failed[index] = error
            each()
        if self._block.is_cuda:
            torch.cuda.synchronize(self._block.device)
        self.waited = 0.0
        return failed

    def expect(self, indices: Sequence[int]) -> None:
        """Start to decode the views that will be read next, within the budget.

        Args:
            indices: views, in the order in which they will be read; the first `depth` are used.
        """
        if self.complete:
            return
        wanted = list(dict.fromkeys(indices))[: self.depth]
        protected = set(wanted)
        for index in wanted:
            if index in self._starts:
                continue
            start = self._free_place(protected)
            if start is None:
                return
            self._start(index, start)

    def read(self, index: int, device: torch.device) -> Tensor:
        """Return the bytes [nbytes] uint8 of an image on `device`: a copy, or the store's own tensor if it is
        permanent.

        Raises:
            KeyError: the view does not belong to this store.
            Exception: the error of decoding.
        """
        held = self._held(index)
        return self._on(device, index, [held])[0]

    def rows(self, index: int, device: torch.device, top: int, bottom: int) -> ImageData:
        """Return rows [top, bottom) of an image on `device`, copying only those. Raises as `read`."""
        shape = self._shapes[index]
        if (top, bottom) == (0, shape.height):
            return from_bytes(self.read(index, device), shape)
        held = from_bytes(self._held(index), shape)
        return dict(zip(held, self._on(device, index, [part[top:bottom] for part in held.values()]), strict=True))

    def pixels(self, indices: Tensor, at: Tensor) -> Tensor:
        """Return single pixels of many images of a complete store, [K, bytes of a pixel] uint8, on the store's device.

        Args:
            indices: [K] the view of each pixel; all images have the same number of channels.
            at: [K] row * width + column of each.

        Raises:
            KeyError: not all images have been read.
            ValueError: the images differ in bytes per pixel.
        """
        if self._table is None:
            pixel_bytes = {shape.channels * shape.dtype.itemsize for shape in self._shapes.values()}
            if len(pixel_bytes) > 1:
                raise ValueError(f"pixels: there are images of {sorted(pixel_bytes)} bytes a pixel")
            if len(self._starts) < len(self._shapes):
                raise KeyError(f"{len(self._shapes) - len(self._starts)} images have not been read")
            starts = torch.full((max(self._shapes, default=-1) + 1,), -1)
            starts[list(self._starts)] = torch.tensor(list(self._starts.values()))
            self._table = (starts.to(self.place), torch.arange(max(pixel_bytes, default=0), device=self.place))
        starts, channels = self._table
        indices, at = indices.to(self.place), at.to(self.place)
        begins = starts[indices] + at * len(channels)
        return self._block[begins[:, None] + channels]

    def _held(self, index: int) -> Tensor:
        """Return the bytes of an image in the store, decoding it if necessary."""
        shape = self._shapes[index]
        if index not in self._starts:
            start = self._free_place(set())
            while start is None:  # all slots are being decoded: evict the one needed last
                last = next(reversed(self._filling))
                self._filling[last].exception()
                del self._filling[last]
                start = self._free_place(set())
            self._start(index, start)
        self._finish(index)
        start = self._starts.pop(index)
        self._starts[index] = start
        return self._block[start : start + shape.nbytes]

    def _on(self, device: torch.device, index: int, held: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts of an image on `device`; copies if the store may reuse their slot."""
        if device.type == self.place.type:
            return [part if self.complete else part.clone() for part in held]
        copies = [part.to(device, non_blocking=True) for part in held]
        if self._locked and not self.complete:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device if device.type == "cuda" else None))
            self._leaving[self._starts[index]] = event
        return copies

    def _free_place(self, protected: set[int]) -> int | None:
        """Return the start of a free slot, evicting an image if necessary; None if all are protected or being
        filled.
        """
        if self._free:
            return self._free.pop()
        for index in reversed(self._starts):
            filling = self._filling.get(index)
            if index not in protected and (filling is None or filling.done()):
                self._filling.pop(index, None)
                return self._starts.pop(index)
        return None

    def _start(self, index: int, start: int) -> None:
        self._starts[index] = start
        self.decoded += 1
        self._filling[index] = self._pool.submit(self._fill, index, start, self._leaving.pop(start, None))

    def _fill(self, index: int, start: int, leaving: torch.cuda.Event | None) -> None:
        data = self._decode(index)
        found, expected = shape_of(data), self._shapes[index]
        if found != expected:
            raise ValueError(f"the image has {found}; expected were {expected}")
        if leaving is not None:
            leaving.synchronize()
        for part in (data["image"], data.get("mask")):
            if part is not None:
                raw = part.contiguous().view(torch.uint8).reshape(-1)
                self._block[start : start + raw.numel()].copy_(raw)
                start += raw.numel()

    def _finish(self, index: int) -> None:
        filling = self._filling.get(index)
        if filling is None:
            return
        began = time.perf_counter()
        try:
            filling.result()
        except BaseException:
            self._free.append(self._starts.pop(index))
            raise
        finally:
            del self._filling[index]
            self.waited += time.perf_counter() - began


def shape_of(data: ImageData) -> ImageShape:
    """Return the shape of a decoded image."""
    height, width, channels = data["image"].shape
    return ImageShape(height, width, channels, data["image"].dtype, data["mask"].shape[2] if "mask" in data else 0)


def from_bytes(raw: Tensor, shape: ImageShape) -> ImageData:
    """Return the image in `raw` [nbytes] uint8, as a view of its memory if alignment allows."""
    pixels = shape.height * shape.width
    size = pixels * shape.channels * shape.dtype.itemsize
    image = raw[:size]
    if raw.storage_offset() % shape.dtype.itemsize:
        image = image.clone()
    result = {"image": image.view(shape.dtype).reshape(shape.height, shape.width, shape.channels)}
    if shape.masks:
        result["mask"] = raw[size:].view(torch.bool).reshape(shape.height, shape.width, shape.masks)
    return result


def into_bytes(data: Mapping[str, Tensor], raw: Tensor) -> None:
    """Write an image, or a rectangle of one, into `raw` [nbytes] uint8, as `from_bytes` reads it."""
    start = 0
    for name in ("image", "mask"):
        if name in data:
            part = data[name].view(torch.uint8)
            raw[start : start + part.numel()].view(part.shape).copy_(part)
            start += part.numel()


def aligned(size: int) -> int:
    """Return the bytes that an image of `size` bytes takes, with alignment."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _lock_pages(owner: object, block: Tensor) -> bool:
    """Page-lock a host tensor for the lifetime of `owner`; warn and return False if the system refuses."""
    runtime = torch.cuda.cudart()
    assert runtime is not None
    code = runtime.cudaHostRegister(block.data_ptr(), block.nbytes, 0)
    if int(code) != 0:
        warnings.warn(
            f"{block.nbytes / 1e9:.1f} GB of host memory could not be page-locked (CUDA error {int(code)}): copies of "
            "images to the GPU will be slower. Raise the limit (`ulimit -l unlimited`) or lower "
            "--pipeline.datamanager.image-memory-gb.",
            stacklevel=2,
        )
        return False

    def unlock(pid: int, kept: Tensor) -> None:
        if os.getpid() == pid:
            runtime.cudaHostUnregister(kept.data_ptr())

    # At exit the CUDA context is destroyed, and the page lock with it.
    weakref.finalize(owner, unlock, os.getpid(), block).atexit = False
    return True
