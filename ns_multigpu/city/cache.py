"""Bounded cache of recently used tensors."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from torch import Tensor


class TensorCache:
    """Cache of recently used tensors, bounded in bytes; thread-safe.

    Args:
        limit: bytes; 0 keeps nothing.
    """

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise ValueError(f"limit is {limit} bytes: give 0 to keep nothing")
        self.limit = limit
        self.bytes = 0
        self._kept: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return the cached tensor of a key, or the result of `make`. It is shared: do not write to it."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = make()  # outside the lock, so that threads render in parallel
        size = made.numel() * made.element_size()
        with self._lock:
            if key not in self._kept and size <= self.limit:
                self._kept[key] = made
                self.bytes += size
                while self.bytes > self.limit:
                    _, old = self._kept.popitem(last=False)
                    self.bytes -= old.numel() * old.element_size()
        return made
