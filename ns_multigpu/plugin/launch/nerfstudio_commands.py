"""nerfstudio's command that runs in this process: its options are found on the call stack.

Its commands create the pipeline before they do anything else, and give it none of their options.
"""

import sys
from pathlib import Path
from types import FrameType
from typing import Any


def running_command(script: str) -> tuple[Any, Any] | None:
    """Return the command's object and the run's loaded config, while the command creates the pipeline.

    Args:
        script: name of the command's file in `nerfstudio/scripts`, such as "exporter.py".

    Returns:
        None if another command or another program creates the pipeline.
    """
    frame: FrameType | None = sys._getframe()
    config: Any = None
    while frame is not None:
        name, caller = frame.f_code.co_name, frame.f_back
        if name == "eval_setup":
            config = frame.f_locals.get("config")
        if name == "main" and _is_in(script, frame) and caller is not None and _is_in(script, caller):
            return (frame.f_locals.get("self"), config) if caller.f_code.co_name == "entrypoint" else None
        frame = caller
    return None


def _is_in(script: str, frame: FrameType) -> bool:
    return Path(frame.f_code.co_filename).parts[-3:] == ("nerfstudio", "scripts", script)
