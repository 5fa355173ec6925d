"""The CUDA kernels of the rasterization on a CPU: their own sources, compiled for the fibers in `emulation/`.

What stands in their way is replaced: launches (`kernel<<<...>>>(...)`) and the few instructions that are written in
PTX (`memory_device.h`). Few blocks take all segments, so that each takes several. It is slow, and sees neither the
order in which a GPU's writes become visible nor blocks that run at the same time.
"""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from cuda_ext.build.native import required_compiler
from tests.cuda_ext.splats import Splats

SOURCES = Path(__file__).parents[2] / "cuda_ext" / "csrc"
EMULATION = Path(__file__).parent / "emulation"
KERNELS = ("plan", "forward", "backward", "unpack")
NEVER = 2**31 - 1
_LAUNCH = re.compile(r"(\w+)<<<(.*?),\s*(\w+), 0, stream>>>\((.*?)\);", re.DOTALL)

_NUMBERS = ("rows", "intersections", "tiles", "pixels")
_CHOICES = ("channels", "patches", "split_above", "mark_stops", "absgrad")
_TENSORS = (
    "means2d", "conics", "opacities", "features", "tile_offsets", "row_ids", "entries", "state", "out", "alpha", "last",
    "v_out", "v_alpha", "v_means2d", "v_conics", "v_opacities", "v_features", "v_abs",
)  # fmt: skip


class _Arguments(ctypes.Structure):
    """As in `rasterize.cpp`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _NUMBERS),
        *((name, ctypes.c_int32) for name in _CHOICES),
        *((name, ctypes.c_void_p) for name in _TENSORS),
    )


def translated(text: str) -> str:
    """A CUDA source as C++ that calls `emulation::launch`."""
    found = _LAUNCH.sub(r"emulation::launch(\2, \3, [&] { \1(\4); });", text)
    found = found.replace("constexpr int kSegmentBlocks = 1056;", "constexpr int kSegmentBlocks = 2;")
    assert "<<<" not in found, "a launch that is written in another way"
    return found


def build(folder: Path) -> ctypes.CDLL:
    """Compiles the kernels in `folder`."""
    sources = folder / "csrc"
    shutil.copytree(SOURCES, sources)
    shutil.copy(EMULATION / "memory_device.h", sources / "cuda" / "common")
    compiled = [str(EMULATION / name) for name in ("fibers.cpp", "rasterize.cpp")]
    for kernel in KERNELS:
        source = sources / "cuda" / "raster" / f"rasterize_{kernel}.cpp"
        source.write_text(translated(source.with_suffix(".cu").read_text()))
        compiled.append(str(source))
    library = folder / "emulated.so"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-w", f"-I{EMULATION}", f"-I{sources}"]
    subprocess.run([*required_compiler(), *flags, *compiled, "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.state_floats.restype = ctypes.c_int64
    loaded.forward.restype = ctypes.c_char_p
    return loaded


class Emulated:
    """`ns_multigpu::rasterize` and its gradient, by the kernels for tiles of 16x16 and up to 4 channels.

    Args:
        library: see `build`.
        splats, lists: what is drawn; all patches of one launch.
        split_above: lists of more splats are split.
        mark_stops: as `rasterize`.

    Attributes:
        out, alpha, last, state: its results.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        splats: Splats,
        lists: tuple[Tensor, Tensor],
        split_above: int = NEVER,
        *,
        mark_stops: bool = False,
    ) -> None:
        self._library, self._rows, self._channels = library, len(splats.means2d), splats.features.shape[1]
        entries, pixels, tiles = [], 0, 0
        for k in range(0, len(splats.patches), 5):
            _, x0, y0, x1, y1 = splats.patches[k : k + 5]
            across = (x1 - x0 + 15) // 16
            entries += [x0, y0, x1, y1, pixels, tiles, across, 0]
            pixels, tiles = pixels + (x1 - x0) * (y1 - y0), tiles + across * ((y1 - y0 + 15) // 16)
        self._numbers = {
            "rows": self._rows, "intersections": len(lists[1]), "tiles": tiles, "pixels": pixels,
            "channels": self._channels, "patches": len(entries) // 8, "split_above": split_above,
            "mark_stops": int(mark_stops),
        }  # fmt: skip
        inputs = [x.float().contiguous() for x in splats.inputs()]
        integers = [*lists, torch.tensor(entries, dtype=torch.int32)]
        self._inputs = dict(zip(_TENSORS[:7], [*inputs, *integers], strict=True))
        nothing = float("nan")  # what no kernel writes
        self.out = torch.full((pixels, self._channels), nothing)
        self.alpha, self.last = torch.full((pixels,), nothing), torch.full((pixels,), 7**9, dtype=torch.int32)
        size = library.state_floats(ctypes.byref(self._arguments()))
        self.state = torch.full((size,), nothing)
        self._outputs = {"state": self.state, "out": self.out, "alpha": self.alpha, "last": self.last}
        problem = library.forward(ctypes.byref(self._arguments(**self._outputs)))
        assert problem is None, problem

    def backward(self, v_out: Tensor, v_alpha: Tensor, *, absgrad: bool) -> tuple[Tensor, ...]:
        """Gradients by means2d, conics, opacities and features, and absolute ones."""
        sizes = {"v_means2d": (2,), "v_conics": (3,), "v_opacities": (), "v_features": (self._channels,), "v_abs": (2,)}
        found = {name: torch.full((self._rows, *size), float("nan")) for name, size in sizes.items()}
        given = {"v_out": v_out.float().contiguous(), "v_alpha": v_alpha.float().contiguous()}
        wanted = found if absgrad else {name: x for name, x in found.items() if name != "v_abs"}
        arguments = self._arguments(**self._outputs, **given, **wanted)
        arguments.absgrad = int(absgrad)
        self._library.backward(ctypes.byref(arguments))
        return tuple(wanted.values())

    def _arguments(self, **tensors: Tensor) -> _Arguments:
        pointers = {name: tensor.data_ptr() for name, tensor in {**self._inputs, **tensors}.items()}
        return _Arguments(**self._numbers, **pointers)
