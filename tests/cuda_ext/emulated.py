"""CUDA kernels, mostly of the rasterization, on a CPU: their own sources, compiled for the fibers in `emulation/`.

What stands in their way is replaced: launches (`kernel<<<...>>>(...)`) and the few instructions that are written in
PTX (`memory_device.h`). Few blocks take all segments, or rows of a view, so that each takes several. It is slow, and
sees neither the order in which a GPU's writes become visible nor blocks that run at the same time.
"""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cuda_ext.build.native import required_compiler
from tests.cuda_ext.splats import Splats

SOURCES = Path(__file__).parents[2] / "cuda_ext" / "csrc"
EMULATION = Path(__file__).parent / "emulation"
KERNELS = tuple(f"raster/rasterize_{name}" for name in ("plan", "forward", "backward", "unpack"))
PRIMITIVES = (
    "raster/rasterize_plan",
    "common/rows",
    *(f"{stage}/{kind}_{stage}" for kind in ("surfels", "convexes") for stage in ("raster", "project")),
)
EXCHANGE = ("exchange/row_pack", "exchange/row_wire")
POSES = ("common/rows", "optim/splat_poses", "optim/view_poses")
NEVER = 2**31 - 1
_LAUNCH = re.compile(r"(\w+(?:<\w+>)?)<<<(.*?),\s*(\w+), 0, stream>>>\((.*?)\);", re.DOTALL)

_NUMBERS = ("rows", "intersections", "tiles", "pixels")
_CHOICES = ("channels", "patches", "split_above", "blocks_at_once", "mark_stops", "absgrad")
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
    """Return a CUDA source as C++ that calls `emulation::launch`."""
    found = _LAUNCH.sub(r"emulation::launch(\2, \3, [&] { \1(\4); });", text)
    for blocks in ("kSegmentBlocks = 1056", "kPoseBlocks = 512"):
        found = found.replace(f"constexpr int {blocks};", f"constexpr int {blocks.split()[0]} = 2;")
    assert "<<<" not in found, "a launch that is written in another way"
    return found


