"""The step lock of the main thread: its order, and that no thread waits for ever."""

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ns_multigpu.plugin.render.step_lock import StepLock
from tests.lib.processes import until


def _thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_lock_is_granted_in_order_and_requests_are_answered() -> None:
    lock, said = StepLock(), list[Any]()

    def borrow(name: str, questions: list[int]) -> None:
        with lock:
            said.append((name, [lock.ask(question) for question in questions]))

    first = _thread(lambda: borrow("first", [1, 2]))
    assert until(lambda: lock.wanted)
    second = _thread(lambda: borrow("second", []))
    assert until(lambda: len(lock._waiting) == 2)
    with lock, lock:  # the owner has it at once, however often
        assert said == []
    lock.pass_on(lambda question: 10 * question)
    assert said == [("first", [10, 20])] and lock.wanted, "one at a time"
    lock.pass_on(lambda question: 10 * question)
    first.join(5), second.join(5)
    assert said[1] == ("second", []) and not lock.wanted
    lock.pass_on(lambda question: pytest.fail("no request was made"))  # returns at once


def test_request_without_the_lock_acquires_it() -> None:
    lock, said = StepLock(), list[Any]()
    thread = _thread(lambda: said.append(lock.ask("what")))
    lock.wait_until_wanted(5)
    lock.pass_on(lambda question: question + "?")
    thread.join(5)
    assert said == ["what?"]


def test_an_error_of_the_borrower_gives_it_back() -> None:
    lock, said = StepLock(), list[str]()

    def fail() -> None:
        try:
            with lock:
                raise KeyError("a viewer's fault")
        except KeyError:
            said.append("failed")

    thread = _thread(fail)
    lock.wait_until_wanted(5)
    lock.pass_on(lambda question: None)
    thread.join(5)
    assert said == ["failed"] and not thread.is_alive()


def test_failure_or_close_releases_waiting_threads() -> None:
    lock, ends = StepLock(), list[type[BaseException]]()

    def ask() -> None:
        try:
            lock.ask("image")
        except BaseException as error:
            ends.append(type(error))

    def fail(question: str) -> None:
        raise RuntimeError("out of memory")

    threads = [_thread(ask) for _ in range(3)]
    assert until(lambda: len(lock._waiting) == 3)
    with pytest.raises(RuntimeError, match="out of memory"):
        lock.pass_on(fail)
    threads.append(_thread(ask))  # too late
    for thread in threads:
        thread.join(5)
    assert ends == [SystemExit] * 4, "just this: threading says nothing of it, but does of what derives from it"
    assert not lock.wanted
    with lock:
        pass  # the owner still has it
    lock.pass_on(lambda question: None)


def test_an_interruption_at_any_line_leaves_it_usable() -> None:
    """As nerfstudio interrupts: a trace function raises within what runs under the lock."""

    class Interrupted(Exception):
        pass

    for lines in range(1, 40):
        lock, answered = StepLock(), list[str]()

        def work(lock: StepLock = lock, lines: int = lines, answered: list[str] = answered) -> None:
            left = [lines]

            def tracer(frame: Any, event: str, argument: Any) -> Any:
                if event == "line":
                    left[0] -= 1
                    if left[0] == 0:
                        raise Interrupted
                return tracer

            try:
                with lock:
                    sys.settrace(tracer)
                    try:
                        answered.append(lock.ask("image"))
                    finally:
                        sys.settrace(None)
            except Interrupted:
                answered.append("interrupted")

        thread = _thread(work)
        lock.wait_until_wanted(5)
        lock.pass_on(lambda question: question)
        thread.join(5)
        assert not thread.is_alive() and answered, lines
        assert not lock.wanted and lock._borrower is None
    assert answered == ["image"], "so many lines are not run"
