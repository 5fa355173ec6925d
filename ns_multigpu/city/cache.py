"""A bounded store of what was made last."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from torch import Tensor


class TensorCache:
    """Keeps the tensors used last, up to a number of bytes; safe to use from several threads.

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
        """The tensor kept under a key, or else the one that `make` returns. It is shared: do not write to it."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = make()  # outside the lock, so that threads render side by side
        size = made.numel() * made.element_size()
        with self._lock:
            if key not in self._kept and size <= self.limit:
                self._kept[key] = made
                self.bytes += size
                while self.bytes > self.limit:
                    _, old = self._kept.popitem(last=False)
                    self.bytes -= old.numel() * old.element_size()
        return made
