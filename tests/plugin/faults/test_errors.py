"""Output for an uncaught error, and for a run that is stopped before it trains."""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

COMMAND = "ns-train splatfacto-batch --load-config '/my runs/config.yml' --load-dir '/my runs/nerfstudio_models'"


def run(program: str, **variables: str) -> tuple[int, str]:
    """Return the exit status of a Python program, and what it wrote to stderr, on a narrow terminal.

    A fork of this process runs it as the interpreter would: new processes would import torch for each.
    """
    with tempfile.TemporaryFile("w+") as written:
        child = os.fork()
        if child == 0:
            code: Any = 1
            try:
                for name in ("RANK", "LOCAL_RANK"):
                    os.environ.pop(name, None)
                os.environ.update({"COLUMNS": "60", **variables})
                os.dup2(written.fileno(), 2)
                sys.stderr, sys.excepthook = os.fdopen(2, "w", closefd=False), sys.__excepthook__
                for signum in (signal.SIGTERM, signal.SIGHUP):
                    signal.signal(signum, signal.SIG_DFL)
                exec(compile(program, "program", "exec"), {"__name__": "__main__"})
                code = 0
            except SystemExit as ended:
                code = ended.code or 0
            except BaseException:
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            finally:
                sys.stderr.flush()
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        written.seek(0)
        return status, written.read()


def uncaught(what: str, before: str = "", **variables: str) -> tuple[int, str]:
    """Return the exit status and output of a process in which Python code raises an error."""
    program = f"from ns_multigpu.plugin.faults import errors\n{before}\nerrors.show_uncaught()\n{what}"
    return run(program, **variables)


@pytest.mark.parametrize(("kind", "title"), [("InputError", "Cannot start"), ("SaveFailed", "The model is not saved")])
def test_a_plain_error_is_its_message(kind: str, title: str) -> None:
    sentence = "The disk [a] is too full for the model of this run, " + "and so it goes " * 6
    status, said = uncaught(f"raise errors.{kind}({sentence!r} + '\\n\\n  ' + {COMMAND!r})")
    lines = said.splitlines()
    assert status == 1 and "Traceback" not in said
    assert title in lines[0]
    assert f"  {COMMAND}" in lines, "a command is one line, to be copied"
    assert max(len(line) for line in lines if COMMAND not in line) <= 60, "sentences are broken at the terminal's width"
    assert " ".join(" ".join(lines[1:-1]).split()).startswith(sentence.strip())


def test_worker_error_shows_the_worker_traceback_only() -> None:
    status, said = uncaught("raise errors.WorkerFailed('Worker 1 failed', 'Traceback of worker 1')")
    assert status == 1 and "Traceback of worker 1" in said and "Traceback (most" not in said
    assert said.index("Traceback of worker 1") < said.index("Worker 1 failed")


def test_other_errors_keep_their_traceback() -> None:
    status, said = uncaught("raise KeyError('a mistake of ours')")
    assert status == 1 and "Traceback (most recent call last)" in said and "KeyError: 'a mistake of ours'" in said


def test_ctrl_c_is_a_line() -> None:
    status, said = uncaught("raise KeyboardInterrupt")
    assert status in (1, 130, -signal.SIGINT) and said == "Stopped by Ctrl-C.\n"


def test_foreign_exception_hook_is_kept() -> None:
    theirs = "import sys; sys.excepthook = lambda kind, error, trace: print('theirs', file=sys.stderr)"
    _, said = uncaught("raise errors.InputError('ours')", theirs)
    assert said == "theirs\n"


def test_a_worker_of_torchruns_leaves_its_traceback_behind(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    place = {"RANK": "5", "LOCAL_RANK": "1", "TORCHELASTIC_ERROR_FILE": str(file)}
    status, said = uncaught("raise errors.InputError('Give a number.\\nOr two.')", **place)
    assert (status, said) == (1, "rank 5: Give a number.\n")
    left = json.loads(file.read_text())["message"]
    assert left["message"].startswith("InputError: Give a number.")
    assert "Traceback (most recent call last)" in left["extraInfo"]["py_callstack"]


STOPPED = """
import os, signal, sys
from ns_multigpu.plugin.faults.signals import stop_before_training
{before}
stop_before_training()
os.kill(os.getpid(), signal.{how})
print("went on", file=sys.stderr)
"""


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_before_training_a_signal_is_a_line(how: str) -> None:
    begin = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    status, said = run(STOPPED.format(before=begin, how=how))
    assert status == 128 + getattr(signal, how)
    assert said == f"Stopped by {how} before training began: nothing was saved.\n"


def test_before_training_one_rank_speaks() -> None:
    assert run(STOPPED.format(before="", how="SIGTERM"), RANK="1") == (128 + signal.SIGTERM, "")


def test_ignored_signals_remain_ignored() -> None:
    """As nohup asks for."""
    before = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    assert run(STOPPED.format(before=before, how="SIGHUP")) == (0, "went on\n")


def test_foreign_signal_handler_is_kept() -> None:
    before = "signal.signal(signal.SIGTERM, lambda *_: sys.stderr.write('theirs, '))"
    assert run(STOPPED.format(before=before, how="SIGTERM")) == (0, "theirs, went on\n")
