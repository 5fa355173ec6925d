"""Splatfacto's model and its options; optimizers and learning rates of batches."""
