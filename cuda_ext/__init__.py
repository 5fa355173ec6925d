"""The native operators of ns_multigpu: from points to splats, tiles, pixels and loss, forward and backward.

Every operator has one schema (`torch.ops.ns_multigpu.*`), a C++ twin for CPU and CUDA kernels, both compiled on first
use, and a pure-torch reference. Nothing is compiled at import; see `cuda_ext.dispatch.load`.
"""

from cuda_ext.build.native import NativeBuildError
from cuda_ext.dispatch.load import backend, build_native, compiler_problem, reference_forced, use_reference
from cuda_ext.ops.common.clock import add_clock
from cuda_ext.ops.common.input_lines import keep_line, show_patches, take_lines
from cuda_ext.ops.densify.noise import add_noise
from cuda_ext.ops.densify.relocation import copy_rows, draw_sources, share_out, take_rows, turn
from cuda_ext.ops.exchange.cells import cell_windows, cells_reached
from cuda_ext.ops.exchange.fragments import (
    composite_fragments,
    composite_fragments_backward,
    gather_fragments,
    live_boxes,
    scatter_fragments,
)
from cuda_ext.ops.exchange.put_rows import put_rows
from cuda_ext.ops.exchange.row_exchange import pack, route_lines, unpack
from cuda_ext.ops.exchange.row_footprint import footprint_counts
from cuda_ext.ops.exchange.row_layout import ReceivedRows
from cuda_ext.ops.loss.band_loss import Band, band_loss_into
from cuda_ext.ops.loss.loss import l1_ssim
from cuda_ext.ops.optim.adam import AdamStep, FusedAdam, adam_step, fused_step
from cuda_ext.ops.optim.fused import SplatRows, splat_forward, splat_update
from cuda_ext.ops.optim.lazy_adam import LazyAdam, lazy_serves, splat_flush
from cuda_ext.ops.optim.step_control import step_gate, step_message
from cuda_ext.ops.project.boxes import box_views, new_boxes, splat_boxes
from cuda_ext.ops.project.conditioning import Moment, condition, project_axes
from cuda_ext.ops.project.culling import cull
from cuda_ext.ops.project.projection import Projection, project, sh_colors
from cuda_ext.ops.project.series import series
from cuda_ext.ops.radiance.encode_grid import encode_grid
from cuda_ext.ops.raster.compositing import composite
from cuda_ext.ops.raster.list_windows import clip_lists
from cuda_ext.ops.raster.rasterization import intersect, intersect_capacity, rasterize
from cuda_ext.ops.sort.peer_sort import band_lists, intersect_keys, merge_level, publish_count, sort_pairs

__all__ = [
    "AdamStep",
    "Band",
    "FusedAdam",
    "LazyAdam",
    "Moment",
    "NativeBuildError",
    "Projection",
    "ReceivedRows",
    "SplatRows",
    "adam_step",
    "add_clock",
    "add_noise",
    "backend",
    "band_lists",
    "band_loss_into",
    "box_views",
    "build_native",
    "cell_windows",
    "cells_reached",
    "clip_lists",
    "compiler_problem",
    "composite",
    "composite_fragments",
    "composite_fragments_backward",
    "condition",
    "copy_rows",
    "cull",
    "draw_sources",
    "encode_grid",
    "footprint_counts",
    "fused_step",
    "gather_fragments",
    "intersect",
    "intersect_capacity",
    "intersect_keys",
    "keep_line",
    "l1_ssim",
    "lazy_serves",
    "live_boxes",
    "merge_level",
    "new_boxes",
    "pack",
    "project",
    "project_axes",
    "publish_count",
    "put_rows",
    "rasterize",
    "reference_forced",
    "route_lines",
    "scatter_fragments",
    "series",
    "sh_colors",
    "share_out",
    "show_patches",
    "sort_pairs",
    "splat_boxes",
    "splat_flush",
    "splat_forward",
    "splat_update",
    "step_gate",
    "step_message",
    "take_lines",
    "take_rows",
    "turn",
    "unpack",
    "use_reference",
]
