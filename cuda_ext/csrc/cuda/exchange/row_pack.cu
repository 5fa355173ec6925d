// Rows into records of 64 bytes, and back. A warp turns 32 rows over in shared memory, so that both sides are read and
// written in whole lines: arrays by a lane a row, records by four lanes each, 16 bytes a lane.
#include <cuda_runtime.h>

#include "cuda/exchange/row_exchange.h"

namespace nsmg {
namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kStride = kRecordQuads + 1;  // quads of a record in shared memory: lanes 8 apart meet different banks

__device__ __forceinline__ void load_record(const PackRows& rows, int64_t row, float4* record) {
  const float2 mean = reinterpret_cast<const float2*>(rows.means2d)[row];
  const int2 radius = reinterpret_cast<const int2*>(rows.radii)[row];
  const float *conic = rows.conics + 3 * row, *color = rows.features + 3 * row;
  record[0] = make_float4(mean.x, mean.y, conic[0], conic[1]);
  record[1] = make_float4(conic[2], rows.opacities[row], color[0], color[1]);
  record[2] = make_float4(color[2], rows.depths[row], __int_as_float(radius.x), __int_as_float(radius.y));
  record[3] = make_float4(__int_as_float(rows.view_ids[row]), __int_as_float(int(row)), 0.0f, 0.0f);
}

__global__ void __launch_bounds__(kThreads)
    pack_kernel(PackRows rows, const int32_t* place, const int64_t* destinations, int ranks, int capacity) {
  __shared__ float4 staged[kWarps][32 * kStride];
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
  if (mask != 0) load_record(rows, row, &staged[warp][lane * kStride]);
  const unsigned below = (1u << lane) - 1;
  const int quad = lane % kRecordQuads;
  for (int rank = 0; rank < ranks; ++rank) {
    const bool goes = (mask >> rank & 1u) != 0;
    const unsigned going = __ballot_sync(kAll, goes);
    if (going == 0) continue;
    if (goes) listed[warp][__popc(going & below)] = make_int2(lane, place[int64_t(rank) * rows.count + row]);
    __syncwarp();  // also for what is staged
    float4* records = reinterpret_cast<float4*>(destinations[rank]);
    const int number = __popc(going);
    for (int k = lane / kRecordQuads; k < number; k += 32 / kRecordQuads) {
      const int2 one = listed[warp][k];
      records[int64_t(one.y) * kRecordQuads + quad] = staged[warp][one.x * kStride + quad];
    }
    __syncwarp();
  }
}

// `blocks` of them a source, so that a block's records lie in one segment.
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const float4* records, const int64_t* counts, int blocks, int capacity, int views,
                  UnpackedRows rows) {
  __shared__ float4 staged[kWarps][32 * kStride];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int source = int(blockIdx.x) / blocks;
  const int64_t first = (int64_t(blockIdx.x) - int64_t(source) * blocks) * kThreads + warp * 32;  // of the warp's lines
  const int64_t count = counts[source], real = count < capacity ? count : capacity;
  const float4* from = records + (int64_t(source) * capacity + first) * kRecordQuads;
#pragma unroll
  for (int k = 0; k < kRecordQuads; ++k) {
    const int one = k * (32 / kRecordQuads) + lane / kRecordQuads;
    if (first + one < real) staged[warp][one * kStride + lane % kRecordQuads] = from[32 * k + lane];
  }
  __syncwarp();
  const int64_t line = first + lane;
  if (line >= capacity) return;
  const float4 nothing = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const float4* record = &staged[warp][lane * kStride];
  const bool row = line < real;
  const float4 a = row ? record[0] : nothing, b = row ? record[1] : nothing, c = row ? record[2] : nothing,
               d = row ? record[3] : make_float4(__int_as_float(views - 1), 0.0f, 0.0f, 0.0f);
  const int64_t to = int64_t(source) * capacity + line;
  reinterpret_cast<float2*>(rows.means2d)[to] = make_float2(a.x, a.y);
  rows.conics[3 * to] = a.z;
  rows.conics[3 * to + 1] = a.w;
  rows.conics[3 * to + 2] = b.x;
  rows.opacities[to] = b.y;
  rows.features[3 * to] = b.z;
  rows.features[3 * to + 1] = b.w;
  rows.features[3 * to + 2] = c.x;
  rows.depths[to] = c.y;
  reinterpret_cast<int2*>(rows.radii)[to] = make_int2(__float_as_int(c.z), __float_as_int(c.w));
  rows.view_ids[to] = __float_as_int(d.x);
  rows.owners[to] = source;
  rows.slots[to] = __float_as_int(d.y);
}

}  // namespace

cudaError_t pack_launch(const PackRows& rows, const int32_t* place, const int64_t* destinations, int ranks,
                        int capacity, cudaStream_t stream) {
  const int blocks = int((int64_t{rows.count} + kThreads - 1) / kThreads);
  if (blocks == 0) return cudaSuccess;
  pack_kernel<<<blocks, kThreads, 0, stream>>>(rows, place, destinations, ranks, capacity);
  return cudaGetLastError();
}

cudaError_t unpack_launch(const float* records, const int64_t* counts, int ranks, int capacity, int views,
                          const UnpackedRows& rows, cudaStream_t stream) {
  const int blocks = int((int64_t{capacity} + kThreads - 1) / kThreads);
  if (blocks == 0 || ranks == 0) return cudaSuccess;
  const auto* quads = reinterpret_cast<const float4*>(records);
  unpack_kernel<<<ranks * blocks, kThreads, 0, stream>>>(quads, counts, blocks, capacity, views, rows);
  return cudaGetLastError();
}

}  // namespace nsmg
