"""Results of a benchmark: the file with where they were measured, and tables for the terminal."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.lib.environment import describe


def write_report(path: Path | None, **figures: Any) -> None:
    """Write figures with `describe()`; nothing without a path. A reader never sees half of the file."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps({**describe(), **figures}, indent=1, default=str) + "\n", encoding="utf8")
        unfinished.replace(path)


def empty_table(title: str | None, heads: Sequence[str], left: Sequence[int] = (0,)) -> Table:
    """Return a table without rows, whose columns are right-justified but for those numbered in `left`."""
    made = Table(title=title, title_justify="left")
    for k, head in enumerate(heads):
        made.add_column(head, justify="left" if k in left else "right")
    return made
