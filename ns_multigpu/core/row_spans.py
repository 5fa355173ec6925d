"""How long tables of `cuda_ext.row_spans` are: where the splats of layers begin and end, by rows of tiles."""

from collections.abc import Sequence

from ns_multigpu.core.types import TILE


def tile_rows(height: int) -> int:
    """Rows of tiles of so many pixels."""
    return -(-height // TILE)


def spans_length(sizes: Sequence[tuple[int, int]]) -> int:
    """How many numbers `row_spans` returns of layers of these sizes."""
    return sum(2 * tile_rows(height) for _, height in sizes)
