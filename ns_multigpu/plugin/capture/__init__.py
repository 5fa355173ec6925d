"""The capture: its views and images, who holds them, and what may be wrong with them."""
