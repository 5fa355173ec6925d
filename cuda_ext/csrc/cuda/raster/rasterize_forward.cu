// Forward compositing of 16x16 tiles, up to 4 channels. A block takes one tile, long lists first. Packed splats come
// into shared memory 128 at a time, the next ones while these are blended; each warp keeps those that may reach its
// 8x8 sub-tile. Every 256 splats the pixels' state is left for the backward pass.
//
// One list that is far longer than others would keep all waiting. So lists above a length are split into segments, a
// block each. A pass before this one finds what each segment alone lets through; the products of these are what the
// segments begin with. The last block of a tile to end adds up. Sums are those of an unsplit list but for rounding.
#include <algorithm>

#include "cuda/raster/rasterize_device.h"

namespace nsmg {
namespace {

constexpr int kBatch = 128;
constexpr int kSegmentBlocks = 1056;  // at most: eight on each of 132 multiprocessors
static_assert(kSegment % (2 * kBatch) == 0, "the next segment may fill the first buffer while this one's last is read");
constexpr float kBeganClosed = -2.0f;  // the transmittance of a pixel that was closed before the segment
constexpr int kPieces = kBatch * 3 / kTileThreads;  // 16-byte pieces that a thread brings

template <int kChannels>
struct Pixel {
  float transmittance;  // negative: closed, or no pixel at all
  int last = -1;
  float sums[kChannels > 0 ? kChannels : 1] = {};
};

// The pieces of consecutive lanes lie side by side, three to a splat, so that a splat's two sectors are asked for once.
struct Stager {
  const int32_t* __restrict__ row_ids;  // of the list, or of a segment
  const float4* __restrict__ table;
  int rows, count;
  int piece_rows[kPieces];

  __device__ __forceinline__ void find_rows(int batch) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int splat = batch * kBatch + (int(threadIdx.x) + j * kTileThreads) / 3;
      piece_rows[j] = splat < count ? table_row(row_ids, splat, rows) : -1;
    }
  }

  __device__ __forceinline__ void copy(float4* staged) const {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int piece = int(threadIdx.x) + j * kTileThreads;
      if (piece_rows[j] >= 0) copy_async_16(staged + piece, table + 3 * int64_t(piece_rows[j]) + piece % 3);
    }
  }
};

template <int kChannels>
__device__ __forceinline__ void blend(Pixel<kChannels>& pixel, bool counts, float exponent, const float (&features)[4],
                                      int position) {
  const float weight = blend_weight(counts ? exp2_fast(exponent) : 0.0f, pixel.transmittance);
#pragma unroll
  for (int d = 0; d < kChannels; ++d) pixel.sums[d] = fmaf(weight, features[d], pixel.sums[d]);
  if (weight > 0.0f) pixel.last = position;
}

template <int kChannels>
__device__ __forceinline__ void write_sums(const float* sums, const RasterOutputs& outputs, int64_t place,
                                           int channels) {
  if (kChannels == 4) {
    *reinterpret_cast<float4*>(outputs.out + 4 * place) =
        make_float4(sums[0], sums[1], sums[2], sums[kChannels - 1]);
  } else {
#pragma unroll
    for (int d = 0; d < kChannels; ++d)
      if (d < channels) outputs.out[place * channels + d] = sums[d];
  }
}

template <int kChannels>
__device__ __forceinline__ void write_pixel(const Pixel<kChannels>& pixel, const RasterOutputs& outputs, int64_t place,
                                            int channels) {
  const float covered = 1.0f - fabsf(pixel.transmittance);
  outputs.alpha[place] = outputs.mark_stops && pixel.transmittance < 0.0f ? -covered : covered;
  outputs.last[place] = pixel.last;
  write_sums<kChannels>(pixel.sums, outputs, place, channels);
}

template <int kChannels>
__device__ __forceinline__ void write_checkpoint(const Pixel<kChannels>& pixel, float* checkpoint) {
  checkpoint[0] = pixel.transmittance;
#pragma unroll
  for (int d = 0; d < kChannels; ++d) checkpoint[(d + 1) * kChunk] = pixel.sums[d];
}

// The two pixels of a thread, one four lines below the other.
struct Spot {
  SubTile part;
  int column, line, thread;  // thread: the upper pixel's place among the 256 of a checkpoint, the lower one's is 32 on

