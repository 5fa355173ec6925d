// A fused step's bookkeeping: a few hundred numbers, so all that counts is that it is one launch and that loads which
// do not depend on each other are under way together.
#include <cuda_runtime.h>

#include "cuda/optim/step_control.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;
constexpr int kBandsPerLaunch = 224;  // within the 4 KB of kernel parameters
static_assert(kThreads / 32 >= kMostLimits + 2 && kThreads / 32 >= kMessageHead);

struct BandBatch {
  MessageBand bands[kBandsPerLaunch];
  int count;
};

__device__ __forceinline__ int64_t largest(const Column& column, int count) {
  int64_t most = column.first[0];
#pragma unroll 8
  for (int i = 1; i < count; ++i) {
    const int64_t value = column.first[i * column.stride];
    most = value > most ? value : most;
  }
  return most;
}

// The records for all ranks but this one.
__device__ __forceinline__ int64_t sent_away(const MessageCounts& counts) {
  int64_t sum = 0;
#pragma unroll 8
  for (int i = 0; i < counts.ranks; ++i) {
    const int64_t value = counts.segments[i];
    sum += i == counts.rank ? 0 : value;
  }
  return sum;
}

// Rows by which the fullest segment exceeds its capacity; keeps the most that each has held.
__device__ __forceinline__ int64_t lacking(const MessageCounts& counts) {
  int64_t worst = counts.segments[0] - counts.capacity[0];
#pragma unroll 8
  for (int i = 0; i < counts.ranks; ++i) {
    const int64_t value = counts.segments[i], over = value - counts.capacity[i], before = counts.most[i];
    worst = over > worst ? over : worst;
    if (value > before) counts.most[i] = value;
  }
  return worst;
}

// The first of the launches (`begins`) has one block more, its first, for the message's head, and sets lines that no
// band of the batch has to zero.
__global__ void __launch_bounds__(kThreads)
    message_kernel(const __grid_constant__ BandBatch batch, const MessageCounts counts, const int32_t* tile_offsets,
                   int lines, bool begins, int64_t* message) {
  if (begins && blockIdx.x == 0) {
    if (threadIdx.x == 0) message[0] = counts.own_rows[0];
    if (threadIdx.x == 32) message[1] = lacking(counts);
    if (threadIdx.x == 64) message[2] = counts.met[0];
    if (threadIdx.x == 96) message[3] = sent_away(counts);
    return;
  }
  const int64_t line = int64_t{blockIdx.x - (begins ? 1u : 0u)} * kThreads + threadIdx.x;
  if (line >= lines) return;
  int64_t tile = -1;
  int columns = 0;
  for (int k = 0; k < batch.count; ++k) {
    const int64_t place = line - batch.bands[k].line;
    if (place < 0 || place >= batch.bands[k].count) continue;
    columns = batch.bands[k].columns;
    tile = batch.bands[k].tile + place * columns;
  }
  int64_t* out = message + kMessageHead + line;
  if (tile >= 0) {
    *out = int64_t{tile_offsets[tile + columns]} - tile_offsets[tile];
  } else if (begins) {
    *out = 0;
  }
}

// The first block decides; the others add up the ranks' work.
__global__ void __launch_bounds__(kThreads) gate_kernel(const __grid_constant__ GateLaunch g) {
  if (blockIdx.x > 0) {
    const int64_t line = int64_t{blockIdx.x - 1} * kThreads + threadIdx.x;
    if (line >= g.lines) return;
    int64_t sum = 0;
#pragma unroll 8
    for (int rank = 0; rank < g.ranks; ++rank) sum += g.work[rank * g.work_stride + line];
    g.totals[line] = sum;
    return;
  }
  const int warp = threadIdx.x / 32;
  const bool leads = threadIdx.x % 32 == 0;
  int64_t most = 0, before = 0;
  bool over = false;
  if (leads && warp < g.num_limits) {
    before = g.status[1 + warp];
    most = largest(g.counts[warp], g.ranks);
    over = most > g.limits[warp];
  } else if (leads && warp == g.num_limits) {
    before = g.status[1 + warp];
    over = before > 0;
  } else if (leads && warp == g.num_limits + 1) {
    over = g.lazy_steps != nullptr && *g.lazy_steps >= g.most_steps;
  }
  const bool full = __syncthreads_or(over) != 0;
  if (leads && warp <= g.num_limits) {
    if (warp == g.num_limits) most = full ? 1 : 0;
    g.status[1 + warp] = most > before ? most : before;
  }
  if (leads && warp == g.num_limits + 1) {
    g.status[0] += full ? 0 : 1;
    if (g.sent != nullptr) g.status[g.num_limits + 2] += *g.sent;
  }
  for (int i = threadIdx.x; i < g.scalar_count; i += kThreads) g.gated_scalars[i] = full ? g.still[i] : g.scalars[i];
  for (int i = threadIdx.x; i < g.segments; i += kThreads) {
    g.gated_counts[i] = full ? 0 : g.row_counts.first[i * g.row_counts.stride];
  }
}

unsigned blocks_of(int lines) { return static_cast<unsigned>((int64_t{lines} + kThreads - 1) / kThreads); }

}  // namespace

cudaError_t message_launch(const MessageCounts& counts, const int32_t* tile_offsets, const MessageBand* host_bands,
                           int band_count, int lines, int64_t* message, cudaStream_t stream) {
  for (int first = 0; first == 0 || first < band_count; first += kBandsPerLaunch) {
    BandBatch batch = {};
    batch.count = band_count - first < kBandsPerLaunch ? band_count - first : kBandsPerLaunch;
    for (int k = 0; k < batch.count; ++k) batch.bands[k] = host_bands[first + k];
    const bool begins = first == 0;
    const unsigned blocks = blocks_of(lines) + (begins ? 1 : 0);
    if (blocks == 0) break;
    message_kernel<<<blocks, kThreads, 0, stream>>>(batch, counts, tile_offsets, lines, begins, message);
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

cudaError_t gate_launch(const GateLaunch& launch, cudaStream_t stream) {
  gate_kernel<<<1 + blocks_of(launch.lines), kThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace nsmg
