// Colours of a view's rectangle, mapped by its bilateral grid (cuda_ext/ops/loss/bilateral_map.py).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nsmg {

struct BilateralGrid {
  const float* values;  // [12, levels, rows, columns]
  int levels, rows, columns;
};

// A rectangle of a view, and where its first pixel is in the view.
struct MappedColors {
  const float* rgb;  // [height, width, 3]
  int height, width;
  int x0, y0, view_width, view_height;
};

cudaError_t bilateral_map_launch(const BilateralGrid& grid, const MappedColors& colors, float* out, cudaStream_t stream);

// v_grid is added to; v_rgb is written.
cudaError_t bilateral_map_backward_launch(const BilateralGrid& grid, const MappedColors& colors, const float* v_out,
                                          float* v_grid, float* v_rgb, cudaStream_t stream);

// The gradient of the weighted sum over axes of mean squares of differences; grids [views, 12, levels, rows, columns].
cudaError_t bilateral_variation_backward_launch(const float* grids, int views, int levels, int rows, int columns,
                                                float weight, float* v_grids, cudaStream_t stream);

}  // namespace nsmg