  __device__ __forceinline__ explicit Spot(const TileInfo& info)
      : part(sub_tile(info, threadIdx.x / 32)),
        column(threadIdx.x % 32 % kSubTile),
        line(threadIdx.x % 32 / kSubTile),
        thread(threadIdx.x / 32 * 64 + threadIdx.x % 32) {}
  __device__ __forceinline__ bool has_upper() const { return column < part.width && line < part.height; }
  __device__ __forceinline__ bool has_lower() const { return column < part.width && line + 4 < part.height; }
  __device__ __forceinline__ int64_t upper(const TileInfo& info) const {
    return info.pixel + int64_t(part.y + line) * info.pitch + part.x + column;
  }
  __device__ __forceinline__ int64_t lower(const TileInfo& info) const { return upper(info) + 4 * int64_t(info.pitch); }
};

using Stage = float4[2][kBatch * 3];

// Blends splats [begin, begin + count) of row_ids, a list or a segment of one, into the thread's pixels. Before each
// chunk of them but the first it leaves the pixels' state in `checkpoints`; without channels it leaves none.
template <int kChannels>
__device__ __forceinline__ void walk(const int32_t* __restrict__ row_ids, int begin, int count,
                                     const float4* __restrict__ table, int rows, const TileInfo& info,
                                     const Spot& spot, float* checkpoints, Stage& staged, Pixel<kChannels>& upper,
                                     Pixel<kChannels>& lower) {
  const int lane = threadIdx.x % 32;
  const float x = float(info.x0 + spot.part.x + spot.column) + 0.5f;
  const float upper_y = float(info.y0 + spot.part.y + spot.line) + 0.5f, lower_y = upper_y + 4.0f;
  Stager stager{row_ids + begin, table, rows, count, {}};
  stager.find_rows(0);
  stager.copy(staged[0]);
  stager.find_rows(1);
  bool done = __all_sync(kWholeWarp, upper.transmittance < 0.0f && lower.transmittance < 0.0f);
  for (int batch = 0; batch * kBatch < count; ++batch) {
    wait_for_copies();
    if (__syncthreads_and(done)) break;  // also: all copies are in, and the other buffer is free
    stager.copy(staged[(batch + 1) % 2]);
    stager.find_rows(batch + 2);
    if (done) continue;
    if (kChannels > 0 && batch > 0 && batch % (kChunk / kBatch) == 0) {
      float* checkpoint =
          checkpoints + int64_t(batch / (kChunk / kBatch) - 1) * (kChunk * (1 + kChannels)) + spot.thread;
      write_checkpoint(upper, checkpoint);
      write_checkpoint(lower, checkpoint + 32);
    }
    const int here = min(kBatch, count - batch * kBatch);
    for (int start = 0; start < here && !done; start += 32) {
      const float4* splats = staged[batch % 2] + 3 * start;
      unsigned left = reaching(splats + 3 * lane, start + lane < here, spot.part);
      while (left != 0) {
        const int k = __ffs(left) - 1;
        left &= left - 1;
        const ScaledSplat s = unpack(splats[3 * k], splats[3 * k + 1]);
        const float dx = s.mean_x - x, upper_dy = s.mean_y - upper_y, lower_dy = s.mean_y - lower_y;
        const float b_dx = s.b * dx, a_dx_dx = s.a * dx * dx;
        const float upper_sigma = sigma2_of_column(b_dx, a_dx_dx, s.c, upper_dy);
        const float lower_sigma = sigma2_of_column(b_dx, a_dx_dx, s.c, lower_dy);
        const bool upper_counts = float_bits(upper_sigma) < s.limit, lower_counts = float_bits(lower_sigma) < s.limit;
        if (upper_counts || lower_counts) {
          const float4 f = splats[3 * k + 2];
          const float features[4] = {f.x, f.y, f.z, splats[3 * k + 1].w};
          const int position = begin + batch * kBatch + start + k;
          blend(upper, upper_counts, s.log2_opacity - upper_sigma, features, position);
          blend(lower, lower_counts, s.log2_opacity - lower_sigma, features, position);
        }
      }
      done = __all_sync(kWholeWarp, upper.transmittance < 0.0f && lower.transmittance < 0.0f);
    }
  }
  wait_for_copies();
}

// Writes both pixels, and where the deepest splat of the tile lies that reached any.
template <int kChannels>
__device__ __forceinline__ void write_tile(const Pixel<kChannels>& upper, const Pixel<kChannels>& lower,
                                           const Spot& spot, const TileInfo& info, int tile, const RasterState& state,
                                           const RasterOutputs& outputs, int channels, int (&warp_last)[kTileWarps]) {
  if (spot.has_upper()) write_pixel(upper, outputs, spot.upper(info), channels);
  if (spot.has_lower()) write_pixel(lower, outputs, spot.lower(info), channels);
  const int last = __reduce_max_sync(kWholeWarp, max(upper.last, lower.last));
  if (threadIdx.x % 32 == 0) warp_last[threadIdx.x / 32] = last;
  __syncthreads();
  if (threadIdx.x == 0) {
    const int deepest = max(max(warp_last[0], warp_last[1]), max(warp_last[2], warp_last[3]));
    state.reached[tile] = deepest < 0 ? info.first : deepest + 1;
  }
}

