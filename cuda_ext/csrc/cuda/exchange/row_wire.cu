// Rows and gradients into columns of words, and back: a lane a row. Rows keep their order on the way to a rank, so that
// adjacent lanes write, and read, adjacent words.
#include <cuda_runtime.h>

#include "cuda/exchange/row_wire.h"

#include <type_traits>
#include "cuda/exchange/row_wire_device.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kStride = kRecordQuads + 1;  // quads of a record in shared memory: lanes 8 apart meet different banks

__device__ __forceinline__ RowNumbers load_row(const PackRows& rows, int64_t row) {
  RowNumbers out;
  const float2 mean = reinterpret_cast<const float2*>(rows.means2d)[row];
  const float *conic = rows.conics + 3 * row, *color = rows.features + 3 * row;
  out.values[0] = mean.x;
  out.values[1] = mean.y;
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    out.values[2 + k] = conic[k];
    out.values[6 + k] = color[k];
  }
  out.values[5] = rows.opacities[row];
  out.values[9] = rows.depths[row];
  out.radii = reinterpret_cast<const int2*>(rows.radii)[row];
  out.view = rows.view_ids[row];
  return out;
}

__global__ void __launch_bounds__(kThreads)
    pack_wire_kernel(PackRows rows, const int32_t* place, const __grid_constant__ WireSegments to, bool slots,
                     uint32_t* wire) {
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows.count) return;
  bool loaded = false;
  RowNumbers numbers;
  for (int rank = 0; rank < to.ranks; ++rank) {
    const int line = place[int64_t(rank) * rows.count + row];
    const int64_t capacity = to.capacities[rank];
    if (line < 0 || line >= capacity || to.starts[rank] == kStays) continue;
    if (!loaded) numbers = load_row(rows, row);
    loaded = true;
    uint32_t* out = wire + to.starts[rank] + line;
    uint32_t words[kMostWords];
    if (to.half && rank != to.rank) {
      half_row(numbers, words);
#pragma unroll
      for (int k = 0; k < 9; ++k) out[k * capacity] = words[k];
      if (slots) out[9 * capacity] = uint32_t(row);
    } else {
      full_row(numbers, words);
#pragma unroll
      for (int k = 0; k < 12; ++k) out[k * capacity] = words[k];
      if (slots) out[12 * capacity] = uint32_t(row);
    }
  }
}

int blocks_of(int64_t lines) { return int((lines + kThreads - 1) / kThreads); }

// Which source a block's lines are of: its own, and the lines before that source's.
struct BlockSource {
  int source;
  int64_t first, before;  // of the block among the source's lines; of the source among all
};

__device__ __forceinline__ BlockSource source_of(const WireSegments& segments) {
  BlockSource out{0, int64_t(blockIdx.x) * kThreads, 0};
  while (out.source < segments.ranks) {
    const int64_t capacity = segments.capacities[out.source];
    const int64_t covered = (capacity + kThreads - 1) / kThreads * kThreads;
    if (out.first < covered) break;
    out.first -= covered;
    out.before += capacity;
    ++out.source;
  }
  return out;
}

int blocks_of(const WireSegments& segments) {
  int64_t blocks = 0;
  for (int k = 0; k < segments.ranks; ++k) blocks += blocks_of(int64_t{segments.capacities[k]});
  return int(blocks);
}

__device__ __forceinline__ void store_row(const RowNumbers& row, int slot, int64_t to, const UnpackedRows& rows) {
  reinterpret_cast<float2*>(rows.means2d)[to] = make_float2(row.values[0], row.values[1]);
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    rows.conics[3 * to + k] = row.values[2 + k];
    rows.features[3 * to + k] = row.values[6 + k];
  }
  rows.opacities[to] = row.values[5];
  rows.depths[to] = row.values[9];
  reinterpret_cast<int2*>(rows.radii)[to] = row.radii;
  rows.view_ids[to] = row.view;
  rows.slots[to] = slot;
}

__global__ void __launch_bounds__(kThreads)
    keep_rows_kernel(PackRows rows, const int32_t* place, UnpackedRows out, int64_t start, int capacity, bool slots) {
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows.count) return;
  const int line = place[row];
  if (line < 0 || line >= capacity) return;
  store_row(load_row(rows, row), slots ? int(row) : 0, start + line, out);
}

