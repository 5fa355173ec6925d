"""Points of a PLY file, from which a run begins: ours, Inria's or gsplat's.

The file is memory-mapped, and each rank reads its own rows. Harmonics follow the run's degree: coefficients of higher
degrees are dropped, missing ones are zero.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.recfunctions import structured_to_unstructured
from numpy.typing import NDArray
from torch import Tensor

from ns_multigpu.core.schema import HARMONICS, POSITION, Parameter, degree_of, harmonics
from ns_multigpu.plugin.capture.colmap import Damaged
from ns_multigpu.plugin.capture.ply import map_ply
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.primitives.gaussians.frame import moved
from ns_multigpu.primitives.gaussians.init import SH_C0
from ns_multigpu.primitives.registry import PRIMITIVES, titled

CHUNK = 1 << 18
"""Rows held at a time besides the result."""
PLAIN, _CHANNELS = "features_dc", 3
_OTHERS = "scale_2"
"""Property that 3D Gaussians have and 2D ones lack."""


class PlyPoints:
    """Points of a file, by rows.

    Args:
        path: a binary PLY file.
        primitive: of the run. degree: of its harmonics; 0 for plain colours.
        frame: [3, 4] transform into the run's frame and the factor on lengths that follows; None without one.

    Attributes:
        degree: of the file's harmonics.

    Raises:
        InputError: the file is missing, damaged, or of no points of this primitive.
    """

    def __init__(self, path: Path, primitive: str, degree: int, frame: tuple[Tensor, float] | None = None) -> None:
        self._path, self._degree, self._frame = path, degree, frame
        self._parameters: tuple[Parameter, ...] = PRIMITIVES[primitive].schema
        if not all(one.ply for one in self._parameters):
            raise InputError(f"--load-ply: PLY files have no place for {titled(primitive)}. Leave it out.")
        try:
            self._rows = map_ply(path)
        except (Damaged, OSError) as error:
            raise InputError(f"--load-ply {error}") from error
        there = set(self._rows.dtype.names or ())
        rest = sum(name.startswith("f_rest_") for name in there)
        self.degree = degree_of(rest // _CHANNELS)
        wanted = {name for one in self._parameters for name in one.properties(self.degree)}
        if missing := sorted(wanted - there):
            raise InputError(
                f"--load-ply {path}: it holds no {titled(primitive)}: its vertices have no {', '.join(missing)}."
            )
        if _OTHERS in there - wanted:
            raise InputError(f"--load-ply {path}: it holds 3D Gaussians. Use --pipeline.model.primitive 3dgs.")
        if rest != _CHANNELS * harmonics(self.degree):
            raise InputError(f"--load-ply {path}: its {rest} f_rest properties are not the harmonics of any degree.")
        if len(self) == 0:
            raise InputError(f"--load-ply {path}: it holds no point.")

    def __len__(self) -> int:
        return len(self._rows)

    def positions(self) -> Tensor:
        """Return all positions, [N, 3]."""
        return self.read(range(len(self)), only=POSITION)[POSITION]

    def read(self, rows: range | Tensor, *, device: torch.device | str = "cpu", only: str = "") -> dict[str, Tensor]:
        """Return raw parameters of rows, in the run's frame.

        Args:
            rows: a range, or [n] int64 on the CPU.
            device: of the result. only: name of the one parameter to read.

        Raises:
            InputError: a number is not finite.
        """
        parameters = [one for one in self._parameters if only in ("", one.name)]
        result = {one.name: torch.empty(len(rows), *one.sized(self._degree), device=device) for one in parameters}
        for begin in range(0, len(rows), CHUNK):
            part = rows[begin : begin + CHUNK]
            table = self._rows[part.start : part.stop] if isinstance(part, range) else self._rows[part.numpy()]
            values = {one.name: self._values(table, one) for one in parameters}
            for name, value in values.items():
                if len(wrong := torch.nonzero(~value.isfinite().flatten(1).all(dim=1))):
                    row = int(part[int(wrong[0])]) + 1
                    raise InputError(f"--load-ply {self._path}: {name} of point {row} is NaN or infinite.")
            values = values if self._frame is None else moved(values, *self._frame)
            for name, value in values.items():
                result[name][begin : begin + len(part)] = value
        return result

    def _values(self, table: NDArray[Any], parameter: Parameter) -> Tensor:
        """Return a parameter of records, [n, *shape] float32; positions in another frame, which may be UTM, float64."""
        if not (names := parameter.properties(self.degree)):
            return torch.zeros(len(table), *parameter.sized(self._degree))
        kind = np.float64 if parameter.name == POSITION and self._frame is not None else np.float32
        value = torch.from_numpy(structured_to_unstructured(table[names], dtype=kind, copy=True))
        if HARMONICS in parameter.shape:
            own = harmonics(self._degree)
            value = value.view(len(table), _CHANNELS, -1).transpose(1, 2)[:, :own]
            return torch.nn.functional.pad(value, (0, 0, 0, own - value.shape[1]))
        if parameter.name == PLAIN and self._degree == 0:  # Splatfacto without harmonics uses a sigmoid
            return torch.logit(value * SH_C0 + 0.5, eps=1e-6)
        return value