// ---- lists that are split ----

__device__ __forceinline__ int segments_of(const TileInfo& info) {
  return (info.end - info.first + kSegment - 1) / kSegment;
}

__device__ __forceinline__ int begin_of(const TileInfo& info, const Segment& segment) {
  return info.first + segment.index * kSegment;
}

__device__ __forceinline__ int count_of(const TileInfo& info, const Segment& segment) {
  return min(kSegment, info.end - begin_of(info, segment));
}

// What each segment alone lets through. Nobody asks it of the last ones.
__global__ void __launch_bounds__(kTileThreads, 10)
let_through(const int32_t* __restrict__ row_ids, int rows, RasterState state, RasterPlan plan, RasterOutputs outputs) {
  __shared__ Stage staged;
  const int count = min(*plan.segment_count, plan.most);
  for (int i = blockIdx.x; i < count; i += gridDim.x) {
    const Segment segment = plan.segments[i];
    const TileInfo info = state.tiles[segment.tile];
    const Spot spot(info);
    if (segment.index == 0) {
      if (spot.has_upper()) outputs.last[spot.upper(info)] = -1;
      if (spot.has_lower()) outputs.last[spot.lower(info)] = -1;
    }
    if (segment.index + 1 == segments_of(info)) continue;  // the whole block
    Pixel<0> upper, lower;
    upper.transmittance = spot.has_upper() ? 1.0f : -1.0f;
    lower.transmittance = spot.has_lower() ? 1.0f : -1.0f;
    walk(row_ids, begin_of(info, segment), count_of(info, segment), state.table, rows, info, spot, nullptr, staged,
         upper, lower);
    float* alone = plan.transmittances + int64_t(i) * kChunk + spot.thread;
    alone[0] = upper.transmittance;
    alone[32] = lower.transmittance;
  }
}

// What a pixel begins a segment with.
__device__ __forceinline__ float transmittance_before(const float* alone, int index) {
  float product = 1.0f;
  for (int k = 0; k < index; ++k) {
    const float own = alone[k * kChunk];
    product *= own;
    if (own < 0.0f || product <= kTransmittanceMin<float>) return kBeganClosed;
  }
  return product;
}

// What a segment leaves of a pixel: the checkpoint that follows it or, behind the last one, the outputs.
template <int kChannels>
__device__ __forceinline__ void leave_segment(const Pixel<kChannels>& pixel, float* checkpoint,
                                              const RasterOutputs& outputs, int64_t place, int channels) {
  if (pixel.last >= 0) atomicMax(outputs.last + place, pixel.last);
  if (checkpoint != nullptr) {
    write_checkpoint(pixel, checkpoint);
  } else {
    outputs.alpha[place] = pixel.transmittance;
    write_sums<kChannels>(pixel.sums, outputs, place, channels);
  }
}

// A pixel, all of whose segments have ended. Sums at their ends become those from the list's start.
template <int kChannels>
__device__ __forceinline__ Pixel<kChannels> add_up(float* checkpoint, int segments, const RasterOutputs& outputs,
                                                   int64_t place, int channels) {
  Pixel<kChannels> pixel;
  pixel.transmittance = 1.0f;
  // Other blocks wrote this: it is not looked for in this multiprocessor's own cache.
  for (int k = 0; k + 1 < segments; ++k, checkpoint += kSegmentChunks * kChunk * (1 + kChannels)) {
    const float after = __ldcg(checkpoint);
    if (after != kBeganClosed) pixel.transmittance = after;
#pragma unroll
    for (int d = 0; d < kChannels; ++d) {
      pixel.sums[d] += __ldcg(checkpoint + (d + 1) * kChunk);
      checkpoint[(d + 1) * kChunk] = pixel.sums[d];
    }
  }
  const float after = __ldcg(outputs.alpha + place);
  pixel.transmittance = after != kBeganClosed ? after : -fabsf(pixel.transmittance);
#pragma unroll
  for (int d = 0; d < kChannels; ++d)
    if (d < channels) pixel.sums[d] += __ldcg(outputs.out + place * channels + d);
  pixel.last = __ldcg(outputs.last + place);
  return pixel;
}

