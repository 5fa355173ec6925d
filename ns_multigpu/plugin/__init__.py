"""The nerfstudio side: with `ns_multigpu.methods`, the only place that imports nerfstudio."""
