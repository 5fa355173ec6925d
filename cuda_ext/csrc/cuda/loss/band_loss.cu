// Background, L1, SSIM and the gradient back to what was blended, in one kernel: a block walks down a strip of 74
// columns. Half of its warps, "pixels", load each row of the images and finish the row whose gradient is complete;
// the others, "windows", filter for SSIM's moments, evaluate it, and hand its derivatives over. They meet once a row.
// Sums down the columns live in registers, rows pass through shared memory, so nothing but results goes to memory.
//
// Counted for 3840 x 2160 on an H200 (132 multiprocessors, 128 lanes each at 1.7 GHz; 4.0 TB/s), 24.9 M numbers:
// - memory: 19 bytes a pixel in (a quarter of it twice, out of the caches) and 28 out, 0.4 GB: 0.10 ms. Two kernels
//   with the derivatives in memory between them would move 1.1 GB, 0.28 ms.
// - instructions: a row is 296 for a warp of windows (176 multiply-adds and 24 squares for the moments, 60 for SSIM),
//   300 for one of pixels (132 to spread the derivatives), for 64 numbers; of 128 pairs 111 are finished (the border of
//   a strip is filtered again by its neighbour), and 3 % more rows walked: 365 a number, 0.32 ms if none ever waits.
// - shared memory: 80 wavefronts of 128 bytes a row for those two warps, 0.17 ms; one window a lane would make it 0.3.
// So it is bound by instructions, two thirds of them multiply-adds. Registers: 80 sums a lane for windows, 60 for
// pixels; were it the same lanes they would need 140, and half as many warps would fit.
#include "cuda/loss/band_loss.h"

#include "cuda/loss/band_loss_device.h"

