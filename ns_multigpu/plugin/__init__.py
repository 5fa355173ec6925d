"""The nerfstudio side: trainer, pipeline, datamanager, model, launcher. A room is a folder, and imports point down."""

from ns_multigpu.plugin._moved import know_old_names

know_old_names()
