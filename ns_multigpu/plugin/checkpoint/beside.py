"""What lies beside a .ckpt is found by the folder that nerfstudio loads it from."""

from pathlib import Path


class BesideCheckpoints:
    """Of a pipeline's configuration, which is all that nerfstudio's commands hand on: where .ckpt files lie."""

    # No field: it is no option, and nothing that ranks have to be started alike with.

    @property
    def checkpoints(self) -> Path | None:
        """The folder of the .ckpt that is about to be loaded, beside which the rest of the model lies."""
        return vars(self).get("_checkpoints")

    @checkpoints.setter
    def checkpoints(self, folder: Path | None) -> None:
        vars(self)["_checkpoints"] = folder
