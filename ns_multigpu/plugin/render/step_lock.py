"""A lock that the main thread owns, and lends to other threads when it stands between two steps.

Nerfstudio's viewer renders from threads of its own, under the lock that the training thread takes for a step. An image
of points that are spread over ranks takes the main threads of all of them, so a viewer's thread that held a lock of the
ordinary kind would wait for a thread that waits for it. Here the main thread never waits for the lock: it has it, and
while it lends it out it does what the borrower asks.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class StepLock:
    """The lock of the thread that makes it. `with` takes it: at once in that thread, when it is lent in any other."""

    def __init__(self) -> None:
        self._owner = threading.get_ident()
        self._changed = threading.Condition()
        self._waiting: deque[int] = deque()
        self._borrower: int | None = None
        self._question: list[Any] = []
        self._answer: list[Any] = []
        self._closed = False

    # ---- threads that borrow it ----

    def __enter__(self) -> "StepLock":
        me = threading.get_ident()
        if me == self._owner:
            return self
        with untraced(), self._changed:
            if not self._closed:
                self._waiting.append(me)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or self._borrower == me)
            if self._closed:
                raise SystemExit("there is nobody left to answer")
        return self

    def __exit__(self, *_: object) -> None:
        with untraced(), self._changed:
            if self._borrower == threading.get_ident():
                self._borrower = None
                self._changed.notify_all()

    def ask(self, question: Any) -> Any:
        """What the owner makes of `question` (see `lend`). A thread that has not borrowed the lock does so for it.

        Raises:
            SystemExit: it will not be answered any more. (In a thread that ends just this thread, and says nothing.)
        """
        with untraced():
            if self._borrower == threading.get_ident():
                return self._ask(question)
            with self:
                return self._ask(question)

    def _ask(self, question: Any) -> Any:
        with self._changed:
            if not self._closed:
                self._question, self._answer = [question], []
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or bool(self._answer))
            if not self._answer:
                raise SystemExit("there is nobody left to answer")
            return self._answer.pop()

    # ---- the thread that owns it ----

    @property
    def wanted(self) -> bool:
        """Whether a thread waits for it."""
        return bool(self._waiting)

    @property
    def waiting(self) -> int:
        """How many threads wait for it."""
        return len(self._waiting)

    def wait_until_wanted(self, seconds: float) -> None:
        """Returns as soon as a thread waits for it, after `seconds` at the latest."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting), seconds)

    def lend(self, answer: Callable[[Any], Any]) -> None:
        """Lends it to the thread that has waited longest, if any, and answers what that asks until it gives it back.

        If answering fails the lock is closed: nobody is left to wait.
        """
        with self._changed:
            if not self._waiting:
                return
            self._borrower = self._waiting.popleft()
            self._changed.notify_all()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._borrower is None or bool(self._question))
                if not self._question:
                    return
                question = self._question.pop()
            try:
                result = answer(question)
            except BaseException:
                self.close()
                raise
            with self._changed:
                self._answer = [result]
                self._changed.notify_all()

    def close(self) -> None:
        """From now on nothing is lent or answered: threads that wait, or come later, end."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._borrower = None
            self._changed.notify_all()


@contextmanager
def untraced() -> Iterator[None]:
    """Nerfstudio interrupts a viewer's rendering by a trace function that raises, at any line: not within this."""
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(tracer)
