"""The operators as they are called: checks, gradients, fake kernels, and those composed of others."""
