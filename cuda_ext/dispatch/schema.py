"""The one schema of the native operators.

Every implementation (C++ on CPU, our kernels on CUDA) registers against these strings, so the operators
also exist, with fake kernels and autograd, on a machine that has no compiler. Shapes and units are in the public
wrappers in `cuda_ext.ops`.
"""

_PROJECT_INPUTS = (
    "Tensor means, Tensor quats, Tensor scales, Tensor opacities, Tensor viewmats, Tensor Ks, int[] sizes, "
    "Tensor view_ids, Tensor point_ids, float eps2d, float near, float far, bool antialiased"
)
_CONDITION_INPUTS = (
    "Tensor means, Tensor times, Tensor left, Tensor motions, Tensor scales, Tensor opacities, Tensor view_times, "
    "Tensor view_ids, Tensor point_ids"
)
_AXES_INPUTS = (
    "Tensor means, Tensor axes, Tensor opacities, Tensor viewmats, Tensor Ks, int[] sizes, Tensor view_ids, "
    "float eps2d, float near, float far, bool antialiased"
)
_SERIES_INPUTS = "Tensor base, Tensor terms, Tensor weights, Tensor view_ids, Tensor point_ids, int views"
_SH_INPUTS = (
    "int degree, Tensor means, Tensor camera_centers, Tensor sh_dc, Tensor sh_rest, Tensor view_ids, Tensor point_ids"
)
_INTERSECT_INPUTS = (
    "Tensor means2d, Tensor conics, Tensor row_opacities, Tensor radii, Tensor depths, Tensor view_ids, "
    "int[] patches, int tile_size"
)
_RASTERIZE_INPUTS = (
    "Tensor means2d, Tensor conics, Tensor row_opacities, Tensor features, Tensor tile_offsets, Tensor row_ids, "
    "int[] patches, int tile_size"
)
_RASTERIZE_BACKWARD_INPUTS = (
    f"{_RASTERIZE_INPUTS}, Tensor alpha, Tensor last, Tensor state, Tensor out, Tensor v_out, Tensor v_alpha, "
    "bool absgrad"
)
_SPLAT_INPUTS = (
    "Tensor means, Tensor quats, Tensor log_scales, Tensor logits, Tensor sh_dc, Tensor sh_rest, Tensor viewmats, "
    "Tensor Ks, int[] sizes, int degree, float eps2d, float near, float far, bool antialiased, int capacity"
)
_PROJECT_SURFELS_INPUTS = (
    "Tensor means, Tensor quats, Tensor scales, Tensor opacities, Tensor viewmats, Tensor Ks, int[] sizes, "
    "Tensor view_ids, Tensor point_ids, float near, float far"
)
_RASTERIZE_SURFELS_INPUTS = (
    "Tensor means2d, Tensor transforms, Tensor normals, Tensor row_opacities, Tensor colors, Tensor depths, "
    "Tensor tile_offsets, Tensor row_ids, int[] patches, int tile_size"
)
_PROJECT_CONVEXES_INPUTS = (
    "Tensor means, Tensor corners, Tensor deltas, Tensor sigmas, Tensor opacities, Tensor viewmats, Tensor Ks, "
    "int[] sizes, Tensor view_ids, Tensor point_ids, float near, float far"
)
_RASTERIZE_CONVEXES_INPUTS = (
    "Tensor means2d, Tensor lines, Tensor sharpness, Tensor row_opacities, Tensor colors, Tensor depths, "
    "Tensor tile_offsets, Tensor row_ids, int[] patches, int tile_size"
)
_ROWS = "Tensor[] columns, Tensor radii, Tensor view_ids"
_UNPACKED_ROWS = "(Tensor[] columns, Tensor radii, Tensor view_ids, Tensor owners, Tensor slots)"
_SPLAT_OUTPUTS = (
    "(Tensor view_ids, Tensor point_ids, Tensor count, Tensor means2d, Tensor conics, Tensor opacities, "
    "Tensor features, Tensor depths, Tensor radii)"
)

