"""The aggregate device over pretended GPUs in host memory, or over the GPUs that NS_MULTIGPU_TEST_GPUS counts."""

import gc
import os
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def use() -> Iterator[Callable[..., None]]:
    """Return `aggregate.use` with tensors of any size spread over the members."""
    from ns_multigpu import aggregate  # registers the device

    def spread(members: int, small_bytes: int = 1, **options: int) -> None:
        gc.collect()
        gpus = int(os.environ.get("NS_MULTIGPU_TEST_GPUS", "0"))
        if 0 < gpus < members:
            pytest.skip(f"there are {gpus} GPUs")
        chosen = list(range(members)) if gpus else None
        aggregate.use(chosen, host_members=0 if gpus else members, small_bytes=small_bytes, **options)

    yield spread
    gc.collect()
