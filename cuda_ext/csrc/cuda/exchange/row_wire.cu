// Rows and gradients into columns of words, and back: a lane a row. Rows keep their order on the way to a rank, so that
// adjacent lanes write, and read, adjacent words.
#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/exchange/row_wire.h"
#include "cuda/exchange/row_wire_device.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// Whether rows may be rounded to float16.
template <typename Row>
constexpr bool kRounds = std::is_same_v<Row, GaussianColumns>;

template <typename Row>
__device__ __forceinline__ RowNumbers<Row> load_row(const PackRows& rows, int64_t row) {
  RowNumbers<Row> out;
  load_numbers<Row>(rows.columns, row, out.values);
  out.radii = reinterpret_cast<const int2*>(rows.radii)[row];
  out.view = rows.view_ids[row];
  return out;
}

// Writes words and, where it is sent, the slot.
template <int kWords>
__device__ __forceinline__ void put_words(const uint32_t* words, bool slots, int64_t row, uint32_t* out,
                                          int64_t capacity) {
#pragma unroll
  for (int k = 0; k < kWords; ++k) out[k * capacity] = words[k];
  if (slots) out[kWords * capacity] = uint32_t(row);
}

template <typename Row>
__global__ void __launch_bounds__(kThreads)
    pack_wire_kernel(const __grid_constant__ PackRows rows, const int32_t* place,
                     const __grid_constant__ WireSegments to, bool slots, uint32_t* wire) {
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows.count) return;
  bool loaded = false;
  RowNumbers<Row> numbers;
  for (int rank = 0; rank < to.ranks; ++rank) {
    const int line = place[int64_t(rank) * rows.count + row];
    const int64_t capacity = to.capacities[rank];
    if (line < 0 || line >= capacity || to.starts[rank] == kStays) continue;
    if (!loaded) numbers = load_row<Row>(rows, row);
    loaded = true;
    uint32_t* out = wire + to.starts[rank] + line;
    uint32_t words[kFullRow<Row>];
    if (kRounds<Row> && to.half && rank != to.rank) {
      if constexpr (kRounds<Row>) half_row(numbers, words);
      put_words<kHalfRow>(words, slots, row, out, capacity);
    } else {
      full_row(numbers, words);
      put_words<kFullRow<Row>>(words, slots, row, out, capacity);
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

template <typename Row>
__device__ __forceinline__ void store_row(const RowNumbers<Row>& row, int slot, int64_t to,
                                          const UnpackedRows& rows) {
  store_numbers<Row>(rows.columns, to, row.values);
  reinterpret_cast<int2*>(rows.radii)[to] = row.radii;
  rows.view_ids[to] = row.view;
  rows.slots[to] = slot;
}

template <typename Row>
__global__ void __launch_bounds__(kThreads)
    keep_rows_kernel(PackRows rows, const int32_t* place, UnpackedRows out, int64_t start, int capacity, bool slots) {
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows.count) return;
  const int line = place[row];
  if (line < 0 || line >= capacity) return;
  store_row(load_row<Row>(rows, row), slots ? int(row) : 0, start + line, out);
}

template <typename Row>
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
  RowNumbers<Row> row = {};
  row.view = views - 1;
  int slot = 0;
  if (line < counts[block.source]) {
    constexpr int kFull = kFullRow<Row>;
    const bool half = kRounds<Row> && come.half && block.source != come.rank;
    uint32_t words[kFull];
    const int count = half ? kHalfRow : kFull;
#pragma unroll
    for (int k = 0; k < kFull; ++k) words[k] = k < count ? in[k * capacity] : 0u;
    if constexpr (kRounds<Row>) row = half ? read_half_row(words) : read_full_row<Row>(words);
    else row = read_full_row<Row>(words);
    if (slots) slot = int(in[count * capacity]);
  }
  store_row(row, slot, to, rows);
}

// The gradients of a record that are returned.
template <typename Gradients>
__device__ __forceinline__ void read_record(const float4* record, float (&v)[Gradients::kCount]) {
  constexpr int kQuads = Gradients::place(Gradients::kCount - 1) / 4 + 1;
  float numbers[4 * kQuads];
#pragma unroll
  for (int k = 0; k < kQuads; ++k) put_quad(record[k], numbers, k);
#pragma unroll
  for (int k = 0; k < Gradients::kCount; ++k) v[k] = numbers[Gradients::place(k)];
}

template <typename Gradients>
__global__ void __launch_bounds__(kThreads)
    pack_gradients_kernel(const float4* records, const int64_t* counts, const __grid_constant__ WireSegments to,
                          uint32_t* wire) {
  constexpr int kCount = Gradients::kCount;
  const BlockSource block = source_of(to);
  const int64_t line = block.first + threadIdx.x, capacity = to.capacities[block.source];
  if (block.source == to.rank || to.starts[block.source] == kStays) return;
  if (line >= capacity || line >= counts[block.source]) return;
  float v[kCount];
  read_record<Gradients>(records + (block.before + line) * Gradients::kQuads, v);
  uint32_t* out = wire + to.starts[block.source] + line;
  if constexpr (Gradients::kRounds) {
    if (to.half) {
      uint32_t words[half_words(kCount)];
      half_gradients<kCount>(v, words);
#pragma unroll
      for (int k = 0; k < half_words(kCount); ++k) out[k * capacity] = words[k];
      return;
    }
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) out[k * capacity] = bits(v[k]);
}

