"""What all who render with several ranks have in common: a lock that viewers' threads wait for, and who leads."""

import contextlib
import threading
from collections.abc import Iterator

from ns_multigpu.plugin.render.lent_lock import LentLock
from ns_multigpu.plugin.render.strides import Strides


class Leading:
    """Made on every rank, in its main thread. Rank 0 says what is rendered, and all ranks render it.

    Attributes:
        lock: what viewers render under while a model is trained; lent between two steps.
        rate: pixels a second of the last image that somebody waited for; None before there was one.
        strides: how many steps to take while somebody looks.
    """

    def __init__(self) -> None:
        self.lock = LentLock()
        self.rate: float | None = None
        self.strides = Strides()
        self._main = threading.get_ident()
        self._always = self._failed = False
        self._turn = threading.RLock()  # one image at a time

    # ---- one process with helpers ----

    def lead_always(self) -> None:
        """On rank 0: from now on the others, if any, wait for what it asks for, whenever that is, in any thread."""
        self._always = True

    @property
    def leads_always(self) -> bool:
        """Whether that is so now."""
        return self._always

    @contextlib.contextmanager
    def side_by_side(self) -> Iterator[None]:
        """Within, all ranks call the same again, as if nobody led."""
        with self._turn:
            before, self._always = self._always, False
            try:
                yield
            finally:
                self._always = before

    # ---- a viewer's threads ----

    @property
    def waiting(self) -> int:
        """How many of the viewer's threads wait for an image."""
        return self.lock.waiting

    def wait_until_wanted(self, seconds: float) -> None:
        """Returns as soon as a viewer's thread of this rank wants an image, after `seconds` at the latest."""
        self.lock.wait_until_wanted(seconds)

    def close(self) -> None:
        """Ends all threads that wait for an image, or ask for one later."""
        self.lock.close()
