"""The capture: its views and images, the ranks that hold them, and the checks before training."""

import warnings

# nerfstudio's cameras index tensors by lists, in many lines that make rays. torch warns of each.
warnings.filterwarnings("ignore", "Using a non-tuple sequence", UserWarning, "nerfstudio")
