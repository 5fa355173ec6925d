// Rows into records, and back. A warp turns 32 rows over in shared memory, so that both sides are read and written in
// whole lines: arrays by a lane a row, records by a lane for each 16 bytes.
#include <cuda_runtime.h>

#include "cuda/exchange/row_exchange.h"

namespace nsmg {
namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kThreads = 256, kWarps = kThreads / 32;
// Quads of a record in shared memory: lanes 8 apart meet different banks.
template <typename Row>
constexpr int kStride = record_quads<Row>() + 1;

template <typename Row>
__device__ __forceinline__ void load_record(const PackRows& rows, int64_t row, float4* record) {
  constexpr int kQuads = record_quads<Row>(), kEnd = Row::kNumbers;
  const int2 radius = reinterpret_cast<const int2*>(rows.radii)[row];
  float numbers[4 * kQuads] = {};
  load_numbers<Row>(rows.columns, row, numbers);
  numbers[kEnd] = __int_as_float(radius.x);
  numbers[kEnd + 1] = __int_as_float(radius.y);
  numbers[kEnd + 2] = __int_as_float(rows.view_ids[row]);
  numbers[kEnd + 3] = __int_as_float(int(row));
#pragma unroll
  for (int k = 0; k < kQuads; ++k) record[k] = quad_of(numbers, k);
}

template <typename Row>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(PackRows rows, const int32_t* place, const int64_t* destinations, int ranks, int capacity) {
  constexpr int kQuads = record_quads<Row>();
  __shared__ float4 staged[kWarps][32 * kStride<Row>];
  __shared__ int2 listed[kWarps][32];  // of the rows that go to one rank: which of the 32, and its line there
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const bool inside = row < rows.count;
  uint32_t mask = 0;  // a bit for each rank that the row goes to
#pragma unroll 4
  for (int rank = 0; rank < ranks; ++rank) {
    const int line = inside ? place[int64_t(rank) * rows.count + row] : -1;
    if (line >= 0 && line < capacity) mask |= 1u << rank;
  }
  if (mask != 0) load_record<Row>(rows, row, &staged[warp][lane * kStride<Row>]);
  const unsigned below = (1u << lane) - 1;
  const int quad = lane % kQuads;
  for (int rank = 0; rank < ranks; ++rank) {
    const bool goes = (mask >> rank & 1u) != 0;
    const unsigned going = __ballot_sync(kAll, goes);
    if (going == 0) continue;
    if (goes) listed[warp][__popc(going & below)] = make_int2(lane, place[int64_t(rank) * rows.count + row]);
    __syncwarp();  // also for what is staged
    float4* records = reinterpret_cast<float4*>(destinations[rank]);
    const int number = __popc(going);
    for (int k = lane / kQuads; k < number; k += 32 / kQuads) {
      const int2 one = listed[warp][k];
      records[int64_t(one.y) * kQuads + quad] = staged[warp][one.x * kStride<Row> + quad];
    }
    __syncwarp();
  }
}

// `blocks` of them a source, so that a block's records lie in one segment.
template <typename Row>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const float4* records, const int64_t* counts, int blocks, int capacity, int views,
                  UnpackedRows rows) {
  constexpr int kQuads = record_quads<Row>(), kEnd = Row::kNumbers;
  __shared__ float4 staged[kWarps][32 * kStride<Row>];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int source = int(blockIdx.x) / blocks;
  const int64_t first = (int64_t(blockIdx.x) - int64_t(source) * blocks) * kThreads + warp * 32;  // of the warp's lines
  const int64_t count = counts[source], real = count < capacity ? count : capacity;
  const float4* from = records + (int64_t(source) * capacity + first) * kQuads;
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
    const int one = k * (32 / kQuads) + lane / kQuads;
    if (first + one < real) staged[warp][one * kStride<Row> + lane % kQuads] = from[32 * k + lane];
  }
  __syncwarp();
  const int64_t line = first + lane;
  if (line >= capacity) return;
  const bool row = line < real;
  float numbers[4 * kQuads];
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
    put_quad(row ? staged[warp][lane * kStride<Row> + k] : make_float4(0.0f, 0.0f, 0.0f, 0.0f), numbers, k);
  }
  const int64_t to = int64_t(source) * capacity + line;
  store_numbers<Row>(rows.columns, to, numbers);
  reinterpret_cast<int2*>(rows.radii)[to] = make_int2(__float_as_int(numbers[kEnd]), __float_as_int(numbers[kEnd + 1]));
  rows.view_ids[to] = row ? __float_as_int(numbers[kEnd + 2]) : views - 1;
  rows.owners[to] = source;
  rows.slots[to] = __float_as_int(numbers[kEnd + 3]);
}

}  // namespace

cudaError_t pack_launch(const PackRows& rows, const int32_t* place, const int64_t* destinations, int ranks,
                        int capacity, cudaStream_t stream) {
  const int blocks = int((int64_t{rows.count} + kThreads - 1) / kThreads);
  if (blocks == 0) return cudaSuccess;
  return with_columns(rows.widths, [&](auto columns) {
    const auto kernel = pack_kernel<decltype(columns)>;
    kernel<<<blocks, kThreads, 0, stream>>>(rows, place, destinations, ranks, capacity);
    return cudaGetLastError();
  });
}

cudaError_t unpack_launch(const float* records, const int64_t* counts, int ranks, int capacity, int views,
                          const UnpackedRows& rows, cudaStream_t stream) {
  const int blocks = int((int64_t{capacity} + kThreads - 1) / kThreads);
  if (blocks == 0 || ranks == 0) return cudaSuccess;
  const auto* quads = reinterpret_cast<const float4*>(records);
  return with_columns(rows.widths, [&](auto columns) {
    const auto kernel = unpack_kernel<decltype(columns)>;
    kernel<<<ranks * blocks, kThreads, 0, stream>>>(quads, counts, blocks, capacity, views, rows);
    return cudaGetLastError();
  });
}

}  // namespace nsmg
