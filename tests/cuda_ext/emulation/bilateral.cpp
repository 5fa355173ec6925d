// What loss_bind.cpp does for bilateral grids, for pointers.
#include "cuda/loss/bilateral_map.h"

using namespace nsmg;

extern "C" {

void bilateral_map(const BilateralGrid* grid, const MappedColors* colors, float* out) {
  bilateral_map_launch(*grid, *colors, out, nullptr);
}

void bilateral_map_backward(const BilateralGrid* grid, const MappedColors* colors, const float* v_out, float* v_grid,
                            float* v_rgb) {
  bilateral_map_backward_launch(*grid, *colors, v_out, v_grid, v_rgb, nullptr);
}

void bilateral_variation_backward(const float* grids, const int* shape, float weight, float* v_grids) {
  bilateral_variation_backward_launch(grids, shape[0], shape[1], shape[2], shape[3], weight, v_grids, nullptr);
}
}
