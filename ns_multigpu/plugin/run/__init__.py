"""The run shell: one trainer, pipeline and configuration for whatever a run trains."""
