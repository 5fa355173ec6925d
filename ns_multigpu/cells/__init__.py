"""Convex cells of space, drawn one by one and composited front to back: what the strategy `pixel` is made of.

After Splaxel (Jia et al., sections 4.2 to 4.4 and appendix 8.1): `tree` cuts space, `seen` says what a view sees of a
cell, `placing` puts points where their cells are, `sharing` says who draws what and who owns which pixels.
"""
