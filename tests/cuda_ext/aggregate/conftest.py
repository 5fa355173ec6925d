"""The aggregate device over pretended GPUs in host memory."""

import gc
from collections.abc import Callable, Iterator

import pytest

import cuda_ext


@pytest.fixture
def use() -> Iterator[Callable[..., None]]:
    """Return `aggregate.use` with tensors of any size spread over the members."""
    if problem := cuda_ext.compiler_problem():
        pytest.skip(problem)
    from ns_multigpu import aggregate

    def spread(members: int, small_bytes: int = 1, **options: int) -> None:
        gc.collect()
        aggregate.use(host_members=members, small_bytes=small_bytes, **options)

    yield spread
    gc.collect()