namespace nsmg {
namespace {

constexpr int kBlocks = 2;  // that fit on a multiprocessor
constexpr int kWarpsOfGroup = kGroup / 32;

// Returns this lane's share of the sum of SSIM.
__device__ __forceinline__ double walk_windows(const BandView& view, const Walk& walk,
                                               const SsimWindow<float>& window, WalkMemory& memory) {
  const int lane = threadIdx.x, pair = min(lane, kFiltered - 1);
  bool valid[2];     // columns of centres that have a window
  float counted[2];  // 1 for those that count here
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int x = walk.left - kSsimHalf + 2 * (pair / kChannels) + side;
    valid[side] = x >= kSsimHalf && x < view.width - kSsimHalf;
    const bool own = lane < kFiltered && x >= walk.left && x < min(walk.left + kStrip, view.inner.x1);
    counted[side] = own && valid[side] ? 1.0f : 0.0f;
  }
  ColumnPair u, v, uu, vv;
  LongSum sum;
  meet();
#pragma unroll 1
  for (int step = 0; step < walk.steps; ++step) {
    float of_u[2], of_v[2], of_uu[2], of_vv[2];
    const float4* line = memory.images[ring_slot(step)] + pair;
#pragma unroll
    for (int k = 0; k < kPairsOfWindow; ++k) {
      const float4 at = line[kChannels * k];
      add_pair(window, k, at.x, at.y, of_u);
      add_pair(window, k, at.z, at.w, of_v);
      add_pair(window, k, at.x * at.x, at.y * at.y, of_uu);
      add_pair(window, k, at.z * at.z, at.w * at.w, of_vv);
    }
    u.push(window, of_u), v.push(window, of_v), uu.push(window, of_uu), vv.push(window, of_vv);
    if (step >= kWindowRows) {
      const int centre = walk.start + step - kSsimHalf;
      const bool in_view = centre < view.height - kSsimHalf;  // else rows below the image went in
      const WindowPoint p = window_point(of_u[0], of_v[0], of_uu[0], of_vv[0]),
                        q = window_point(of_u[1], of_v[1], of_uu[1], of_vv[1]);
      if (in_view && centre >= walk.first && centre < walk.end)
        sum.recent = fmaf(counted[1], q.value, fmaf(counted[0], p.value, sum.recent));
      const bool first = in_view && valid[0], second = in_view && valid[1];
      if (lane < kFiltered) {
        memory.mean_u[parity(step)][lane] = make_float4(first ? p.by_mean : 0.0f, second ? q.by_mean : 0.0f,
                                                    first ? p.by_u : 0.0f, second ? q.by_u : 0.0f);
        memory.by_v[parity(step)][lane] = make_float2(first ? p.by_v : 0.0f, second ? q.by_v : 0.0f);
      }
      sum.fold(step);
    }
    meet();
  }
  meet(), meet();  // the others are two rows behind
  return sum.value();
}

// Returns this lane's share of the sum of |pred - target|.
template <typename Target>
__device__ __forceinline__ double walk_pixels(const BandView& view, const Walk& walk, const SsimWindow<float>& window,
                                              WalkMemory& memory, const BandResults& results) {
  const int lane = threadIdx.x - kGroup, channel = lane % kChannels, width = view.width, pitch = kChannels * width;
  const int x = walk.left - kWindowRows + 2 * (lane / kChannels);  // of the first pixel, which is loaded and finished
  const bool near = lane < kFiltered, finishes = near && lane >= kBeyond;
  const bool far = lane < kBeyond;  // loads the pair kFar pixels to the right, too
  const float background = __ldg(view.background + channel), by_l1 = __ldg(view.v_l1), by_ssim = __ldg(view.v_ssim);
  const int finished = min(max(lane - kBeyond, 0), kFinished - 1);
  const int shade = lane - kGroup / 2;  // the pair of pixels whose alpha's gradient it adds up, from the third warp on
  const int shade_x = walk.left + 2 * shade;
  bool present[2], far_present[2], own[2], shaded[2];
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    present[side] = near && x + side >= 0 && x + side < width;
    far_present[side] = far && x + kFar + side < width;
    own[side] = finishes && x + side < view.inner.x1;
    shaded[side] = shade >= 0 && shade < kFinished / kChannels && shade_x + side < view.inner.x1;
  }
  // Where the pair that comes in lies, and where the one that is finished goes.
  const int64_t pixel = int64_t(walk.start) * width + x, done_pixel = pixel - int64_t(kDelay) * width;
  const float* out = view.out + kChannels * pixel + channel;
  const float* alpha = view.alpha + pixel;
  const Target* target = static_cast<const Target*>(view.target) + kChannels * pixel + channel;
  float* rgb = results.rgb + kChannels * pixel + channel;
  float* v_out = results.v_out + kChannels * done_pixel + channel;
  float* v_alpha = results.v_alpha + done_pixel - width + (shade_x - x);
  Ahead<Target> ahead, far_ahead;
  ahead.load(out, alpha, target, present);
  far_ahead.load(out + kChannels * kFar, alpha + kFar, target + kChannels * kFar, far_present);
  ColumnPair by_mean, by_u, by_v;
  LongSum sum;
  unsigned passed = 0;  // two bits a row, the newest lowest: where the clamp lets a gradient through
#pragma unroll 1
  for (int round = 0; round < walk.steps + 3; ++round) {
    const int row = walk.start + round, done = row - kDelay;  // what comes in and what is finished
    passed <<= 2;
    if (round < walk.steps && row < view.height) {
      float4* line = memory.images[ring_slot(round)] + lane;
      float shown[2];
      const float4 images = ahead.images(view, background, shown, passed);
      if (near) *line = images;
      if (row >= walk.first && row < walk.end) {
        if (own[0]) rgb[0] = shown[0];
        if (own[1]) rgb[kChannels] = shown[1];
      }
      out += pitch, alpha += width, target += pitch;
      if (row + 1 < view.height) ahead.load(out, alpha, target, present);
      if (far) {
        unsigned ignored = 0;
        line[kFiltered] = far_ahead.images(view, background, shown, ignored);
        if (row + 1 < view.height)
          far_ahead.load(out + kChannels * kFar, alpha + kFar, target + kChannels * kFar, far_present);
      }
    }
    if (round >= kDelay && round < walk.steps + 2) {
      const float4* line = memory.mean_u[parity(round)] + finished;
      const float2* more = memory.by_v[parity(round)] + finished;
      float of_mean[2], of_u[2], of_v[2];
#pragma unroll
      for (int k = 0; k < kPairsOfWindow; ++k) {
        const float4 at = line[kChannels * k];
        const float2 and_v = more[kChannels * k];
        add_pair(window, k, at.x, at.y, of_mean);
        add_pair(window, k, at.z, at.w, of_u);
        add_pair(window, k, and_v.x, and_v.y, of_v);
      }
      by_mean.push(window, of_mean), by_u.push(window, of_u), by_v.push(window, of_v);
      if (done >= walk.first && finishes) {
        const float4 images = memory.images[ring_slot(round - kDelay)][lane];
        float v[2] = {images.z, images.w};
        const float u[2] = {images.x, images.y};
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          if (own[side]) sum.recent += fabsf(v[side]);
          const float ssim = fmaf(v[side], of_v[side], fmaf(u[side], of_u[side], of_mean[side]));
          const float sign = v[side] > 0 ? by_l1 : v[side] < 0 ? -by_l1 : 0.0f;
          v[side] = passed >> (2 * kDelay + side) & 1 ? fmaf(by_ssim, ssim, sign) : 0.0f;
          if (own[side]) v_out[kChannels * side] = v[side];
        }
        memory.shades[parity(round)][finished] = make_float2(v[0] * background, v[1] * background);
      }
      sum.fold(round);
    }
    if (done > walk.first && shaded[0]) {  // what was finished in the round before
      const float2* shades = memory.shades[parity(round + 1)] + kChannels * shade;
      const float2 r = shades[0], g = shades[1], b = shades[2];
      v_alpha[0] = -(r.x + g.x + b.x);
      if (shaded[1]) v_alpha[1] = -(r.y + g.y + b.y);
    }
    rgb += pitch, v_out += pitch, v_alpha += width;
    meet();
  }
  return sum.value();
}

