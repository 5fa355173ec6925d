"""One model on several ranks: time, memory and how evenly work is spread."""
