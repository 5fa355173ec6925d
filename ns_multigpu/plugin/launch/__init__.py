"""Start of a run's processes, their rendezvous and agreement, and the checks before it."""
