"""Convex cells of space, drawn one by one and composited front to back: the parts of the strategy `pixel`.

See Splaxel (Jia et al., sections 4.2 to 4.4 and appendix 8.1). `tree` cuts space, and `seen` finds what a view shows of
a cell. `placing` assigns points to their cells' ranks. `sharing` assigns drawing and pixels to ranks.
"""
