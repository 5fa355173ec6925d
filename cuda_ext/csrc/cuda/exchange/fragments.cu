// A thread a pixel. Its layers' rectangles are few, the same for a whole block, and read through the constant path of the
// cache; layers that do not cover the pixel cost a comparison.
#include <cuda_runtime.h>

#include "cuda/exchange/fragments.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;
constexpr int kUploadBytes = 3840;  // a launch: within the 4 KB of kernel parameters

template <typename Row>
struct RowBatch {
  static constexpr int kRows = kUploadBytes / sizeof(Row);
  Row rows[kRows];
};

template <typename Row>
__global__ void upload_rows_kernel(const __grid_constant__ RowBatch<Row> batch, int count, Row* table) {
  for (int k = threadIdx.x; k < count; k += blockDim.x) table[k] = batch.rows[k];
}

// Rows of the host by value, so that a graph holds them.
template <typename Row>
void upload_rows(const Row* host, int count, Row* table, cudaStream_t stream) {
  for (int first = 0; first < count; first += RowBatch<Row>::kRows) {
    RowBatch<Row> batch = {};
    const int number = count - first < RowBatch<Row>::kRows ? count - first : RowBatch<Row>::kRows;
    for (int k = 0; k < number; ++k) batch.rows[k] = host[first + k];
    upload_rows_kernel<Row><<<1, 128, 0, stream>>>(batch, number, table + first);
  }
}

dim3 grid_of(int most, int count) {
  const int blocks = (most + kThreads - 1) / kThreads;
  return dim3(unsigned(blocks < 1 ? 1 : blocks), unsigned(count));
}

__global__ void __launch_bounds__(kThreads)
    gather_kernel(const float* __restrict__ color, const float* __restrict__ alpha, int channels,
                  const PixelPiece* __restrict__ fragments, float* __restrict__ out) {
  const PixelPiece piece = fragments[blockIdx.y];
  const int k = blockIdx.x * kThreads + threadIdx.x;
  if (k >= piece.width * piece.height) return;
  const int64_t from = int64_t(piece.corner) + int64_t(k / piece.width) * piece.stride + k % piece.width;
  float* const to = out + (int64_t(piece.row) + k) * (channels + 1);
  for (int c = 0; c < channels; ++c) to[c] = color[from * channels + c];
  to[channels] = alpha[from];
}

__global__ void __launch_bounds__(kThreads)
    scatter_kernel(const float* __restrict__ gradients, int channels, const PixelPiece* __restrict__ fragments,
                   float* __restrict__ v_color, float* __restrict__ v_alpha) {
  const PixelPiece piece = fragments[blockIdx.y];
  const int k = blockIdx.x * kThreads + threadIdx.x;
  if (piece.row < 0 || k >= piece.width * piece.height) return;
  const int64_t to = int64_t(piece.corner) + int64_t(k / piece.width) * piece.stride + k % piece.width;
  const float* const from = gradients + (int64_t(piece.row) + k) * (channels + 1);
  for (int c = 0; c < channels; ++c) v_color[to * channels + c] = from[c];
  v_alpha[to] = from[channels];
}

// The row of a layer's pixel, counted from the layer's first; negative where the layer does not cover it.
__device__ __forceinline__ int within(const PixelLayer& layer, int x, int y) {
  const bool covered = x >= layer.x0 && x < layer.x1 && y >= layer.y0 && y < layer.y1;
  return covered ? (y - layer.y0) * (layer.x1 - layer.x0) + x - layer.x0 : -1;
}