// The gradients of a row that another rank has returned.
template <typename Gradients>
__device__ __forceinline__ void read_wire(const uint32_t* in, int64_t capacity, bool half,
                                          float (&v)[Gradients::kCount]) {
  constexpr int kCount = Gradients::kCount;
  if constexpr (Gradients::kRounds) {
    if (half) {
      uint32_t words[half_words(kCount)];
#pragma unroll
      for (int k = 0; k < half_words(kCount); ++k) words[k] = in[k * capacity];
      read_half_gradients<kCount>(words, v);
      return;
    }
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) v[k] = __uint_as_float(in[k * capacity]);
}

// What is summed is turned over in shared memory, a warp's 32 rows at a time, so that records are written in whole
// lines.
template <typename Gradients>
__global__ void __launch_bounds__(kThreads)
    collect_wire_kernel(const int32_t* place, const int64_t* real_, const uint32_t* wire,
                        const __grid_constant__ WireSegments come, const float4* own, int count, float4* records) {
  // Lanes 8 apart meet different banks.
  constexpr int kCount = Gradients::kCount, kQuads = Gradients::kQuads, kStride = kQuads + 1;
  __shared__ float4 staged[kWarps][32 * kStride];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first = int64_t(blockIdx.x) * kThreads + warp * 32, row = first + lane;
  const int64_t given = *real_, real = given < count ? given : count;
  float sums[kCount] = {};
  if (row < real) {
    for (int rank = 0; rank < come.ranks; ++rank) {
      const int line = place[int64_t(rank) * count + row];
      const int64_t capacity = come.capacities[rank];
      if (line < 0 || line >= capacity) continue;
      float v[kCount];
      if (rank == come.rank) {
        read_record<Gradients>(own + int64_t(line) * kQuads, v);
      } else {
        read_wire<Gradients>(wire + come.starts[rank] + line, capacity, come.half, v);
      }
#pragma unroll
      for (int k = 0; k < kCount; ++k) sums[k] += v[k];
    }
  }
  float numbers[4 * kQuads] = {};
#pragma unroll
  for (int k = 0; k < kCount; ++k) numbers[Gradients::place(k)] = sums[k];
#pragma unroll
  for (int k = 0; k < kQuads; ++k) staged[warp][lane * kStride + k] = quad_of(numbers, k);
  __syncwarp();
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
    const int one = k * (32 / kQuads) + lane / kQuads, quad = lane % kQuads;
    if (first + one < count) records[(first + one) * kQuads + quad] = staged[warp][one * kStride + quad];
  }
}

}  // namespace

cudaError_t pack_wire_launch(const PackRows& rows, const int32_t* place, const WireSegments& to, bool slots,
                             uint32_t* wire, cudaStream_t stream) {
  const int blocks = blocks_of(int64_t{rows.count});
  if (blocks == 0) return cudaSuccess;
  return with_columns(rows.widths, [&](auto columns) {
    const auto kernel = pack_wire_kernel<decltype(columns)>;
    kernel<<<blocks, kThreads, 0, stream>>>(rows, place, to, slots, wire);
    return cudaGetLastError();
  });
}

cudaError_t keep_rows_launch(const PackRows& rows, const int32_t* place, const UnpackedRows& to, int64_t start,
                             int capacity, bool slots, cudaStream_t stream) {
  const int blocks = blocks_of(int64_t{rows.count});
  if (blocks == 0) return cudaSuccess;
  return with_columns(rows.widths, [&](auto columns) {
    const auto kernel = keep_rows_kernel<decltype(columns)>;
    kernel<<<blocks, kThreads, 0, stream>>>(rows, place, to, start, capacity, slots);
    return cudaGetLastError();
  });
}

cudaError_t unpack_wire_launch(const uint32_t* wire, const WireSegments& come, const int64_t* counts, bool slots,
                               int views, const UnpackedRows& rows, cudaStream_t stream) {
  const int blocks = blocks_of(come);
  if (blocks == 0) return cudaSuccess;
  return with_columns(rows.widths, [&](auto columns) {
    const auto kernel = unpack_wire_kernel<decltype(columns)>;
    kernel<<<blocks, kThreads, 0, stream>>>(wire, come, counts, slots, views, rows);
    return cudaGetLastError();
  });
}

cudaError_t pack_gradients_launch(const Returned& returned, const float* records, const int64_t* counts,
                                  const WireSegments& to, uint32_t* wire, cudaStream_t stream) {
  const int blocks = blocks_of(to);
  if (blocks == 0) return cudaSuccess;
  const auto* quads = reinterpret_cast<const float4*>(records);
  return with_gradients(returned, [&](auto gradients) {
    const auto kernel = pack_gradients_kernel<decltype(gradients)>;
    kernel<<<blocks, kThreads, 0, stream>>>(quads, counts, to, wire);
    return cudaGetLastError();
  });
}

cudaError_t collect_wire_launch(const Returned& returned, const int32_t* place, const int64_t* real,
                                const uint32_t* wire, const WireSegments& come, const float* own, int count,
                                float* records, cudaStream_t stream) {
  const int blocks = blocks_of(int64_t{count});
  if (blocks == 0) return cudaSuccess;
  const auto* from = reinterpret_cast<const float4*>(own);
  auto* quads = reinterpret_cast<float4*>(records);
  return with_gradients(returned, [&](auto gradients) {
    const auto kernel = collect_wire_kernel<decltype(gradients)>;
    kernel<<<blocks, kThreads, 0, stream>>>(place, real, wire, come, from, count, quads);
    return cudaGetLastError();
  });
}

}  // namespace nsmg