__global__ void __launch_bounds__(kThreads)
    unpack_wire_kernel(const uint32_t* wire, const __grid_constant__ WireSegments come, const int64_t* counts,
                       bool slots, int views, UnpackedRows rows) {
  const BlockSource block = source_of(come);
  const int64_t line = block.first + threadIdx.x, capacity = come.capacities[block.source];
  if (line >= capacity) return;
  const int64_t to = block.before + line;
  rows.owners[to] = block.source;
  const bool stays = come.starts[block.source] == kStays;
  if (stays && line < counts[block.source]) return;  // keep_rows writes these
  const uint32_t* in = wire + come.starts[block.source] + line;
  const bool half = come.half && block.source != come.rank;
  RowNumbers row = {};
  row.view = views - 1;
  int slot = 0;
  if (line < counts[block.source]) {
    uint32_t words[kMostWords];
    const int count = half ? 9 : 12;
#pragma unroll
    for (int k = 0; k < 12; ++k) words[k] = k < count ? in[k * capacity] : 0u;
    row = half ? read_half_row(words) : read_full_row(words);
    if (slots) slot = int(in[count * capacity]);
  }
  store_row(row, slot, to, rows);
}

// Calls f with the number of a record's gradients that are sent, as a constant.
template <typename F>
void with_gradients(bool absgrad, bool depth, const F& f) {
  if (absgrad && depth) return f(std::integral_constant<int, 12>());
  if (absgrad) return f(std::integral_constant<int, 11>());
  if (depth) return f(std::integral_constant<int, 10>());
  f(std::integral_constant<int, 9>());
}

// Whether one of so many gradients is a depth's; they are 9 without it and without the absolute two.
constexpr bool has_depth(int gradients) { return gradients % 2 == 0; }

// The gradients of a record that are sent.
template <int kCount>
__device__ __forceinline__ void read_record(const float4* record, float* v) {
  const float4 a = record[0], b = record[1], c = record[2];
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
  v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  v[8] = c.x;
  if constexpr (has_depth(kCount)) v[9] = c.y;
  if constexpr (kCount > 10) v[kCount - 2] = c.z, v[kCount - 1] = c.w;
}

template <int kCount>
__global__ void __launch_bounds__(kThreads)
    pack_gradients_kernel(const float4* records, const int64_t* counts, const __grid_constant__ WireSegments to,
                          uint32_t* wire) {
  const BlockSource block = source_of(to);
  const int64_t line = block.first + threadIdx.x, capacity = to.capacities[block.source];
  if (block.source == to.rank || to.starts[block.source] == kStays) return;
  if (line >= capacity || line >= counts[block.source]) return;
  float v[kCount];
  read_record<kCount>(records + (block.before + line) * kRecordQuads, v);
  uint32_t* out = wire + to.starts[block.source] + line;
  if (to.half) {
    uint32_t words[half_words(kCount)];
    half_gradients<kCount>(v, words);
#pragma unroll
    for (int k = 0; k < half_words(kCount); ++k) out[k * capacity] = words[k];
  } else {
#pragma unroll
    for (int k = 0; k < kCount; ++k) out[k * capacity] = bits(v[k]);
  }
}