// Pixels outside the inner rectangle are shown, and nothing comes from them.
__device__ __forceinline__ void do_fringe(const BandView& view, int block, const BandResults& results) {
  const LossRectangle& inner = view.inner;
  const int across = inner.x1 - inner.x0, sides = view.width - across;
  const int above = inner.y0 * view.width, below = (view.height - inner.y1) * view.width;
  const int all = above + below + sides * (inner.y1 - inner.y0);
  for (int k = 0; k < 4; ++k) {
    const int n = (4 * block + k) * kThreads + int(threadIdx.x);
    if (n >= all) return;
    int pixel = n;
    if (n >= above + below) {
      const int column = (n - above - below) % sides;
      pixel = (inner.y0 + (n - above - below) / sides) * view.width + column + (column < inner.x0 ? 0 : across);
    } else if (n >= above) {
      pixel = inner.y1 * view.width + n - above;
    }
    const float alpha = __ldg(view.alpha + pixel);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      const size_t number = size_t(kChannels * pixel + c);
      results.rgb[number] = clamped(blend(__ldg(view.out + number), alpha, __ldg(view.background + c)), view);
      results.v_out[number] = 0;
    }
    results.v_alpha[pixel] = 0;
    if (results.last != nullptr) results.last[pixel] = -1;
  }
}

template <int kMost>
struct Bands {
  Band band[kMost];
  int count;
};

// sums: of each band, those of L1, one a walk, then of SSIM.
template <typename Target, int kMost>
__global__ void __launch_bounds__(kThreads, kBlocks)
    band_kernel(const __grid_constant__ Bands<kMost> bands, const __grid_constant__ SsimWindow<float> window,
                double* __restrict__ sums) {
  __shared__ WalkMemory memory;
  int number = 0;
  if constexpr (kMost > 1)
    while (number + 1 < bands.count && int(blockIdx.x) >= bands.band[number + 1].first_block) ++number;
  const Band& band = bands.band[number];
  const int block = int(blockIdx.x) - band.first_block;
  if (block >= band.plan.walks) {
    do_fringe(band.view, block - band.plan.walks, band.results);
    return;
  }
  const Walk walk = walk_at(band.view, band.plan, block);
  const bool windows = threadIdx.x < kGroup;
  const double sum = total_of_warp(windows ? walk_windows(band.view, walk, window, memory)
                                           : walk_pixels<Target>(band.view, walk, window, memory, band.results));
  if (threadIdx.x % 32 == 0) memory.sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x % kGroup != 0) return;
  double total = 0;
  for (int warp = 0; warp < kWarpsOfGroup; ++warp) total += memory.sums[threadIdx.x / 32 + warp];
  sums[band.first_sum + (windows ? band.plan.walks + block : block)] = total;
}