// Leaves what has become of a segment. Whether all of the tile's have ended; then the pixels are the whole list's.
template <int kChannels>
__device__ __forceinline__ bool end_segment(Pixel<kChannels>& upper, Pixel<kChannels>& lower, const Segment& segment,
                                            const Spot& spot, const TileInfo& info, const RasterState& state,
                                            const RasterPlan& plan, const RasterOutputs& outputs, int channels,
                                            int& ended) {
  const int segments = segments_of(info);
  float *above = nullptr, *below = nullptr;
  if (segment.index + 1 < segments) {
    above = checkpoint_before<kChannels>(state, info, (segment.index + 1) * kSegmentChunks) + spot.thread;
    below = above + 32;
  }
  if (spot.has_upper()) leave_segment(upper, above, outputs, spot.upper(info), channels);
  if (spot.has_lower()) leave_segment(lower, below, outputs, spot.lower(info), channels);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) ended = atomicAdd(plan.ended + segment.tile, 1) + 1;
  __syncthreads();
  if (ended != segments) return false;  // it is written again behind the next segment's barriers
  __threadfence();
  float* first = checkpoint_before<kChannels>(state, info, kSegmentChunks) + spot.thread;
  if (spot.has_upper()) upper = add_up<kChannels>(first, segments, outputs, spot.upper(info), channels);
  if (spot.has_lower()) lower = add_up<kChannels>(first + 32, segments, outputs, spot.lower(info), channels);
  return true;
}

// ---- the kernel ----

// The first `segment_blocks` blocks take one segment after the other, the others a tile each.
template <int kChannels, bool kSplits>
__global__ void __launch_bounds__(kTileThreads, kSplits ? 8 : 10)
forward(const int32_t* __restrict__ row_ids, int rows, int channels, RasterState state, RasterPlan plan,
        int segment_blocks, RasterOutputs outputs) {
  __shared__ Stage staged;
  __shared__ int warp_last[kTileWarps], ended;
  const bool whole = !kSplits || int(blockIdx.x) >= segment_blocks;
  const int count = whole ? 0 : min(*plan.segment_count, plan.most);
  for (int i = blockIdx.x; whole || i < count; i += segment_blocks) {
    const Segment segment = whole ? Segment{plan.order[i - segment_blocks], 0} : plan.segments[i];
    const TileInfo info = state.tiles[segment.tile];
    if (kSplits && whole && state.is_split(info)) return;
    const Spot spot(info);
    Pixel<kChannels> upper, lower;
    const float* alone = plan.transmittances + int64_t(i - segment.index) * kChunk + spot.thread;
    upper.transmittance = spot.has_upper() ? (whole ? 1.0f : transmittance_before(alone, segment.index)) : -1.0f;
    lower.transmittance = spot.has_lower() ? (whole ? 1.0f : transmittance_before(alone + 32, segment.index)) : -1.0f;
    const int all = rows > 0 ? info.end - info.first : 0;
    walk(row_ids, begin_of(info, segment), whole ? all : count_of(info, segment), state.table, rows, info, spot,
         checkpoint_before<kChannels>(state, info, segment.index * kSegmentChunks + 1), staged, upper, lower);
    if (whole || end_segment(upper, lower, segment, spot, info, state, plan, outputs, channels, ended))
      write_tile(upper, lower, spot, info, segment.tile, state, outputs, channels, warp_last);
    if (whole) return;
  }
}

}  // namespace

cudaError_t launch_forward(const RasterInputs& in, const RasterShape& shape, const RasterState& state,
                           const RasterPlan& plan, const RasterOutputs& outputs, cudaStream_t stream) {
  if (shape.tiles == 0) return cudaSuccess;
  const int segment_blocks = std::min(plan.most, kSegmentBlocks);
  if (segment_blocks > 0)
    let_through<<<unsigned(segment_blocks), kTileThreads, 0, stream>>>(in.row_ids, int(shape.rows), state, plan,
                                                                       outputs);
  const auto kernel = shape.packed_channels() == 4 ? (segment_blocks > 0 ? forward<4, true> : forward<4, false>)
                                                   : (segment_blocks > 0 ? forward<3, true> : forward<3, false>);
  kernel<<<unsigned(shape.tiles + segment_blocks), kTileThreads, 0, stream>>>(
      in.row_ids, int(shape.rows), shape.channels, state, plan, segment_blocks, outputs);
  return cudaGetLastError();
}

}  // namespace nsmg
