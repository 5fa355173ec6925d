"""Procedural city: any amount of training data without download.

    city = City(blocks=4, seed=0)
    capture = CityCapture(city, kind="aerial", views=200, width=960, height=540)
    rgb, depth = capture.render(0)
    points = capture.seed_points()

The world is in metres, x east, y north, z up, its origin in the middle of the city. `capture.c2w` holds camera-to-world
matrices with OpenGL axes (nerfstudio's), `capture.viewmats()` world-to-camera ones with OpenCV axes (COLMAP's).
"""

from ns_multigpu.city.capture import CityCapture
from ns_multigpu.city.city import City
from ns_multigpu.city.colmap_writer import write_colmap
from ns_multigpu.city.dnerf_writer import write_dnerf
from ns_multigpu.city.render import Pinhole, render_depth, render_rgb
from ns_multigpu.city.seed_points import SeedPoints

__all__ = ["City", "CityCapture", "Pinhole", "SeedPoints", "render_depth", "render_rgb", "write_colmap", "write_dnerf"]
