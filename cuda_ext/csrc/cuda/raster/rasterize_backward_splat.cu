// Backward compositing of 16x16 tiles, one lane a splat (Mallick et al. 2024, Taming 3DGS, section 4.3): a warp takes a
// chunk of 256 splats on one 8x8 sub-tile. The splats that may reach it are worked on 32 at a time; the 64 pixels pass
// through the lanes one after the other, each lane handing transmittance and remainder on to the next, so that nothing
// is ever summed over a warp. A lane that has seen all pixels adds its splat's sums to memory and takes the splat 32
// places on, while the pixels of the next round already enter at lane 0.
#include "cuda/raster/rasterize_device.h"

namespace nsmg {
namespace {

constexpr int kPixels = kSubTile * kSubTile;

struct PixelTable {
  float4 place[kPixels];  // x, y, v_alpha, last (an integer's bits)
  float4 v_out[kPixels];
  float2 state[kPixels];  // transmittance and remainder before the next 32 splats
  uint8_t list[kChunk];   // the splats that may reach the sub-tile
};

template <int kChannels>
__device__ __forceinline__ void keep_pixel(PixelTable& table, int pixel, float x, float y,
                                           const PixelStart<kChannels>& start) {
  table.place[pixel] = make_float4(x, y, start.v_alpha, __int_as_float(start.last));
  table.v_out[pixel] = make_float4(start.v_out[0], start.v_out[1], start.v_out[2],
                                   kChannels == 4 ? start.v_out[kChannels - 1] : 0.0f);
  table.state[pixel] = make_float2(start.transmittance, start.remainder);
}

// A lane's splat and what it has gathered.
template <int kChannels, bool kAbs>
struct LaneSplat {
  ScaledSplat s;
  float features[4];
  float sums[kSums];
  int position, row;  // position: counted from the chunk's first splat

  __device__ __forceinline__ void take(const float4* staged, const int* rows, int index) {
    const float4 second = staged[3 * index + 1], third = staged[3 * index + 2];
    s = unpack(staged[3 * index], second);
    features[0] = third.x, features[1] = third.y, features[2] = third.z, features[3] = second.w;
    position = index;
    row = rows[index];
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
  }

  __device__ __forceinline__ void gather(const float4& place, const float4& v_out, float& transmittance,
                                         float& remainder) {
    const float dx = s.mean_x - place.x, dy = s.mean_y - place.y;
    const float sigma = sigma2_of_column(s.b * dx, s.a * dx * dx, s.c, dy);
    if (float_bits(sigma) >= s.limit || position > __float_as_int(place.w)) return;
    float value = fmaf(v_out.x, features[0], place.z);
    value = fmaf(v_out.y, features[1], value);
    value = fmaf(v_out.z, features[2], value);
    if (kChannels == 4) value = fmaf(v_out.w, features[3], value);
    const BackwardStep step = step_backward(exp2_fast(s.log2_opacity - sigma), value, transmittance, remainder);
    const float v_x = step.v_sigma * dx, v_y = step.v_sigma * dy;
    sums[kSumX] += v_x;
    sums[kSumY] += v_y;
    sums[kSumXX] = fmaf(v_x, dx, sums[kSumXX]);
    sums[kSumXY] = fmaf(v_y, dx, sums[kSumXY]);
    sums[kSumYY] = fmaf(v_y, dy, sums[kSumYY]);
    sums[kSum1] += step.v_sigma;
    sums[kSumFeature] = fmaf(step.weight, v_out.x, sums[kSumFeature]);
    sums[kSumFeature + 1] = fmaf(step.weight, v_out.y, sums[kSumFeature + 1]);
    sums[kSumFeature + 2] = fmaf(step.weight, v_out.z, sums[kSumFeature + 2]);
    if (kChannels == 4) sums[kSumFeature + 3] = fmaf(step.weight, v_out.w, sums[kSumFeature + 3]);
    if (kAbs) {
      sums[kSumAbs] += fabsf(fmaf(2.0f * s.a, v_x, s.b * v_y));
      sums[kSumAbs + 1] += fabsf(fmaf(2.0f * s.c, v_y, s.b * v_x));
    }
  }

