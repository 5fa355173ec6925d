"""Columns of a primitive's rows. The operators that exchange rows are templates over them."""

from collections import namedtuple
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuda_ext.ops.common.checks import check_floats, check_tensors
from cuda_ext.reference.row_exchange import record_floats


class ReceivedRows(NamedTuple):
    """Rows from S sources, a segment of `capacity` lines after the other: M = S * capacity lines.

    Attributes:
        view_ids: [M] int32; of padding the last view.
        means2d: [M, 2] pixels; zero, as all that follows, in padding.
        conics: [M, 3] inverse covariance (xx, xy, yy) in 1/pixels^2.
        opacities: [M].
        features: [M, 3] RGB.
        depths: [M] world units.
        radii: [M, 2] int32 half extents in pixels; not positive where a row is not drawn: see `Projection`.
        owners: [M] int32, the source that the line's segment belongs to, also of padding.
        slots: [M] int32, the row's line at its owner; of padding 0.
    """

    view_ids: Tensor
    means2d: Tensor
    conics: Tensor
    opacities: Tensor
    features: Tensor
    depths: Tensor
    radii: Tensor
    owners: Tensor
    slots: Tensor


class RowLayout:
    """Columns of a primitive's rows, in the order of a record's numbers.

    Args:
        widths: of the float32 columns, by name; 0 for a column [M]. The first is `means2d`. CUDA kernels serve the
            widths in cuda_ext/csrc/cuda/exchange/row_columns.h.
        received: class of received rows; made unless given.

    Attributes:
        columns: widths, 1 for a column [M].
        numbers: of a row, and of its gradients.
        record_floats: numbers of 4 bytes of a row's record, and of its gradient record.
        rows: class of a rank's own rows; `SplatRows` is that of 3D Gaussians.
    """

    def __init__(self, widths: Mapping[str, int], received: Any = None) -> None:
        self.widths = dict(widths)
        self.columns = [max(width, 1) for width in widths.values()]
        self.numbers = sum(self.columns)
        self.record_floats = record_floats(self.numbers + 4)
        names = (*widths, "radii")
        self.rows: Any = namedtuple("Rows", ("view_ids", "point_ids", "count", *names))
        self.received: Any = received or namedtuple("Received", ("view_ids", *names, "owners", "slots"))
        if "conics" not in widths:
            self.rows.conics = self.received.conics = property(lambda rows: boundless(rows.depths))

    def columns_of(self, rows: Any) -> list[Tensor]:
        """Return the float columns of rows."""
        return [getattr(rows, name) for name in self.widths]

    def checked(self, rows: Any) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return the columns, radii and view ids of rows, detached.

        Raises:
            TypeError, ValueError: one has the wrong dtype or shape, or is not on the device of `means2d`.
        """
        columns, like = [column.detach() for column in self.columns_of(rows)], rows.means2d
        count = len(like)
        shapes = [(count, width) if width else (count,) for width in self.widths.values()]
        check_records(like, **dict(zip(self.widths, zip(columns, shapes, strict=True), strict=True)))
        integers = {"radii": (rows.radii, (count, 2)), "view_ids": (rows.view_ids, (count,))}
        check_tensors(torch.int32, like.device, **integers)
        return columns, rows.radii, rows.view_ids

    def receive(self, columns: Sequence[Tensor], radii: Tensor, view_ids: Tensor, owners: Tensor, slots: Tensor) -> Any:
        """Return received rows."""
        return self.received(view_ids, *columns, radii, owners, slots)

    def records_of(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the records [M, record_floats] of gradients by all columns."""
        parts = [part.reshape(len(part), width) for part, width in zip(gradients, self.columns, strict=True)]
        return torch.nn.functional.pad(torch.cat(parts, dim=1), (0, self.record_floats - self.numbers))

    def gradients_of(self, records: Tensor) -> dict[str, Tensor]:
        """Return gradients by column name: the inverse of `records_of`."""
        parts = records[:, : self.numbers].split(self.columns, dim=1)
        return {
            name: part if width else part[:, 0] for (name, width), part in zip(self.widths.items(), parts, strict=True)
        }


def real_rows(point_ids: Tensor, count: Tensor) -> Tensor:
    """Return a mask [M], True for rows, False for padding: the first `count` lines of each segment are rows.

    Args:
        point_ids: [M] int32, -1 of padding. count: int64, per segment.
    """
    segments = max(count.numel(), 1)
    places = torch.arange(len(point_ids) // segments, device=point_ids.device)
    return (point_ids >= 0) & (places < count.view(-1, 1)).reshape(-1)


def boundless(like: Tensor) -> Tensor:
    """Return zero conics [M, 3] without a bound: only a row's box limits it."""
    return like.new_zeros(len(like), 3)


def check_records(like: Tensor, **tensors: tuple[Tensor, Sequence[int]]) -> None:
    """Check float32 tensors against `like`: see `check_floats`.

    Raises:
        TypeError, ValueError: one is of another dtype, device or shape.
    """
    if like.dtype != torch.float32:
        raise TypeError(f"Records are float32, and the rows are {like.dtype}: convert with `.float()`.")
    check_floats(like, **tensors)


GAUSSIAN_ROWS = RowLayout({"means2d": 2, "conics": 3, "opacities": 0, "features": 3, "depths": 0}, ReceivedRows)
"""Rows of 3D Gaussians, and of 4D ones."""