template <int kChannels>
__global__ void __launch_bounds__(kThreads)
    composite_kernel(const float* __restrict__ received, const PixelLayer* __restrict__ layers,
                     const LayeredPatch* __restrict__ patches, float* __restrict__ out, float* __restrict__ alpha,
                     float* __restrict__ before) {
  const LayeredPatch patch = patches[blockIdx.y];
  const int k = blockIdx.x * kThreads + threadIdx.x;
  if (k >= patch.width * patch.height) return;
  const int x = k % patch.width, y = k / patch.width;
  float color[kChannels] = {}, through = 1.0f, left = 1.0f;  // left: of the light, in the end
  for (int l = patch.first_layer; l < patch.last_layer; ++l) {
    const PixelLayer layer = layers[l];
    const int offset = within(layer, x, y);
    if (offset < 0) continue;
    const int64_t row = int64_t(layer.row) + offset;
    const float* const pixel = received + row * (kChannels + 1);
    before[row] = through;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) color[c] += through * pixel[c];
    const float covers = pixel[kChannels];
    if (through > 0.0f) left = through * (1.0f - fabsf(covers));
    through = covers < 0.0f ? 0.0f : through * (1.0f - covers);
  }
  const int64_t at = int64_t(patch.first) + k;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) out[at * kChannels + c] = color[c];
  alpha[at] = 1.0f - left;
}

template <int kChannels>
__global__ void __launch_bounds__(kThreads)
    composite_backward_kernel(const float* __restrict__ received, const float* __restrict__ before,
                              const float* __restrict__ v_out, const float* __restrict__ v_alpha,
                              const PixelLayer* __restrict__ layers, const LayeredPatch* __restrict__ patches,
                              float* __restrict__ v_received) {
  const LayeredPatch patch = patches[blockIdx.y];
  const int k = blockIdx.x * kThreads + threadIdx.x;
  if (k >= patch.width * patch.height) return;
  const int x = k % patch.width, y = k / patch.width;
  const int64_t at = int64_t(patch.first) + k;
  float v[kChannels], behind[kChannels] = {}, rest = 1.0f;
  const float v_a = v_alpha[at];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) v[c] = v_out[at * kChannels + c];
  for (int l = patch.last_layer - 1; l >= patch.first_layer; --l) {
    const PixelLayer layer = layers[l];
    const int offset = within(layer, x, y);
    if (offset < 0) continue;
    const int64_t row = int64_t(layer.row) + offset;
    const float* const pixel = received + row * (kChannels + 1);
    const float covers = pixel[kChannels];
    if (covers < 0.0f) {  // drawing stopped here: nothing behind counts
      rest = 1.0f;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) behind[c] = 0.0f;
    }
    if (layer.back >= 0) {
      float* const gradient = v_received + (int64_t(layer.back) + offset) * (kChannels + 1);
      const float light = before[row];
      float along = 0.0f;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        gradient[c] = light * v[c];
        along += v[c] * behind[c];
      }
      const float by_covered = light * (v_a * rest - along);
      gradient[kChannels] = covers < 0.0f ? -by_covered : by_covered;
    }
    const float through = 1.0f - fabsf(covers);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) behind[c] = pixel[c] + through * behind[c];
    rest *= through;
  }
}

__global__ void __launch_bounds__(kThreads) nowhere_kernel(int slots, long long* boxes) {
  const int k = blockIdx.x * kThreads + threadIdx.x;
  if (k < 5 * slots) boxes[k] = k % 5 == 4 ? 0 : kNowhere;
}

// A block first finds its own box, so that few atomics meet.
__global__ void __launch_bounds__(kThreads)
    live_kernel(const float* __restrict__ before, const WatchedPiece* __restrict__ fragments, float least,
                long long* __restrict__ boxes) {
  const WatchedPiece piece = fragments[blockIdx.y];
  const int k = blockIdx.x * kThreads + threadIdx.x;
  const bool live = k < piece.width * piece.height && before[int64_t(piece.first) + k] >= least;
  __shared__ int box[5];
  if (threadIdx.x < 5) box[threadIdx.x] = threadIdx.x == 4 ? 0 : int(kNowhere);
  const int many = __syncthreads_count(live);
  if (many == 0) return;
  if (live) {
    const int x = piece.x0 + k % piece.width, y = piece.y0 + k / piece.width;
    atomicMax(&box[0], -x);
    atomicMax(&box[1], -y);
    atomicMax(&box[2], x + 1);
    atomicMax(&box[3], y + 1);
  }
  __syncthreads();
  if (threadIdx.x < 4) atomicMax(boxes + 5 * piece.slot + threadIdx.x, static_cast<long long>(box[threadIdx.x]));
  if (threadIdx.x == 4)
    atomicAdd(reinterpret_cast<unsigned long long*>(boxes + 5 * piece.slot + 4), static_cast<unsigned long long>(many));
}

}  // namespace

