// L1 and SSIM of a patch with the gradient of the SSIM sum: two kernels that filter, and one that adds up.
//
// The first filters both images and leaves the three derivatives of SSIM at each window centre, the second spreads them
// back over the windows. In both, a warp walks down a strip 32 numbers wide (pixels stay interleaved: every third
// number is of the same channel). For each row of the image it filters along the row out of its own piece of shared
// memory, and the sum down the columns lives in registers: a filter in transposed form, where each new row costs one
// multiply-add a tap. So a number of an image is read from memory about twice, and warps never wait for each other.
// Merging the two kernels would save the round trip of the derivatives (72 bytes a pixel), but every tile would filter
// a border of 10 more pixels; the two come out alike, and this is the simpler.
#include <cuda_runtime.h>

#include "common/ssim.h"
#include "cuda/loss/l1_ssim.h"

namespace nsmg {
namespace {

constexpr int kChannels = 3, kBorder = 2 * kSsimHalf * kChannels;
constexpr int kStrip = 32, kLoaded = kStrip + kBorder, kLine = 2 * kStrip;  // numbers; a lane loads two
constexpr int kSegment = 40;                                               // rows that a warp puts out
constexpr int kWarps = 4, kThreads = 32 * kWarps;
static_assert(kLoaded <= kLine, "two numbers a lane must cover the strip with its border");

// Work of one warp: the numbers [first, first + kStrip) of the rows [row, row + rows).
struct Piece {
  int first, row, rows;
};

int strips(int numbers) { return (numbers + kStrip - 1) / kStrip; }
int64_t parts(int numbers, int rows) { return int64_t(strips(numbers)) * ((rows + kSegment - 1) / kSegment); }

__device__ __forceinline__ Piece piece_at(int64_t index, int numbers, int rows) {
  const int across = (numbers + kStrip - 1) / kStrip;
  const int row = int(index / across) * kSegment;
  return {int(index % across) * kStrip, row, min(kSegment, rows - row)};
}

// The filter down the columns, fed one row after the other.
struct Column {
  float pending[kSsimTaps - 1] = {};