def compiled(folder: Path, kernels: tuple[str, ...], host: str) -> ctypes.CDLL:
    """Compile kernels (.cu files) and the host code that launches them in `folder`."""
    sources = folder / "csrc"
    shutil.copytree(SOURCES, sources)
    shutil.copy(EMULATION / "memory_device.h", sources / "cuda" / "common")
    for name in ("raster/primitive_raster.h", "project/primitive_project.h", "optim/splat_update.h"):
        header = sources / "cuda" / name
        header.write_text(translated(header.read_text()))
    units = [str(EMULATION / name) for name in ("fibers.cpp", host)]
    for kernel in kernels:
        source = sources / "cuda" / f"{kernel}.cpp"
        source.write_text(translated(source.with_suffix(".cu").read_text()))
        units.append(str(source))
    library = folder / "emulated.so"
    cuda = ["-D__CUDACC__", "-include", str(EMULATION / "cuda_runtime.h")]
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-w", *cuda, f"-I{EMULATION}", f"-I{sources}"]
    subprocess.run([*required_compiler(), *flags, *units, "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def build(folder: Path) -> ctypes.CDLL:
    """Compile the kernels of 3D Gaussians in `folder`."""
    loaded = compiled(folder, KERNELS, "rasterize.cpp")
    loaded.state_floats.restype = ctypes.c_int64
    loaded.forward.restype = ctypes.c_char_p
    return loaded


def patch_entries(patches: tuple[int, ...] | list[int]) -> tuple[Tensor, int, int]:
    """Patch as `PatchEntry` [n, 8] int32, and how many pixels and tiles they have."""
    entries, pixels, tiles = list[list[int]](), 0, 0
    for k in range(0, len(patches), 5):
        _, x0, y0, x1, y1 = patches[k : k + 5]
        across = (x1 - x0 + 15) // 16
        entries.append([x0, y0, x1, y1, pixels, tiles, across, 0])
        pixels, tiles = pixels + (x1 - x0) * (y1 - y0), tiles + across * ((y1 - y0 + 15) // 16)
    return torch.tensor(entries, dtype=torch.int32), pixels, tiles


class _Rows(ctypes.Structure):
    """`Arguments` of `primitives.cpp`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "intersections", "tiles", "patches")),
        ("columns", ctypes.c_void_p * 6),
        *((name, ctypes.c_void_p) for name in ("tile_offsets", "row_ids", "entries", "out", "extra", "alpha", "last")),
        *((name, ctypes.c_void_p) for name in ("v_out", "v_extra", "v_alpha")),
        ("gradients", ctypes.c_void_p * 6),
    )


def draw_primitives(
    library: ctypes.CDLL, name: str, columns: list[Tensor], lists: tuple[Tensor, Tensor], patches: list[int],
    v_pixels: tuple[Tensor, Tensor, Tensor],
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Return `ns_multigpu::rasterize_<name>` and its gradient, by the CUDA kernels.

    Args:
        library: `compiled` of `PRIMITIVES`. columns: of rows, in the operator's order, with `lists` of all patches.
        v_pixels: gradients by colours, by the extra output of `name`, and by coverage.

    Returns:
        Its four outputs (out, extra, alpha, last), and gradients by the columns.
    """
    entries, pixels, tiles = patch_entries(patches)
    inputs = [column.detach().float().contiguous() for column in columns]
    given = [v.float().contiguous() for v in v_pixels]
    nothing = float("nan")  # what no kernel writes
    drawn = [torch.full_like(v, nothing) for v in given] + [torch.full((pixels,), 7**9, dtype=torch.int32)]
    found = [torch.full_like(column, nothing) for column in inputs]
    pointers = {
        "tile_offsets": lists[0], "row_ids": lists[1], "entries": entries, "v_out": given[0], "v_extra": given[1],
        "v_alpha": given[2], **dict(zip(("out", "extra", "alpha", "last"), drawn, strict=True)),
    }  # fmt: skip
    arguments = _Rows(
        rows=len(inputs[0]), intersections=len(lists[1]), tiles=tiles, patches=len(entries),
        columns=(ctypes.c_void_p * 6)(*(x.data_ptr() for x in inputs)),
        gradients=(ctypes.c_void_p * 6)(*(x.data_ptr() for x in found)),
        **{key: value.data_ptr() for key, value in pointers.items()},
    )  # fmt: skip
    getattr(library, f"draw_{name}")(ctypes.byref(arguments))
    return drawn, found


class _Projection(ctypes.Structure):
    """`Projection` of `primitives.cpp`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("points", "views", "rows", "intrinsics_rows")),
        ("columns", ctypes.c_void_p * 5),
        *((name, ctypes.c_void_p) for name in ("viewmats", "Ks", "sizes", "view_ids", "point_ids")),
        *((name, ctypes.c_float) for name in ("near_plane", "far_plane")),
        ("projected", ctypes.c_void_p * 5),
        ("radii", ctypes.c_void_p),
        ("given", ctypes.c_void_p * 5),
        ("gradients", ctypes.c_void_p * 5),
        ("v_viewmats", ctypes.c_void_p),
    )


def project_primitives(
    library: ctypes.CDLL, name: str, columns: list[Tensor], viewmats: Tensor, Ks: Tensor, sizes: list[int],
    ids: tuple[Tensor, Tensor], near: float, given: list[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Return `ns_multigpu::project_<name>` and its gradient, by the CUDA kernels.

    Args:
        library: `compiled` of `PRIMITIVES`. columns: of points. ids: view_ids and point_ids of rows.
        given: gradients of the projected columns.

    Returns:
        The projected columns and radii; gradients by the columns and by `viewmats`.
    """
    nothing = float("nan")  # what no kernel writes
    inputs = [x.detach().float().contiguous() for x in (*columns, viewmats, Ks)]
    wanted = [x.float().contiguous() for x in given]
    projected = [torch.full_like(x, nothing) for x in wanted]
    radii = torch.full((len(ids[0]), 2), 7**9, dtype=torch.int32)
    found = [torch.full_like(x, nothing) for x in inputs[:-2]]
    v_viewmats, numbers = torch.zeros_like(inputs[-2]), torch.tensor(sizes)

    def five(tensors: list[Tensor]) -> Any:
        return (ctypes.c_void_p * 5)(*(x.data_ptr() for x in tensors))

    arguments = _Projection(
        points=len(inputs[0]), views=len(viewmats), rows=len(ids[0]), intrinsics_rows=Ks.shape[1],
        columns=five(inputs[:-2]), viewmats=inputs[-2].data_ptr(), Ks=inputs[-1].data_ptr(), sizes=numbers.data_ptr(),
        view_ids=ids[0].data_ptr(), point_ids=ids[1].data_ptr(), near_plane=near, far_plane=1e10,
        projected=five(projected), radii=radii.data_ptr(), given=five(wanted), gradients=five(found),
        v_viewmats=v_viewmats.data_ptr(),
    )  # fmt: skip
    getattr(library, f"project_{name}")(ctypes.byref(arguments))
    return [*projected, radii], [*found, v_viewmats]


class Emulated:
    """`ns_multigpu::rasterize` and its gradient, by the kernels for tiles of 16x16 and up to 4 channels.

    Args:
        library: see `build`.
        splats, lists: what is drawn; all patches of one launch.
        split_above: lists of more splats are split.
        blocks_at_once: lists of up to `kSplitShares` fair shares of so many blocks are not; 0 splits them, too.
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
        blocks_at_once: int = 0,
        *,
        mark_stops: bool = False,
    ) -> None:
        self._library, self._rows, self._channels = library, len(splats.means2d), splats.features.shape[1]
        entries, pixels, tiles = patch_entries(splats.patches)
        self._numbers = {
            "rows": self._rows, "intersections": len(lists[1]), "tiles": tiles, "pixels": pixels,
            "channels": self._channels, "patches": len(entries), "split_above": split_above,
            "blocks_at_once": blocks_at_once, "mark_stops": int(mark_stops),
        }  # fmt: skip
        inputs = [x.float().contiguous() for x in splats.inputs()]
        integers = [*lists, entries]
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