// What is summed is turned over in shared memory, a warp's 32 rows at a time, so that records are written in whole
// lines.
template <int kCount>
__global__ void __launch_bounds__(kThreads)
    collect_wire_kernel(const int32_t* place, const int64_t* real_, const uint32_t* wire,
                        const __grid_constant__ WireSegments come, const float4* own, int count, float4* records) {
  __shared__ float4 staged[kWarps][32 * kStride];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first = int64_t(blockIdx.x) * kThreads + warp * 32, row = first + lane;
  const int64_t given = *real_, real = given < count ? given : count;
  float sums[kMostGradients] = {};
  if (row < real) {
    for (int rank = 0; rank < come.ranks; ++rank) {
      const int line = place[int64_t(rank) * count + row];
      const int64_t capacity = come.capacities[rank];
      if (line < 0 || line >= capacity) continue;
      float v[kCount];
      if (rank == come.rank) {
        read_record<kCount>(own + int64_t(line) * kRecordQuads, v);
      } else {
        const uint32_t* in = wire + come.starts[rank] + line;
        if (come.half) {
          uint32_t words[half_words(kCount)];
#pragma unroll
          for (int k = 0; k < half_words(kCount); ++k) words[k] = in[k * capacity];
          read_half_gradients<kCount>(words, v);
        } else {
#pragma unroll
          for (int k = 0; k < kCount; ++k) v[k] = __uint_as_float(in[k * capacity]);
        }
      }
#pragma unroll
      for (int k = 0; k < kCount; ++k) sums[k] += v[k];
    }
  }
  float4* record = &staged[warp][lane * kStride];
  record[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
  record[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
  constexpr bool kAbsolute = kCount > 10;
  record[2] = make_float4(sums[8], has_depth(kCount) ? sums[9] : 0.0f, kAbsolute ? sums[kCount - 2] : 0.0f,
                          kAbsolute ? sums[kCount - 1] : 0.0f);
  record[3] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  __syncwarp();
#pragma unroll
  for (int k = 0; k < kRecordQuads; ++k) {
    const int one = k * (32 / kRecordQuads) + lane / kRecordQuads, quad = lane % kRecordQuads;
    if (first + one < count) records[(first + one) * kRecordQuads + quad] = staged[warp][one * kStride + quad];
  }
}

}  // namespace

cudaError_t pack_wire_launch(const PackRows& rows, const int32_t* place, const WireSegments& to, bool slots,
                             uint32_t* wire, cudaStream_t stream) {
  const int blocks = blocks_of(int64_t{rows.count});
  if (blocks == 0) return cudaSuccess;
  pack_wire_kernel<<<blocks, kThreads, 0, stream>>>(rows, place, to, slots, wire);
  return cudaGetLastError();
}

cudaError_t keep_rows_launch(const PackRows& rows, const int32_t* place, const UnpackedRows& to, int64_t start,
                             int capacity, bool slots, cudaStream_t stream) {
  const int blocks = blocks_of(int64_t{rows.count});
  if (blocks == 0) return cudaSuccess;
  keep_rows_kernel<<<blocks, kThreads, 0, stream>>>(rows, place, to, start, capacity, slots);
  return cudaGetLastError();
}

cudaError_t unpack_wire_launch(const uint32_t* wire, const WireSegments& come, const int64_t* counts, bool slots,
                               int views, const UnpackedRows& rows, cudaStream_t stream) {
  const int blocks = blocks_of(come);
  if (blocks == 0) return cudaSuccess;
  unpack_wire_kernel<<<blocks, kThreads, 0, stream>>>(wire, come, counts, slots, views, rows);
  return cudaGetLastError();
}

cudaError_t pack_gradients_launch(const float* records, const int64_t* counts, const WireSegments& to, bool absgrad,
                                  bool depth, uint32_t* wire, cudaStream_t stream) {
  const int blocks = blocks_of(to);
  if (blocks == 0) return cudaSuccess;
  const auto* quads = reinterpret_cast<const float4*>(records);
  with_gradients(absgrad, depth, [&](auto number) {
    pack_gradients_kernel<decltype(number)::value><<<blocks, kThreads, 0, stream>>>(quads, counts, to, wire);
  });
  return cudaGetLastError();
}

cudaError_t collect_wire_launch(const int32_t* place, const int64_t* real, const uint32_t* wire,
                                const WireSegments& come, const float* own, bool absgrad, bool depth, int count,
                                float* records, cudaStream_t stream) {
  const int blocks = blocks_of(int64_t{count});
  if (blocks == 0) return cudaSuccess;
  const auto* from = reinterpret_cast<const float4*>(own);
  auto* quads = reinterpret_cast<float4*>(records);
  with_gradients(absgrad, depth, [&](auto number) {
    constexpr int kCount = decltype(number)::value;
    collect_wire_kernel<kCount><<<blocks, kThreads, 0, stream>>>(place, real, wire, come, from, count, quads);
  });
  return cudaGetLastError();
}

}  // namespace nsmg
