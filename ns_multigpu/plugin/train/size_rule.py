"""Says at the start where splatfacto's pruning by size would take much of the model.

From its first reset of opacities on (image 3,000) splatfacto prunes what is larger than `cull-scale-thresh`. The unit
follows from where cameras stand. If they stand close together, as on one rig, a street is fifty units wide, and three
quarters of what shows it are larger: they go at once, and pictures do not recover (docs/moving-scenes.md). Where
cameras stand all around a scene hardly any are.
"""

from typing import Any

import torch
from nerfstudio.utils.rich_utils import CONSOLE
from rich.text import Text

from ns_multigpu.core.collectives import all_gather_ints
from ns_multigpu.core.world import World

MANY = 0.1
"""The part of the model from which on it is said. Of seed points on a phone's captures 1 in 7,000 is so large."""


@torch.no_grad()
def warn_of_size_rule(model: Any, world: World, images: int) -> None:
    """Prints, on rank 0, how much of the model the rule would take, if it is much. Every rank calls it.

    Args:
        model: a `SplatModel`. images: how many the run sees in all.
    """
    rules = model.densifier
    limit = getattr(rules, "prune_scale3d", None)  # MCMC prunes nothing by size
    if limit is None or min(images, rules.refine_stop_iter) <= rules.reset_every:
        return
    sizes = rules.halves.sizes(model.gauss_params)
    large = int((sizes > limit * model.densifier_state["scene_scale"]).sum())
    table = all_gather_ints([large, len(sizes)], world)
    part = sum(row[0] for row in table) / max(sum(row[1] for row in table), 1)
    if world.is_main and part > MANY:
        CONSOLE.print(Text(described(part, limit, rules.reset_every), "bold yellow"))


def described(part: float, limit: float, begins: int) -> str:
    """The warning.

    Args:
        part: of the model that is larger than `limit`. begins: images after which it is pruned.
    """
    return (
        f"{100 * part:.0f} % of the Gaussians are larger than --pipeline.model.cull-scale-thresh {limit:g}, and will "
        f"be pruned after image {begins:,}: quality may collapse there. The cameras stand close together beside "
        "what they see. Give --pipeline.model.cull-scale-thresh inf, or use --recipe best, which never prunes by size."
    )
