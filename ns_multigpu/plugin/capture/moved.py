"""Override of a run's data path, for a capture that was moved or is on another machine."""

import os
from pathlib import Path
from typing import Any

from ns_multigpu.plugin.faults.errors import InputError

DATA = "NS_MULTIGPU_DATA"
"""Environment variable with the current path of the capture of an opened run."""


def look_where_it_is(config: Any) -> None:
    """Set a datamanager's data path to the environment variable's, if it is set.

    Args:
        config: the datamanager's; its `data` is set.

    Raises:
        InputError: the given path does not exist, or none is given and the original path does not exist.
    """
    folder = os.environ.get(DATA)
    if folder:
        config.data = Path(folder)
    data: Path | None = config.data or getattr(config.dataparser, "data", None)
    if data is None or data == Path() or data.exists():  # computed captures have no folder
        return
    if folder:
        raise InputError(f"{DATA}={folder}: there is no such folder. Give the one that the capture is in now.")
    raise InputError(
        f"The capture of this run is not at {data}, where it was when it was trained. Say where it is now: "
        f"{DATA}=FOLDER in front of the command, or `ns-multigpu eval` and `render` with --data FOLDER."
    )
