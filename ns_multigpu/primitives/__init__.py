"""The kinds of points, one file each."""