// A thread adds what was found of each band to the losses, in order: bands may share one.
template <int kMost>
__global__ void __launch_bounds__(kThreads)
    totals_kernel(const __grid_constant__ Bands<kMost> bands, const double* __restrict__ sums) {
  constexpr int kWarps = kThreads / 32;
  __shared__ double of_warps[kMost][2][kWarps];
  for (int number = 0; number < bands.count; ++number) {
    const double* own = sums + bands.band[number].first_sum;
    const int walks = bands.band[number].plan.walks;
    double both[2] = {};
    for (int k = threadIdx.x; k < walks; k += kThreads) both[0] += own[k], both[1] += own[walks + k];
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const double total = total_of_warp(both[which]);
      if (threadIdx.x % 32 == 0) of_warps[number][which][threadIdx.x / 32] = total;
    }
  }
  __syncthreads();
  const int number = threadIdx.x / 2, which = threadIdx.x % 2;
  if (number < bands.count)
    for (int warp = 1; warp < kWarps; ++warp) of_warps[number][which][0] += of_warps[number][which][warp];
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int k = 0; k < bands.count; ++k) {
    const BandResults& results = bands.band[k].results;
    const BandView& view = bands.band[k].view;
    const double l1 = of_warps[k][0][0], ssim = of_warps[k][1][0];
    *results.loss += float(results.offset + results.scale * (*view.v_l1 * l1 + *view.v_ssim * ssim));
  }
}

template <int kMost>
cudaError_t launch(const Band* given, int count, double* sums, cudaStream_t stream) {
  Bands<kMost> bands;
  for (int k = 0; k < count; ++k) bands.band[k] = given[k];
  bands.count = count;
  const BandPlan& last = given[count - 1].plan;
  const int blocks = given[count - 1].first_block + last.walks + last.fringe_blocks;
  const SsimWindow<float> window = make_ssim_window<float>();
  if (blocks > 0 && given[0].view.target_bytes)
    band_kernel<uint8_t, kMost><<<blocks, kThreads, 0, stream>>>(bands, window, sums);
  else if (blocks > 0)
    band_kernel<float, kMost><<<blocks, kThreads, 0, stream>>>(bands, window, sums);
  totals_kernel<kMost><<<1, kThreads, 0, stream>>>(bands, sums);
  return cudaGetLastError();
}

// As many segments as make the fewest rows one after the other, in so many places for blocks: those of a segment, and
// what it walks in vain.
BandPlan plan_of(const BandView& view, int64_t places) {
  const int across = view.inner.x1 - view.inner.x0, down = view.inner.y1 - view.inner.y0;
  const int outside = view.width * view.height - across * down;
  BandPlan plan = {0, 0, 0, 0, (outside + 4 * kThreads - 1) / (4 * kThreads)};
  if (across == 0 || down == 0) return plan;
  plan.strips = (across + kStrip - 1) / kStrip;
  int64_t least = -1;
  for (int waves = 1; waves <= 8; ++waves) {
    const int64_t wanted = smaller<int64_t>(larger<int64_t>(waves * places / plan.strips, 1), down);
    const int64_t rows = (down + wanted - 1) / wanted, segments = (down + rows - 1) / rows;
    const int64_t cost = (plan.strips * segments + places - 1) / places * (rows + kWindowRows * 3 / 2);
    if (least < 0 || cost < least) least = cost, plan.segments = int(segments), plan.rows = int(rows);
  }
  plan.walks = plan.strips * plan.segments;
  return plan;
}

int64_t area_of(const LossRectangle& inner) { return int64_t(inner.x1 - inner.x0) * (inner.y1 - inner.y0); }

}  // namespace

cudaError_t band_loss_plan(Band* bands, int count, int64_t* sums) {
  int device = 0, multiprocessors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess)
    status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  const int64_t places = int64_t(kBlocks) * multiprocessors;
  int64_t area = 0, first_block = 0;
  for (int k = 0; k < count; ++k) area += area_of(bands[k].view.inner);
  *sums = 0;
  for (int k = 0; k < count; ++k) {
    Band& band = bands[k];
    const int64_t share = area > 0 ? places * area_of(band.view.inner) / area : places;
    band.plan = plan_of(band.view, larger<int64_t>(share, 1));
    band.first_block = int(first_block), band.first_sum = int(*sums);
    first_block += band.plan.walks + band.plan.fringe_blocks, *sums += 2 * band.plan.walks;
  }
  return cudaSuccess;
}

cudaError_t band_loss_launch(const Band* bands, int count, double* sums, cudaStream_t stream) {
  return count == 1 ? launch<1>(bands, 1, sums, stream) : launch<kMostBands>(bands, count, sums, stream);
}

}  // namespace nsmg
