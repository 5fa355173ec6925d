// What moves points from invisible places: draws, rows copied on the spot, and parts side by side; rows of many arrays
// taken at once, and vectors turned. On the given stream, without a wait, and without a look at what is on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace nsmg {

inline constexpr int kMostRowArrays = 48;
inline constexpr int kMostCopies = 51;  // a point that is to become more is treated as if it became so many

// Arrays of one length, of `words` units of `unit` (1, 2 or 4) bytes a row.
struct RowArrays {
  void* rows[kMostRowArrays];
  int words[kMostRowArrays], unit[kMostRowArrays];
  int count;
};

// sums [N]: running sums of what points are drawn by. empty [N]: points that are to move; slots [N]: their running
// count. start: of the table of random numbers. taken: null, or [] on the device: nothing moves where it is false.
struct DrawInputs {
  const int64_t *sums, *slots;
  const bool *empty, *taken;
  uint64_t start;
  int points;
};

// sources [N]: whose copy each point becomes, -1 for none. copies [N], zeros: how often each is drawn.
cudaError_t draw_sources_launch(const DrawInputs& in, int32_t* sources, int32_t* copies, cudaStream_t stream);

// copies [N]: how many each point gets. sources, numbers [N], or null: whose copy each point is, -1 for none, and which
// of its copies, from 1. Rows of points that get copies are made zero in `cleared`.
struct ShareInputs {
  const float* quats;  // [N, 4]
  const int32_t *copies, *sources, *numbers;
  float min_opacity;
  int points;
};

// means, log_scales [N, 3] and logits [N] of all parts: see the reference.
cudaError_t share_out_launch(const ShareInputs& in, float* means, float* log_scales, float* logits,
                             const RowArrays& cleared, cudaStream_t stream);

// Row i of each array becomes row sources[i], where there is one. No row may be both source and destination.
cudaError_t copy_rows_launch(const RowArrays& arrays, const int32_t* sources, int points, cudaStream_t stream);

// Row i of each array of `to` is row index[i] of the one in its place. The arrays are alike but for their rows.
cudaError_t take_rows_launch(const RowArrays& arrays, const RowArrays& to, const int64_t* index, int points,
                             cudaStream_t stream);

// turned [sets, points, 3]: vectors, alike, by the rotations of quats [points, 4] (aligned to 16 bytes).
cudaError_t turn_launch(const float* quats, const float* vectors, int points, int64_t sets, float* turned,
                        cudaStream_t stream);

}  // namespace nsmg
