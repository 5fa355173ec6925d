"""What a run will need: memory and time by arithmetic, without a GPU."""
