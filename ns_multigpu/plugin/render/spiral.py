"""Plain `ns-render spiral` on our runs.

It asks for one of three datamanagers of nerfstudio's own, of which a full-image datamanager, Splatfacto's too, is none;
all that it needs of it is a camera to begin with.
"""

import sys
from typing import Any

from nerfstudio.data.datamanagers.base_datamanager import VanillaDataManager


def let_spirals_begin(kind: type) -> None:
    """Where the command `ns-render` is running: has it take datamanagers of this kind, too. They give it the camera
    to begin with as their `eval_dataloader`."""
    for name in ("nerfstudio.scripts.render", "__main__"):
        script: Any = sys.modules.get(name)
        if hasattr(script, "SpiralRender") and getattr(script, "VanillaDataManager", None) is VanillaDataManager:
            script.VanillaDataManager = (VanillaDataManager, kind)
