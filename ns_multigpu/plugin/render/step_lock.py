"""Lock held by the training thread; other threads acquire it between steps.

Nerfstudio's viewer renders in threads of its own, under the lock that the training thread takes for a step. An image of
a sharded model takes the main threads of all ranks. With an ordinary lock, a viewer's thread would hold it while it
waits for the main thread: a deadlock. Here the main thread never waits for the lock. Between steps it passes the lock
to one thread and runs that thread's requests.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class StepLock:
    """Lock owned by the thread that creates it. `with` acquires it: at once in that thread, between steps in any
    other.
    """

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
                raise SystemExit("the training thread has ended")
        return self

    def __exit__(self, *_: object) -> None:
        with untraced(), self._changed:
            if self._borrower == threading.get_ident():
                self._borrower = None
                self._changed.notify_all()

    def ask(self, question: Any) -> Any:
        """Return the owner's answer to `question` (see `pass_on`). The calling thread acquires the lock if it does not
        hold it.

        Raises:
            SystemExit: the lock is closed. It ends the calling thread alone, without a traceback.
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
                raise SystemExit("the training thread has ended")
            return self._answer.pop()

    # ---- the thread that owns it ----

    @property
    def wanted(self) -> bool:
        """True if a thread waits for the lock."""
        return bool(self._waiting)

    @property
    def waiting(self) -> int:
        """Number of threads that wait for the lock."""
        return len(self._waiting)

    def wait_until_wanted(self, seconds: float) -> None:
        """Wait until a thread waits for the lock, for at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting), seconds)

    def pass_on(self, answer: Callable[[Any], Any]) -> None:
        """Pass the lock to the thread that has waited longest, if any, and answer its requests until it releases the
        lock.

        An error of `answer` closes the lock, which ends all waiting threads.
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
        """Close the lock: threads that wait for it, now or later, end."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._borrower = None
            self._changed.notify_all()


@contextmanager
def untraced() -> Iterator[None]:
    """Disable the thread's trace function within the context: nerfstudio's viewer raises from it to interrupt
    rendering.
    """
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(tracer)