SCHEMAS: tuple[str, ...] = (
    "cull(Tensor means, Tensor scales, Tensor opacities, Tensor viewmats, Tensor Ks, int[] sizes, int[] rects, "
    "float eps2d, float near, float far) -> (Tensor view_ids, Tensor point_ids)",
    f"project({_PROJECT_INPUTS}) -> (Tensor means2d, Tensor conics, Tensor depths, Tensor row_opacities, Tensor radii)",
    f"project_backward({_PROJECT_INPUTS}, Tensor conics, Tensor radii, Tensor v_means2d, Tensor v_conics, "
    "Tensor v_depths, Tensor v_row_opacities) -> "
    "(Tensor v_means, Tensor v_quats, Tensor v_scales, Tensor v_opacities, Tensor v_viewmats)",
    f"condition({_CONDITION_INPUTS}) -> (Tensor row_means, Tensor axes, Tensor row_opacities)",
    f"condition_backward({_CONDITION_INPUTS}, Tensor v_row_means, Tensor v_axes, Tensor v_row_opacities) -> "
    "(Tensor v_means, Tensor v_times, Tensor v_left, Tensor v_motions, Tensor v_scales, Tensor v_opacities)",
    f"project_axes({_AXES_INPUTS}) -> "
    "(Tensor means2d, Tensor conics, Tensor depths, Tensor row_opacities, Tensor radii)",
    f"project_axes_backward({_AXES_INPUTS}, Tensor radii, Tensor v_means2d, Tensor v_conics, Tensor v_depths, "
    "Tensor v_row_opacities) -> (Tensor v_means, Tensor v_axes, Tensor v_opacities, Tensor v_viewmats)",
    f"sh_colors({_SH_INPUTS}) -> Tensor colors",
    f"sh_colors_backward({_SH_INPUTS}, Tensor colors, Tensor v_colors) -> "
    "(Tensor v_means, Tensor v_camera_centers, Tensor v_sh_dc, Tensor v_sh_rest)",
    f"series({_SERIES_INPUTS}) -> Tensor rows",
    f"series_backward({_SERIES_INPUTS}, Tensor v_rows) -> (Tensor v_base, Tensor v_terms, Tensor v_weights)",
    f"intersect({_INTERSECT_INPUTS}) -> (Tensor tile_offsets, Tensor row_ids)",
    f"intersect_capacity({_INTERSECT_INPUTS}, int capacity) -> (Tensor tile_offsets, Tensor row_ids, Tensor count)",
    f"rasterize({_RASTERIZE_INPUTS}, Tensor? absgrad_probe, bool mark_stops=False) -> "
    "(Tensor out, Tensor alpha, Tensor last, Tensor state)",
    f"rasterize_backward({_RASTERIZE_BACKWARD_INPUTS}) -> "
    "(Tensor v_means2d, Tensor v_conics, Tensor v_row_opacities, Tensor v_features, Tensor v_means2d_abs)",
    # Writes through the addresses in `sinks`, which no dispatcher sees.
    f"rasterize_backward_into({_RASTERIZE_BACKWARD_INPUTS}, Tensor sinks, Tensor owners, Tensor slots, "
    "bool system_scope) -> ()",
    f"project_surfels({_PROJECT_SURFELS_INPUTS}) -> (Tensor means2d, Tensor transforms, Tensor normals, "
    "Tensor depths, Tensor row_opacities, Tensor radii)",
    f"project_surfels_backward({_PROJECT_SURFELS_INPUTS}, Tensor radii, Tensor v_means2d, Tensor v_transforms, "
    "Tensor v_normals, Tensor v_depths, Tensor v_row_opacities) -> "
    "(Tensor v_means, Tensor v_quats, Tensor v_scales, Tensor v_opacities, Tensor v_viewmats)",
    f"rasterize_surfels({_RASTERIZE_SURFELS_INPUTS}) -> (Tensor out, Tensor geometry, Tensor alpha, Tensor last, "
    "Tensor state)",
    f"rasterize_surfels_backward({_RASTERIZE_SURFELS_INPUTS}, Tensor out, Tensor geometry, Tensor alpha, "
    "Tensor last, Tensor state, Tensor v_out, Tensor v_geometry, Tensor v_alpha) -> "
    "(Tensor v_means2d, Tensor v_transforms, Tensor v_normals, Tensor v_row_opacities, Tensor v_colors, "
    "Tensor v_depths)",
    f"project_convexes({_PROJECT_CONVEXES_INPUTS}) -> (Tensor means2d, Tensor lines, Tensor sharpness, "
    "Tensor depths, Tensor row_opacities, Tensor radii)",
    f"project_convexes_backward({_PROJECT_CONVEXES_INPUTS}, Tensor radii, Tensor v_means2d, Tensor v_lines, "
    "Tensor v_sharpness, Tensor v_depths, Tensor v_row_opacities) -> "
    "(Tensor v_means, Tensor v_corners, Tensor v_deltas, Tensor v_sigmas, Tensor v_opacities, Tensor v_viewmats)",
    f"rasterize_convexes({_RASTERIZE_CONVEXES_INPUTS}) -> (Tensor out, Tensor depth, Tensor alpha, Tensor last, "
    "Tensor state)",
    f"rasterize_convexes_backward({_RASTERIZE_CONVEXES_INPUTS}, Tensor out, Tensor depth, Tensor alpha, "
    "Tensor last, Tensor state, Tensor v_out, Tensor v_depth, Tensor v_alpha) -> (Tensor v_means2d, Tensor v_lines, "
    "Tensor v_sharpness, Tensor v_row_opacities, Tensor v_colors, Tensor v_depths)",
    "composite(Tensor out, Tensor alpha, Tensor background) -> Tensor rgb",
    "composite_backward(Tensor out, Tensor alpha, Tensor background, Tensor v_rgb) -> (Tensor v_out, Tensor v_alpha)",
    "bilateral_map(Tensor grid, Tensor rgb, int[] place) -> Tensor out",
    "bilateral_map_backward(Tensor grid, Tensor rgb, Tensor v_out, int[] place) -> (Tensor v_grid, Tensor v_rgb)",
    "bilateral_variation_backward(Tensor grids, float weight) -> Tensor v_grids",
    "l1_ssim(Tensor pred, Tensor target, int[] inner) -> (Tensor l1_sum, Tensor ssim_sum, Tensor dssim_dpred)",
    "l1_ssim_backward(Tensor pred, Tensor target, Tensor dssim_dpred, int[] inner, Tensor v_l1, Tensor v_ssim) -> "
    "Tensor v_pred",
    "band_loss_into(Tensor out, Tensor alpha, Tensor[] backgrounds, Tensor[] targets, int[] inners, Tensor[] v_l1, "
    "Tensor[] v_ssim, float[] offsets, float scale, Tensor(a!)[] rgb, Tensor(b!)[] loss, Tensor(c!) v_out, "
    "Tensor(d!) v_alpha, Tensor(e!)? last=None, bool clamp=True) -> ()",
    f"splat_forward({_SPLAT_INPUTS}, *, Tensor? boxes=None) -> {_SPLAT_OUTPUTS}",
    f"splat_forward_lazy({_SPLAT_INPUTS}, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor last, Tensor table, "
    f"Tensor steps, *, Tensor? boxes=None) -> {_SPLAT_OUTPUTS}",
    "splat_update(Tensor(a!)[] params, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor scalars, "
    "Tensor viewmats, Tensor Ks, int[] sizes, Tensor view_ids, Tensor point_ids, Tensor count, Tensor conics, "
    "Tensor features, Tensor radii, Tensor records, Tensor(d!) grad2d, Tensor(e!) seen, Tensor(f!) radii_max, "
    "int degree, float eps2d, float near, float far, bool antialiased, bool absgrad, "
    "bool depth, float opacity_weight, float scale_weight, Tensor(g!)? last=None, Tensor(h!)? table=None, "
    "Tensor(i!)? steps=None, Tensor(j!)? finite_flag=None, int[] finite_flag_views=[], Tensor(k!)? boxes=None, "
    "Tensor(l!)? v_viewmats=None, Tensor? needles=None, float max_ratio=1.0, float whole_step_scale=0.0) -> ()",
    "splat_boxes(Tensor means, Tensor log_scales, Tensor(a!) boxes) -> ()",
    "box_views(Tensor boxes, Tensor viewmats, Tensor Ks, int[] sizes, float eps2d, float near, float far, "
    "Tensor? table, bool compact) -> Tensor shows",
    "splat_flush(Tensor(a!)[] params, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!) last, "
    "Tensor(e!) table, Tensor(f!) steps) -> ()",
    "add_noise(Tensor(a!) means, Tensor quats, Tensor log_scales, Tensor logits, Tensor? rows, int first, int start, "
    "float scale, Tensor? taken, float steepness, float threshold) -> ()",
    "draw_sources(Tensor sums, Tensor empty, Tensor slots, int start, Tensor? taken) -> "
    "(Tensor sources, Tensor copies)",
    "share_out(Tensor(a!) means, Tensor quats, Tensor(b!) log_scales, Tensor(c!) logits, Tensor copies, "
    "Tensor? sources, Tensor? numbers, float min_opacity, Tensor(d!)[] cleared) -> ()",
    "copy_rows(Tensor(a!)[] tensors, Tensor sources) -> ()",
    "take_rows(Tensor[] tensors, Tensor index) -> Tensor[]",
    "turn(Tensor quats, Tensor vectors) -> Tensor",
    "adam_step(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
    "Tensor scalars, bool set_grads_to_zero) -> ()",
    # The addresses in `destinations` and `sources`, too, no dispatcher sees.
    "route_lines(Tensor view_ids, Tensor count, Tensor means2d, Tensor radii, int[] patches, int ranks, "
    "Tensor(a!) place, Tensor(b!) counts, Tensor? in_cells=None, int[] cells=[]) -> ()",
    "cell_windows(Tensor viewmats, Tensor Ks, int[] axes, float[] planes, int[] paths, int[] order, int[] upward, "
    "int[] drawn, int[] patches) -> Tensor windows",
    "cells_reached(Tensor view_ids, Tensor means2d, Tensor radii, Tensor depths, Tensor viewmats, Tensor Ks, "
    "float[] boxes) -> Tensor in_cells",
    "clip_lists(Tensor tile_offsets, Tensor row_ids, Tensor depths, Tensor windows) -> "
    "(Tensor tile_offsets, Tensor row_ids)",
    "footprint_counts(Tensor view_ids, Tensor count, Tensor means2d, Tensor radii, int[] patches) -> Tensor counts",
    f"pack({_ROWS}, Tensor place, Tensor destinations, int capacity) -> ()",
    f"unpack(Tensor records, Tensor counts, int views, int[] widths) -> {_UNPACKED_ROWS}",
    "add_records(Tensor records, Tensor sinks, Tensor owners, Tensor slots, bool system_scope) -> ()",
    "add_clock(Tensor(a!) total, int sign) -> ()",
    "take_lines(Tensor[] tables, Tensor at, Tensor(a!)[] into) -> ()",
    "keep_line(Tensor line, Tensor(a!) table, Tensor(b!) at) -> ()",
    "show_patches(Tensor images, Tensor chosen, int[] patches, Tensor(a!) pictures) -> ()",
    "put_rows(Tensor[] arrays, int[] taken, Tensor count, Tensor destinations, Tensor? gate=None, "
    "int gate_column=0, int offset=0) -> ()",
    # Segments of one buffer, by rank.
    f"pack_wire({_ROWS}, Tensor place, Tensor(a!) wire, int[] starts, int[] capacities, int rank, bool half, "
    "bool slots) -> ()",
    "unpack_wire(Tensor wire, int[] starts, int[] capacities, Tensor counts, int rank, bool half, bool slots, "
    f"int views, int[] widths) -> {_UNPACKED_ROWS}",
    f"keep_rows({_ROWS}, Tensor place, Tensor(a!)[] to_columns, Tensor(b!) to_radii, Tensor(c!) to_view_ids, "
    "Tensor(d!) to_slots, int start, int capacity, bool slots) -> ()",
    "pack_gradients(Tensor records, Tensor counts, Tensor(a!) wire, int[] starts, int[] capacities, int rank, "
    "bool half, int[] returned) -> ()",
    "collect_wire(Tensor place, Tensor count, Tensor wire, int[] starts, int[] capacities, Tensor own, int rank, "
    "bool half, int[] returned) -> Tensor records",
    # Addresses in these are of buffers of all ranks, by rank; no dispatcher sees what is read and written there.
    "sort_pairs(Tensor(a!) keys, Tensor values, Tensor count, int begin_bit, int end_bit, Tensor(b!) out_keys, "
    "Tensor(c!) out_values) -> ()",
    "publish_count(Tensor count, int[] addresses, int limit) -> ()",
    "merge_level(int[] keys_at, int[] values_at, Tensor counts, int first, int middle, int end, int rank, "
    "Tensor(a!) out_keys, Tensor(b!) out_values) -> Tensor count",
    "intersect_keys(Tensor means2d, Tensor conics, Tensor row_opacities, Tensor radii, Tensor depths, "
    "Tensor view_ids, int[] sizes, int tile_size, int owner, int capacity) -> "
    "(Tensor keys, Tensor values, Tensor count)",
    "band_lists(int[] keys_at, int[] values_at, Tensor counts, int[] bands, Tensor where, int segment, "
    "int capacity) -> (Tensor tile_offsets, Tensor row_ids, Tensor count)",
    "correct_views(Tensor viewmats, Tensor corrections, Tensor indices, bool se3, Tensor(a!) out) -> ()",
    "correction_gradients(Tensor viewmats, Tensor corrections, Tensor indices, bool se3, Tensor v_viewmats, "
    "float shift_penalty, float turn_penalty) -> Tensor gradients",
    "step_message(Tensor own_rows, Tensor segment_counts, Tensor segment_capacity, Tensor(a!) segment_most, "
    "Tensor met, Tensor tile_offsets, int[] bands, int rank, int lines) -> Tensor message",
    "step_gate(Tensor[] counts, Tensor limits, Tensor(a!) status, Tensor scalars, Tensor still, Tensor row_counts, "
    "Tensor? lazy_steps, int most_steps, Tensor? sent, Tensor? work, Tensor(b!)? totals) -> "
    "(Tensor gated_scalars, Tensor gated_counts)",
    "gather_fragments(Tensor color, Tensor alpha, int[] fragments, Tensor(a!) out) -> ()",
    "scatter_fragments(Tensor gradients, int[] fragments, Tensor(a!) v_color, Tensor(b!) v_alpha) -> ()",
    "composite_fragments(Tensor received, int[] layers, int[] sizes) -> (Tensor out, Tensor alpha, Tensor before)",
    "composite_fragments_backward(Tensor received, Tensor before, Tensor v_out, Tensor v_alpha, int[] layers, "
    "int[] sizes, int count) -> Tensor gradients",
    "encode_grid(Tensor positions, Tensor table, Tensor scalings, int log2_size) -> Tensor features",
    "encode_grid_backward(Tensor positions, Tensor table, Tensor scalings, int log2_size, Tensor v_features, "
    "bool moves) -> (Tensor by_positions, Tensor v_table)",
    "live_boxes(Tensor before, int[] fragments, int slots, float least) -> Tensor boxes",
    # On the host alone: a batch is planned while the device works.
    "assign_patches(Tensor counts, Tensor totals, Tensor sent, float alpha, float beta, float gamma, "
    "float delta, int power, int most_swaps, float seconds) -> (Tensor ranks, Tensor summary)",
    # On the host alone: one rank counts for all.
    "patch_counts(Tensor points, int size, Tensor boxes, Tensor labels, int num_labels, Tensor viewmats, "
    "Tensor lenses, Tensor columns, Tensor rows, Tensor halos, float near, float far) -> Tensor counts",
)

HOST_ONLY = ("assign_patches", "patch_counts")
"""Operators that have no CUDA twin: they plan."""
