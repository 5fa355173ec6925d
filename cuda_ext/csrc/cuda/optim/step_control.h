// Step statistics that a rank publishes at the end of a step (message), and whether the step is taken (gate): one
// launch each, on the given stream, that waits for nothing and takes its sizes from the arguments alone. See
// cuda_ext/step_control.py.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace nsmg {

inline constexpr int kMessageHead = 4;  // numbers before the rows of tiles
inline constexpr int kMostLimits = 4;   // a warp each in the gate's block

// `count` rows of `columns` tiles that this rank owns: lines of the message, and the first tile among its offsets.
struct MessageBand {
  int32_t line, tile, count, columns;
};

struct MessageCounts {
  const int64_t* own_rows;  // [1]
  const int64_t* segments;  // [ranks]
  const int64_t* capacity;      // [ranks], of each segment
  int64_t* most;            // [ranks], raised
  const int64_t* met;       // [1]
  int rank, ranks;
};

// message [kMessageHead + lines] in device memory. Bands are copied by value, so the host's may go at once.
cudaError_t message_launch(const MessageCounts& counts, const int32_t* tile_offsets, const MessageBand* host_bands,
                           int band_count, int lines, int64_t* message, cudaStream_t stream);

// Numbers `stride` apart.
struct Column {
  const int64_t* first;
  int64_t stride;
};

struct GateLaunch {
  Column counts[kMostLimits];  // [ranks] each
  int num_limits, ranks;
  const int64_t* limits;      // [kinds]
  int64_t* status;            // [kinds + 2], or one more if there is `sent`
  const int32_t* lazy_steps;  // null: no steps are deferred
  int most_steps;
  const int64_t* sent;  // [1], or null
  const float *scalars, *still;
  int scalar_count;
  Column row_counts;  // [segments]
  int segments;
  const int64_t* work;  // [ranks, lines], rows work_stride apart
  int64_t work_stride;
  int lines;        // 0: no totals
  int64_t* totals;  // [lines]
  float* gated_scalars;
  int64_t* gated_counts;
};

cudaError_t gate_launch(const GateLaunch& launch, cudaStream_t stream);

}  // namespace nsmg
