"""Defines the operators: torch.ops.ns_multigpu.* exist from here on, with or without a compiler."""

from torch.library import Library

from cuda_ext.dispatch.schema import SCHEMAS

NAMESPACE = "ns_multigpu"

# Kept for the life of the process: the definitions go when this object goes.
LIBRARY = Library(NAMESPACE, "DEF")
for _schema in SCHEMAS:
    LIBRARY.define(_schema)