  // The filtered value of the last 11 rows, of which `value` is the newest.
  __device__ __forceinline__ float push(const SsimWindow<float>& window, float value) {
    const float out = fmaf(window.weight[0], value, pending[0]);
#pragma unroll
    for (int k = 0; k < kSsimTaps - 2; ++k) pending[k] = fmaf(window.weight[k + 1], value, pending[k + 1]);
    pending[kSsimTaps - 2] = window.weight[kSsimTaps - 1] * value;
    return out;
  }
};

__device__ __forceinline__ double warp_total(double value) {
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

// maps: three planes [rows, numbers] of the derivatives; sums: one a piece.
template <typename Target>
__global__ void __launch_bounds__(kThreads)
    derivatives_kernel(const float* __restrict__ pred, const Target* __restrict__ target, int pitch,
                       LossRectangle centres, const __grid_constant__ SsimWindow<float> window,
                       float* __restrict__ maps, double* __restrict__ sums, int64_t all) {
  __shared__ float2 lines[kWarps][2][kLine];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t index = int64_t(blockIdx.x) * kWarps + warp;
  if (index >= all) return;
  const int numbers = (centres.x1 - centres.x0) * kChannels, rows = centres.y1 - centres.y0;
  const Piece piece = piece_at(index, numbers, rows);
  const int loaded = min(kLoaded, numbers + kBorder - piece.first);
  const bool near = lane < loaded, far = lane + kStrip < loaded, out = piece.first + lane < numbers;
  const size_t corner = size_t(centres.y0 - kSsimHalf + piece.row) * pitch +
                        size_t(centres.x0 - kSsimHalf) * kChannels + piece.first + lane;
  const float* p = pred + corner;
  const Target* t = target + corner;
  const size_t plane = size_t(rows) * numbers;
  float* map = maps + size_t(piece.row) * numbers + piece.first + lane;

  float p_near = near ? __ldg(p) : 0, p_far = far ? __ldg(p + kStrip) : 0;
  float t_near = near ? image_value(__ldg(t)) : 0, t_far = far ? image_value(__ldg(t + kStrip)) : 0;
  Column u, v, uu, vv;
  float sum = 0;
  const int steps = piece.rows + 2 * kSsimHalf;
  for (int step = 0; step < steps; ++step) {
    float2* line = lines[warp][step & 1];  // the other one may still be read by slower lanes
    line[lane] = make_float2(p_near + t_near, p_near - t_near);
    line[lane + kStrip] = make_float2(p_far + t_far, p_far - t_far);
    __syncwarp();
    if (step + 1 < steps) {
      p += pitch;
      t += pitch;
      p_near = near ? __ldg(p) : 0, p_far = far ? __ldg(p + kStrip) : 0;
      t_near = near ? image_value(__ldg(t)) : 0, t_far = far ? image_value(__ldg(t + kStrip)) : 0;
    }
    float row_u = 0, row_v = 0, row_uu = 0, row_vv = 0;
#pragma unroll
    for (int k = 0; k < kSsimTaps; ++k) {
      const float2 pair = line[lane + kChannels * k];
      const float wu = window.weight[k] * pair.x, wv = window.weight[k] * pair.y;
      row_u += wu;
      row_v += wv;
      row_uu = fmaf(wu, pair.x, row_uu);
      row_vv = fmaf(wv, pair.y, row_vv);
    }
    const float mean_u = u.push(window, row_u), mean_v = v.push(window, row_v);
    const float mean_uu = uu.push(window, row_uu), mean_vv = vv.push(window, row_vv);
    if (step >= 2 * kSsimHalf && out) {
      const SsimPoint<float> at = ssim_point(mean_u, mean_v, mean_uu, mean_vv);
      sum += at.value;
      map[0] = at.d_mu;
      map[plane] = at.d_xx;
      map[2 * plane] = at.d_xy;
      map += numbers;
    }
  }
  const double total = warp_total(sum);
  if (lane == 0) sums[index] = total;
}

// Over the whole patch: gradient is zero at pixels in no window; sums: of |pred - target|, one a piece.
template <typename Target>
__global__ void __launch_bounds__(kThreads)
    gradient_kernel(const float* __restrict__ pred, const Target* __restrict__ target, int pitch, int height,
                    LossRectangle inner, LossRectangle centres, const __grid_constant__ SsimWindow<float> window,
                    const float* __restrict__ maps, float* __restrict__ gradient, double* __restrict__ sums,
                    int64_t all) {
  __shared__ float2 lines[kWarps][2][kLine];
  __shared__ float more_lines[kWarps][2][kLine];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t index = int64_t(blockIdx.x) * kWarps + warp;
  if (index >= all) return;
  const Piece piece = piece_at(index, pitch, height);
  const int numbers = (centres.x1 - centres.x0) * kChannels, rows = centres.y1 - centres.y0;
  const size_t plane = size_t(rows) * numbers;
  const int column = piece.first + lane;
  const int near_at = column - (kSsimHalf + centres.x0) * kChannels, far_at = near_at + kStrip;
  const bool near = near_at >= 0 && near_at < numbers, far = far_at >= 0 && far_at < numbers;
  const bool out = column < pitch, counted = column >= inner.x0 * kChannels && column < inner.x1 * kChannels;
  const int top = piece.row - kSsimHalf - centres.y0;  // row of the maps that the first step takes

  float mu[2], xx[2], xy[2];
  const auto load = [&](int step) {
    const int row = top + step;
    const bool present = row >= 0 && row < rows;
    const float* map = maps + int64_t(row) * numbers;
    const float* maps_of_row[3] = {map, map + plane, map + 2 * plane};
    mu[0] = present && near ? __ldg(maps_of_row[0] + near_at) : 0;
    xx[0] = present && near ? __ldg(maps_of_row[1] + near_at) : 0;
    xy[0] = present && near ? __ldg(maps_of_row[2] + near_at) : 0;
    mu[1] = present && far ? __ldg(maps_of_row[0] + far_at) : 0;
    xx[1] = present && far ? __ldg(maps_of_row[1] + far_at) : 0;
    xy[1] = present && far ? __ldg(maps_of_row[2] + far_at) : 0;
  };
  load(0);
  Column column_mu, column_xx, column_xy;
  float sum = 0;
  const int steps = piece.rows + 2 * kSsimHalf;
  for (int step = 0; step < steps; ++step) {
    float2* line = lines[warp][step & 1];
    float* more = more_lines[warp][step & 1];
    line[lane] = make_float2(mu[0], xx[0]);
    line[lane + kStrip] = make_float2(mu[1], xx[1]);
    more[lane] = xy[0];
    more[lane + kStrip] = xy[1];
    __syncwarp();
    if (step + 1 < steps) load(step + 1);
    const int y = piece.row + step - 2 * kSsimHalf;  // the row that is complete after this step
    const bool write = y >= piece.row && out;
    const size_t place = write ? size_t(y) * pitch + column : 0;
    const float p = write ? __ldg(pred + place) : 0, t = write ? image_value(__ldg(target + place)) : 0;
    float row_mu = 0, row_xx = 0, row_xy = 0;
#pragma unroll
    for (int k = 0; k < kSsimTaps; ++k) {
      const float2 pair = line[lane + kChannels * k];
      row_mu = fmaf(window.weight[k], pair.x, row_mu);
      row_xx = fmaf(window.weight[k], pair.y, row_xx);
      row_xy = fmaf(window.weight[k], more[lane + kChannels * k], row_xy);
    }
    const float g_mu = column_mu.push(window, row_mu), g_xx = column_xx.push(window, row_xx),
                g_xy = column_xy.push(window, row_xy);
    if (write) {
      gradient[place] = fmaf(t, g_xy, fmaf(2 * p, g_xx, g_mu));
      if (counted && y >= inner.y0 && y < inner.y1) sum += fabsf(p - t);
    }
  }
  const double total = warp_total(sum);
  if (lane == 0) sums[index] = total;
}

constexpr int kSumThreads = 1024;

// Block 0 adds up the first array, block 1 the second.
__global__ void __launch_bounds__(kSumThreads)
    totals_kernel(const double* l1, int64_t l1_count, const double* ssim, int64_t ssim_count, float* l1_sum,
                  float* ssim_sum) {
  __shared__ double of_warps[kSumThreads / 32];
  const double* values = blockIdx.x == 0 ? l1 : ssim;
  const int64_t count = blockIdx.x == 0 ? l1_count : ssim_count;
  double sum = 0;
  for (int64_t k = threadIdx.x; k < count; k += kSumThreads) sum += values[k];
  sum = warp_total(sum);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = warp_total(of_warps[threadIdx.x]);
  if (threadIdx.x == 0) *(blockIdx.x == 0 ? l1_sum : ssim_sum) = float(sum);
}

struct Workload {
  LossRectangle centres;
  int64_t numbers;  // of one plane of derivatives
  int64_t centre_parts, parts;
};

Workload workload(const LossImages& images, const LossRectangle& inner) {
  const LossRectangle c = loss_centres(images, inner);
  const int numbers = (c.x1 - c.x0) * kChannels, rows = c.y1 - c.y0;
  return {c, int64_t(rows) * numbers, parts(numbers, rows), parts(images.width * kChannels, images.height)};
}

template <typename Target>
cudaError_t launch(const LossImages& images, const LossRectangle& inner, void* workspace, float* l1_sum,
                   float* ssim_sum, float* gradient, cudaStream_t stream) {
  const Workload work = workload(images, inner);
  const SsimWindow<float> window = make_ssim_window<float>();
  const Target* target = static_cast<const Target*>(images.target);
  const int pitch = images.width * kChannels;
  double* l1 = static_cast<double*>(workspace);
  double* ssim = l1 + work.parts;
  float* maps = reinterpret_cast<float*>(ssim + work.centre_parts);
  const auto blocks = [](int64_t warps) { return int((warps + kWarps - 1) / kWarps); };
  if (work.centre_parts > 0)
    derivatives_kernel<Target><<<blocks(work.centre_parts), kThreads, 0, stream>>>(
        images.pred, target, pitch, work.centres, window, maps, ssim, work.centre_parts);
  if (work.parts > 0)
    gradient_kernel<Target><<<blocks(work.parts), kThreads, 0, stream>>>(
        images.pred, target, pitch, images.height, inner, work.centres, window, maps, gradient, l1, work.parts);
  totals_kernel<<<2, kSumThreads, 0, stream>>>(l1, work.parts, ssim, work.centre_parts, l1_sum, ssim_sum);
  return cudaGetLastError();
}

}  // namespace

LossRectangle loss_centres(const LossImages& images, const LossRectangle& inner) {
  LossRectangle c;
  c.x0 = larger(inner.x0, kSsimHalf);
  c.y0 = larger(inner.y0, kSsimHalf);
  c.x1 = larger(c.x0, smaller(inner.x1, images.width - kSsimHalf));
  c.y1 = larger(c.y0, smaller(inner.y1, images.height - kSsimHalf));
  if (c.x1 == c.x0 || c.y1 == c.y0) return {c.x0, c.y0, c.x0, c.y0};
  return c;
}

size_t l1_ssim_bytes(const LossImages& images, const LossRectangle& inner) {
  const Workload work = workload(images, inner);
  return sizeof(double) * size_t(work.parts + work.centre_parts) + 3 * sizeof(float) * size_t(work.numbers);
}

cudaError_t l1_ssim_launch(const LossImages& images, const LossRectangle& inner, void* workspace, float* l1_sum,
                           float* ssim_sum, float* gradient, cudaStream_t stream) {
  const auto run = images.target_bytes ? launch<uint8_t> : launch<float>;
  return run(images, inner, workspace, l1_sum, ssim_sum, gradient, stream);
}

}  // namespace nsmg
