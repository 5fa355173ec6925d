"""Support for plain `ns-render spiral`.

The command accepts only three of nerfstudio's datamanagers, and no full-image datamanager. It needs the first camera
alone.
"""

import sys
from typing import Any

from nerfstudio.data.datamanagers.base_datamanager import VanillaDataManager


def let_spirals_begin(kind: type) -> None:
    """Let the running command `ns-render` accept datamanagers of this type. Their `eval_dataloader` gives the first
    camera.
    """
    for name in ("nerfstudio.scripts.render", "__main__"):
        script: Any = sys.modules.get(name)
        if hasattr(script, "SpiralRender") and getattr(script, "VanillaDataManager", None) is VanillaDataManager:
            script.VanillaDataManager = (VanillaDataManager, kind)