  __device__ __forceinline__ void flush(const RecordTarget& target) const {
    bool any = false;
#pragma unroll
    for (int d = 0; d < kChannels; ++d) any |= sums[kSumFeature + d] != 0.0f;
    if (!any && sums[kSum1] == 0.0f) return;  // most likely out of every pixel's reach; zeros in any case
    float* record = record_of(target, row);
    if (record == nullptr) return;
#pragma unroll
    for (int quad = 0; quad < kRecordQuads; ++quad) {
      const float4 part = make_float4(sums[4 * quad], sums[4 * quad + 1], sums[4 * quad + 2], sums[4 * quad + 3]);
      if (quad == 2 && kChannels == 3 && !kAbs) {
        add_float(record + 8, part.x, target.system_scope);
      } else {
        add_quad(record + 4 * quad, record_quad(quad, part, s), target.system_scope);
      }
    }
  }
};

template <int kChannels, bool kAbs>
__global__ void __launch_bounds__(kTileThreads, 8)
backward(const int32_t* __restrict__ row_ids, int rows, int channels, RasterState state, RasterGradients pixels,
         RecordTarget target) {
  __shared__ float4 staged[kChunk * 3];
  __shared__ int staged_rows[kChunk];
  __shared__ PixelTable tables[kTileWarps];
  TileInfo info;
  const Chunk chunk = chunk_of(state, blockIdx.x, info);
  if (chunk.count <= 0) return;  // the whole block
  stage_chunk(row_ids, chunk, state.table, rows, staged, staged_rows);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const SubTile part = sub_tile(info, warp);
  PixelTable& table = tables[warp];
  int deepest = -1;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = lane % kSubTile, line = lane / kSubTile + 4 * half;
    PixelStart<kChannels> start;
    if (column < part.width && line < part.height) {
      const int64_t place = info.pixel + int64_t(part.y + line) * info.pitch + part.x + column;
      start = pixel_start<kChannels>(state, info, chunk, channels, pixels, place, warp * 64 + half * 32 + lane);
    }
    keep_pixel(table, half * 32 + lane, float(info.x0 + part.x + column) + 0.5f, float(info.y0 + part.y + line) + 0.5f,
               start);
    deepest = max(deepest, start.last);
  }
  const int warp_count = min(chunk.count, __reduce_max_sync(kWholeWarp, deepest) + 1);
  wait_for_copies();
  __syncthreads();  // the only one: from here on each warp is on its own

  int listed = 0;
  for (int start = 0; start < warp_count; start += 32) {
    const unsigned found = reaching(staged + 3 * (start + lane), start + lane < warp_count, part);
    if (found >> lane & 1u) table.list[listed + __popc(found & ((1u << lane) - 1u))] = uint8_t(start + lane);
    listed += __popc(found);
  }
  __syncwarp();
  const int rounds = (listed + 31) / 32;
  LaneSplat<kChannels, kAbs> splat;
  bool busy = false;
  float transmittance = 0.0f, remainder = 0.0f;
  // In step n lane l sees pixel n - l, counted over all rounds of 64.
  for (int n = 0; n < rounds * kPixels + 31; ++n) {
    const int turn = n - lane, pixel = turn & (kPixels - 1);
    if (pixel == 0) {
      if (busy) splat.flush(target);
      const int index = turn / kPixels * 32 + lane;
      busy = turn >= 0 && index < listed;
      if (busy) splat.take(staged, staged_rows, table.list[index]);
    }
    transmittance = __shfl_up_sync(kWholeWarp, transmittance, 1);
    remainder = __shfl_up_sync(kWholeWarp, remainder, 1);
    if (lane == 0) {
      const float2 entering = table.state[pixel];
      transmittance = entering.x;
      remainder = entering.y;
    }
    if (busy) splat.gather(table.place[pixel], table.v_out[pixel], transmittance, remainder);
    if (lane == 31 && turn >= 0) table.state[pixel] = make_float2(transmittance, remainder);
    __syncwarp();  // lane 31's pixel enters again at lane 0 no sooner than 33 steps from here
  }
  if (busy) splat.flush(target);
}

template <int kChannels>
auto kernel_of(bool absgrad) {
  return absgrad ? backward<kChannels, true> : backward<kChannels, false>;
}

}  // namespace

cudaError_t launch_backward_splat(const RasterInputs& in, const RasterShape& shape, const RasterState& state,
                                  const RasterGradients& pixels, const RecordTarget& target, bool absgrad,
                                  cudaStream_t stream) {
  if (shape.tiles == 0 || shape.rows == 0) return cudaSuccess;  // without tiles nothing has written the slots
  const auto kernel = shape.packed_channels() == 4 ? kernel_of<4>(absgrad) : kernel_of<3>(absgrad);
  kernel<<<unsigned(shape.chunk_slots()), kTileThreads, 0, stream>>>(in.row_ids, int(shape.rows), shape.channels,
                                                                     state, pixels, target);
  return cudaGetLastError();
}

}  // namespace nsmg
