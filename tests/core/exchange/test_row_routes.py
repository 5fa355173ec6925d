"""Rows are packed by the sender and unpacked by the receiver."""

import pytest
import torch

from ns_multigpu.core.exchange.row_routes import packed, unpacked


@pytest.mark.parametrize("rows", [0, 1, 2, 5])
@pytest.mark.parametrize("shapes", [[()], [(4,)], [(2,), (3,), (), (4,)], [(), (2,)], [(3, 2), ()]])
def test_unpack_inverts_pack(rows: int, shapes: list[tuple[int, ...]]) -> None:
    g = torch.Generator().manual_seed(rows)
    columns = [torch.randn(rows, *shape, generator=g) for shape in shapes]
    found = unpacked(packed(columns), shapes)
    for before, after in zip(columns, found, strict=True):
        assert torch.equal(after, before) and after.is_contiguous()


def test_parts_of_a_single_row_begin_where_kernels_can_read_them() -> None:
    """Kernels read radii in pairs, and some views send one splat to a rank."""
    ids, radii = unpacked(
        packed([torch.tensor([7], dtype=torch.int32), torch.tensor([[3, 4]], dtype=torch.int32)]), [(), (2,)]
    )
    assert radii.storage_offset() == 0 and ids.storage_offset() == 0
    assert radii.untyped_storage().data_ptr() != ids.untyped_storage().data_ptr()
    assert radii.tolist() == [[3, 4]] and ids.tolist() == [7]
