"""The pure-torch reference of every operator: plain differentiable torch, any device and float dtype, no hand-written
gradient. Tests hold the native operators to it, and it serves where there is no compiler."""
