// What bind/step_bind.cpp does for the gradient, for pointers.
#include "cuda/radiance/encode_grid.h"

extern "C" void encode_grid_backward(const nsmg::HashGrid* grid, const float* positions, int64_t count,
                                     const float* v_features, float* v_positions, float* v_table) {
  nsmg::encode_grid_backward_launch(*grid, positions, count, v_features, v_positions, v_table, nullptr);
}
