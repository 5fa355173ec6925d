"""The aggregate device over pretended GPUs in host memory."""

import gc
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def use() -> Iterator[Callable[..., None]]:
    """Return `aggregate.use` with tensors of any size spread over the members."""
    from ns_multigpu import aggregate  # registers the device

    def spread(members: int, small_bytes: int = 1, **options: int) -> None:
        gc.collect()
        aggregate.use(host_members=members, small_bytes=small_bytes, **options)

    yield spread
    gc.collect()
