"""The nerfstudio side: trainer, pipeline, datamanager, model, launcher. Of its folders, each imports
only those below it (see the import contract in pyproject.toml)."""
