"""One folder a kind of point. Beside them what all kinds share: the order of a model's points, and steady formulas."""
