"""Rows and their gradients in float16 on the wire, for steps through autograd.

What is rounded, and how, is as in `cuda_ext.ops.exchange.row_wire`: positions and depths stay float32, a conic is sent
as its Cholesky factor, and what belongs together is multiplied by a power of two that scales the largest of a row's
numbers to between 2^14 and 2^15 and is sent along. Here each named column of a row has a power of its own. An inf or
NaN stays.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WHOLE = ("means2d", "depths", "transforms", "lines")
"""Columns that are not rounded: half a pixel is float16's precision at 1024 pixels, and depths decide an order. A 2D
Gaussian's transform and a convex's lines have pixels in them, too."""
CONICS = "conics"
"""Columns xx, xy, yy of a positive definite matrix; rounded themselves, those of long ellipses would not be of one."""
_MOST_SCALE = 126


class Code(ABC):
    """Encoding of float columns of rows [M, columns] as bytes [M, bytes]."""

    @abstractmethod
    def write(self, rows: Tensor) -> Tensor:
        """[M, columns] -> [M, bytes] uint8."""

    @abstractmethod
    def read(self, coded: Tensor, like: Tensor) -> Tensor:
        """[K, bytes] uint8 -> [K, columns], of the type of `like`."""


@dataclass(frozen=True)
class HalfRows(Code):
    """Rows, by the names of their columns.

    Attributes:
        names: of the columns. widths: how many numbers each is.
    """

    names: Sequence[str]
    widths: Sequence[int]

    def write(self, rows: Tensor) -> Tensor:
        parts: list[Tensor] = []
        for name, column in zip(self.names, rows.float().split(list(self.widths), dim=1), strict=True):
            if name in WHOLE:
                parts.append(_as_bytes(column))
            else:
                parts += _halves(_factor(column) if name == CONICS else column)
        return torch.cat(parts, dim=1)

    def read(self, coded: Tensor, like: Tensor) -> Tensor:
        columns: list[Tensor] = []
        start = 0
        for name, width in zip(self.names, self.widths, strict=True):
            size = 4 * width if name in WHOLE else 2 * width + 1
            some = coded[:, start : start + size]
            start += size
            if name in WHOLE:
                columns.append(_of_bytes(some, torch.float32))
            else:
                column = _read_halves(some, width)
                columns.append(_conic(column) if name == CONICS else column)
        return torch.cat(columns, dim=1).to(like.dtype)


@dataclass(frozen=True)
class HalfGradients(Code):
    """Gradients of rows, a power of two for each column.

    Attributes:
        widths: how many numbers each column is.
    """

    widths: Sequence[int]

    def write(self, rows: Tensor) -> Tensor:
        columns = rows.float().split(list(self.widths), dim=1)
        return torch.cat([part for column in columns for part in _halves(column)], dim=1)

    def read(self, coded: Tensor, like: Tensor) -> Tensor:
        parts = coded.split([2 * width + 1 for width in self.widths], dim=1)
        columns = [_read_halves(part, width) for part, width in zip(parts, self.widths, strict=True)]
        return torch.cat(columns, dim=1).to(like.dtype)


def _as_bytes(column: Tensor) -> Tensor:
    """[M, n] of any type -> [M, bytes] uint8."""
    return column.contiguous().view(torch.uint8)


def _of_bytes(coded: Tensor, kind: torch.dtype) -> Tensor:
    """The way back of `_as_bytes`."""
    # A copy always: what has one row, or none, counts as contiguous wherever it begins.
    return coded.flatten().clone().view(kind).view(len(coded), coded.shape[1] // kind.itemsize)


def _halves(column: Tensor) -> list[Tensor]:
    """[M, n] float32 -> float16 as bytes, and the exponent of their power of two as one."""
    most = column.abs().amax(dim=1, keepdim=True)
    exponent = 15 - torch.frexp(torch.where(most.isfinite(), most, 1.0)).exponent
    scale = torch.where(most == 0, 0, exponent.clamp(max=_MOST_SCALE))
    scaled = torch.ldexp(column, scale).half()
    return [_as_bytes(scaled), _as_bytes(scale.to(torch.int8))]


def _read_halves(coded: Tensor, width: int) -> Tensor:
    split_rule = _of_bytes(coded[:, : 2 * width], torch.float16).float()
    return torch.ldexp(split_rule, -_of_bytes(coded[:, 2 * width :], torch.int8).int())


def _factor(conics: Tensor) -> Tensor:
    """The lower Cholesky factor's a, b, c of [[xx, xy], [xy, yy]]."""
    xx, xy, yy = conics.unbind(1)
    a = xx.clamp(min=0).sqrt()
    b = torch.where(a > 0, xy / a, 0.0)
    return torch.stack([a, b, (yy - b * b).clamp(min=0).sqrt()], dim=1)


def _conic(factor: Tensor) -> Tensor:
    a, b, c = factor.unbind(1)
    return torch.stack([a * a, a * b, b * b + c * c], dim=1)
