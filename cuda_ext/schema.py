"""The one schema of the native operators.

Every implementation (C++ on CPU, gsplat or our own kernels on CUDA) registers against these strings, so the operators
also exist, with fake kernels and autograd, on a machine that has no compiler. Shapes and units are in the public
wrappers of `cuda_ext.projection`, `cuda_ext.rasterization` and `cuda_ext.loss`.
"""

_PROJECT_INPUTS = (
    "Tensor means, Tensor quats, Tensor scales, Tensor opacities, Tensor viewmats, Tensor Ks, int[] sizes, "
    "Tensor view_ids, Tensor point_ids, float eps2d, float near, float far, bool antialiased"
)
_SH_INPUTS = (
    "int degree, Tensor means, Tensor camera_centers, Tensor sh_dc, Tensor sh_rest, Tensor view_ids, Tensor point_ids"
)
_RASTERIZE_INPUTS = (
    "Tensor means2d, Tensor conics, Tensor row_opacities, Tensor features, Tensor tile_offsets, Tensor row_ids, "
    "int[] patches, int tile_size"
)

SCHEMAS: tuple[str, ...] = (
    "cull(Tensor means, Tensor scales, Tensor opacities, Tensor viewmats, Tensor Ks, int[] sizes, int[] rects, "
    "float eps2d, float near, float far) -> (Tensor view_ids, Tensor point_ids)",
    f"project({_PROJECT_INPUTS}) -> (Tensor means2d, Tensor conics, Tensor depths, Tensor row_opacities, Tensor radii)",
    f"project_backward({_PROJECT_INPUTS}, Tensor conics, Tensor radii, Tensor v_means2d, Tensor v_conics, "
    "Tensor v_depths, Tensor v_row_opacities) -> "
    "(Tensor v_means, Tensor v_quats, Tensor v_scales, Tensor v_opacities, Tensor v_viewmats)",
    f"sh_colors({_SH_INPUTS}) -> Tensor colors",
    f"sh_colors_backward({_SH_INPUTS}, Tensor colors, Tensor v_colors) -> "
    "(Tensor v_means, Tensor v_camera_centers, Tensor v_sh_dc, Tensor v_sh_rest)",
    "intersect(Tensor means2d, Tensor conics, Tensor row_opacities, Tensor radii, Tensor depths, Tensor view_ids, "
    "int[] patches, int tile_size) -> (Tensor tile_offsets, Tensor row_ids)",
    f"rasterize({_RASTERIZE_INPUTS}, Tensor? absgrad_probe) -> (Tensor out, Tensor alpha, Tensor last)",
    f"rasterize_backward({_RASTERIZE_INPUTS}, Tensor alpha, Tensor last, Tensor v_out, Tensor v_alpha, bool absgrad)"
    " -> (Tensor v_means2d, Tensor v_conics, Tensor v_row_opacities, Tensor v_features, Tensor v_means2d_abs)",
    "l1_ssim(Tensor pred, Tensor target, int[] inner) -> (Tensor l1_sum, Tensor ssim_sum, Tensor dssim_dpred)",
)
