"""Cost of rendering a model: frames per second, and a viewer's latency."""