cudaError_t live_boxes_launch(const float* before, const WatchedPiece* host_fragments, int count, int most,
                              WatchedPiece* fragments, int slots, float least, int64_t* boxes, cudaStream_t stream) {
  static_assert(sizeof(long long) == sizeof(int64_t));
  auto* const out = reinterpret_cast<long long*>(boxes);
  if (slots > 0) nowhere_kernel<<<grid_of(5 * slots, 1), kThreads, 0, stream>>>(slots, out);
  if (count > 0) {
    upload_rows(host_fragments, count, fragments, stream);
    live_kernel<<<grid_of(most, count), kThreads, 0, stream>>>(before, fragments, least, out);
  }
  return cudaGetLastError();
}

cudaError_t gather_fragments_launch(const float* color, const float* alpha, int channels, const PixelPiece* host_fragments,
                                 int count, int most, PixelPiece* fragments, float* out, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  upload_rows(host_fragments, count, fragments, stream);
  gather_kernel<<<grid_of(most, count), kThreads, 0, stream>>>(color, alpha, channels, fragments, out);
  return cudaGetLastError();
}

cudaError_t scatter_fragments_launch(const float* gradients, int channels, const PixelPiece* host_fragments, int count,
                                  int most, PixelPiece* fragments, float* v_color, float* v_alpha, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  upload_rows(host_fragments, count, fragments, stream);
  scatter_kernel<<<grid_of(most, count), kThreads, 0, stream>>>(gradients, channels, fragments, v_color, v_alpha);
  return cudaGetLastError();
}

cudaError_t composite_fragments_launch(const float* received, int channels, const HostLayers& host,
                                    const DeviceLayers& device, float* out, float* alpha, float* before,
                                    cudaStream_t stream) {
  if (host.patch_count == 0) return cudaSuccess;
  upload_rows(host.layers, host.layer_count, device.layers, stream);
  upload_rows(host.patches, host.patch_count, device.patches, stream);
  const dim3 grid = grid_of(host.most, host.patch_count);
  const auto launch = [&](auto kernel) {
    kernel<<<grid, kThreads, 0, stream>>>(received, device.layers, device.patches, out, alpha, before);
  };
  if (channels == 3) launch(composite_kernel<3>);
  else if (channels == 4) launch(composite_kernel<4>);
  else return cudaErrorInvalidValue;
  return cudaGetLastError();
}

cudaError_t composite_fragments_backward_launch(const float* received, const float* before, const float* v_out,
                                             const float* v_alpha, int channels, const HostLayers& host,
                                             const DeviceLayers& device, float* v_received, cudaStream_t stream) {
  if (host.patch_count == 0) return cudaSuccess;
  upload_rows(host.layers, host.layer_count, device.layers, stream);
  upload_rows(host.patches, host.patch_count, device.patches, stream);
  const dim3 grid = grid_of(host.most, host.patch_count);
  const auto launch = [&](auto kernel) {
    kernel<<<grid, kThreads, 0, stream>>>(received, before, v_out, v_alpha, device.layers, device.patches, v_received);
  };
  if (channels == 3) launch(composite_backward_kernel<3>);
  else if (channels == 4) launch(composite_backward_kernel<4>);
  else return cudaErrorInvalidValue;
  return cudaGetLastError();
}

}  // namespace nsmg
