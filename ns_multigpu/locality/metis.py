"""METIS (Karypis and Kumar 1998), from the library that pymetis contains.

pymetis.part_graph accepts one weight per vertex. Points must be balanced for memory and views for work, and a balanced
sum of both ensures neither. METIS itself accepts several weights, so it is called directly in pymetis's library. If a
build hides the function, part_graph gets the sum of both weights, each as a fraction of its total, and `note` says so.
"""

import ctypes
import importlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_OPTIONS = 40
_CUTS = 4
"""Partitions made, of which the best is kept: up to a tenth less is cut than by one, in two to three times the time."""
_WHOLE = 1 << 30
"""Sum of all vertices' weights, for pymetis's single weight."""


class MetisError(RuntimeError):
    """METIS is missing or has failed; the message says which."""


@dataclass(frozen=True)
class GraphParts:
    """Result of partitioning.

    Attributes:
        of: [n] int64, the part of each vertex.
        cut: weights of edges between parts.
        note: what was not done as asked, or "".
    """

    of: Ints
    cut: int
    note: str = ""


def missing() -> str | None:
    """Return why METIS cannot be used here, or None if it can."""
    try:
        importlib.import_module("pymetis._internal")
    except ImportError as error:
        return f"pymetis cannot be imported ({error}): `pip install pymetis`"
    return None


def part_graph(
    starts: Ints, neighbours: Ints, vertex_weights: Ints, edge_weights: Ints, parts: int, imbalance: float, seed: int
) -> GraphParts:
    """Cut a graph into parts of equal weight such that the edges between them weigh little.

    Args:
        starts: [n + 1], where each vertex's neighbours start. neighbours: [m], each edge in both directions.
        vertex_weights: [n, k], k kinds of weight, each to be level. edge_weights: [m], positive.
        parts: how many.
        imbalance: a part's weight of each kind is at most this times the mean, as far as METIS manages.
        seed: the same gives the same parts.

    Raises:
        MetisError: METIS is missing, or says no.
    """
    if problem := missing():
        raise MetisError(problem)
    if parts == 1:
        return GraphParts(np.zeros(len(starts) - 1, dtype=np.int64), 0)
    library, width, keys = _library()
    if library is None:
        return _by_pymetis(starts, neighbours, vertex_weights, edge_weights, parts, imbalance, seed)
    kind = np.int64 if width == 64 else np.int32
    arrays = [np.ascontiguousarray(a, dtype=kind) for a in (starts, neighbours, vertex_weights, edge_weights)]
    if width == 32 and int(np.asarray(edge_weights, dtype=np.int64).sum()) >= 1 << 31:
        raise MetisError("the edges' weights add up to more than this build of METIS can count: group more points")
    options = np.full(_OPTIONS, -1, dtype=kind)
    library.METIS_SetDefaultOptions(_pointer(options))
    options[keys["UFACTOR"]] = max(1, round((imbalance - 1) * 1000))
    options[keys["SEED"]] = seed
    options[keys["NCUTS"]] = _CUTS
    numbers = [np.array([n], dtype=kind) for n in (len(starts) - 1, vertex_weights.shape[1], parts, 0)]
    found = np.zeros(len(starts) - 1, dtype=kind)
    xadj, adjncy, vwgt, adjwgt = map(_pointer, arrays)
    vertices, num_constraints, count, cut = map(_pointer, numbers)
    code = library.METIS_PartGraphKway(
        vertices,
        num_constraints,
        xadj,
        adjncy,
        vwgt,
        None,
        adjwgt,
        count,
        None,
        None,
        _pointer(options),
        cut,
        _pointer(found),
    )
    if code != 1:
        meaning = {-2: "an input is wrong", -3: "memory is short"}.get(code, "for a reason of its own")
        raise MetisError(f"METIS failed with status {code}: {meaning}")
    return GraphParts(found.astype(np.int64), int(numbers[3][0]))


def _by_pymetis(
    starts: Ints, neighbours: Ints, vertex_weights: Ints, edge_weights: Ints, parts: int, imbalance: float, seed: int
) -> GraphParts:
    import pymetis

    totals = np.maximum(vertex_weights.sum(0), 1)
    one = np.maximum(1, (vertex_weights / totals * (_WHOLE / vertex_weights.shape[1])).sum(1)).astype(np.int64)
    scale = max(1.0, float(edge_weights.sum()) / _WHOLE)
    weights = np.maximum(1, edge_weights / scale).astype(np.int64)
    options: Any = pymetis.Options(ufactor=max(1, round((imbalance - 1) * 1000)), seed=seed, ncuts=_CUTS)
    cut, of = pymetis.part_graph(
        parts,
        pymetis.CSRAdjacency(starts, neighbours),
        vweights=one,
        eweights=weights,
        recursive=False,
        options=options,
    )
    note = "METIS balanced the sum of points and work, not each: this build of pymetis hides METIS_PartGraphKway"
    return GraphParts(np.asarray(of, dtype=np.int64), int(cut), note)


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@lru_cache(maxsize=1)
def _library() -> tuple[Any, int, dict[str, int]]:
    """Return the library with METIS (None if its symbols are hidden), the bits of its integers, and option indices."""
    internal: Any = importlib.import_module("pymetis._internal")

    width = int(internal._idx_type_width())
    try:
        library = ctypes.CDLL(internal.__file__)
        library.METIS_PartGraphKway.restype = ctypes.c_int
        library.METIS_SetDefaultOptions.restype = ctypes.c_int
        keys = {name: int(getattr(internal.options_indices, name)) for name in ("UFACTOR", "SEED", "NCUTS")}
    except (OSError, AttributeError):
        return None, width, {}
    return library, width, keys
