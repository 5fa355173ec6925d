"""What looking at a model costs: frames a second, and a viewer's latency."""
