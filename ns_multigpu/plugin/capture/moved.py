"""A capture that lies elsewhere than when its run was trained: on another machine, or moved."""

import os
from pathlib import Path
from typing import Any

from ns_multigpu.plugin.faults.errors import InputError

DATA = "NS_MULTIGPU_DATA"
"""In the environment, where the capture of a run is that is looked at."""


def look_where_it_is(config: Any) -> None:
    """Has a datamanager look where the user says that the capture is.

    Args:
        config: the datamanager's; its `data` is set.

    Raises:
        InputError: there is nothing there, or nothing where it was, and the user did not say.
    """
    told = os.environ.get(DATA)
    if told:
        config.data = Path(told)
    data: Path | None = config.data or getattr(config.dataparser, "data", None)
    if data is None or data == Path() or data.exists():  # some are computed, and have no folder
        return
    if told:
        raise InputError(f"{DATA}={told}: there is no such folder. Give the one that the capture is in now.")
    raise InputError(
        f"The capture of this run is not at {data}, where it was when it was trained. Say where it is now: "
        f"{DATA}=FOLDER in front of the command, or `ns-multigpu eval` and `render` with --data FOLDER."
    )
