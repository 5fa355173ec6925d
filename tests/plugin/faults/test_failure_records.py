"""Failure records that a worker writes and the launcher prints."""

from pathlib import Path
from typing import Any

import pytest

from ns_multigpu.plugin.launch import launcher


def test_a_worker_that_is_ended_while_it_writes_leaves_no_half_of_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended(BaseException):
        pass

    def ended(self: Path, text: str, *_: Any, **__: Any) -> int:
        with self.open("w", encoding="utf8") as file:
            file.write(text[: len(text) // 2])
        raise Ended

    monkeypatch.setattr(Path, "write_text", ended)
    with pytest.raises(Ended):
        launcher._write_record(RuntimeError("no more"), 1, tmp_path)
    assert list(tmp_path.iterdir()) and not list(tmp_path.glob("failure-*.json"))
