// Features of positions in a multiresolution hash grid (Instant-NGP, section 3), and the gradients.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace nsmg {

// A grid of `levels` tables of 2^log2_size rows of `width` numbers, one behind the other; scalings [levels].
struct HashGrid {
  const float* table;
  const float* scalings;
  int levels, width, log2_size;
};

// positions [count, 3]; features [count, levels * width]. The width is 1, 2, 4 or 8.
cudaError_t encode_grid_launch(const HashGrid& grid, const float* positions, int64_t count, float* features,
                               cudaStream_t stream);

// Adds to v_table (of the table's shape) and v_positions [count, 3]; the latter may be null.
cudaError_t encode_grid_backward_launch(const HashGrid& grid, const float* positions, int64_t count,
                                        const float* v_features, float* v_positions, float* v_table,
                                        cudaStream_t stream);

}  // namespace nsmg
