// A thread a point; what is done to whole rows, a warp does together for each of its 32 points that need it.

#include "cuda/densify/relocation.h"

#include "common/noise.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    draw_kernel(const __grid_constant__ DrawInputs in, int32_t* __restrict__ sources, int32_t* __restrict__ copies) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= in.points) return;
  const int64_t total = in.sums[in.points - 1];
  if (!in.empty[i] || total == 0 || (in.taken != nullptr && !*in.taken)) {
    sources[i] = -1;
    return;
  }
  const uint64_t bits = table_bits(in.start, uint64_t(in.slots[i] - 1));
  const int64_t drawn = int64_t(bits & 0x7FFFFFFFFFFFFFFFull) % total;
  int first = 0, last = in.points - 1;  // the first whose running sum is beyond the number
  while (first < last) {
    const int middle = first + (last - first) / 2;
    if (in.sums[middle] > drawn) {
      last = middle;
    } else {
      first = middle + 1;
    }
  }
  sources[i] = first;
  atomicAdd(copies + first, 1);
}

template <typename T, typename Do>
__device__ void each_word(void* rows, int words, Do what) {
  for (int w = threadIdx.x % 32; w < words; w += 32) what(static_cast<T*>(rows), w);
}

// Calls what(rows of the array, words a row, number of the word) for each word of a row, on the lanes of a warp.
template <typename Do>
__device__ void each_array(const RowArrays& arrays, Do what) {
  for (int k = 0; k < arrays.count; ++k) {
    const int words = arrays.words[k];
    const auto of_array = [&](auto* rows, int w) { what(rows, words, w); };
    if (arrays.unit[k] == 4) {
      each_word<uint32_t>(arrays.rows[k], words, of_array);
    } else if (arrays.unit[k] == 2) {
      each_word<uint16_t>(arrays.rows[k], words, of_array);
    } else {
      each_word<uint8_t>(arrays.rows[k], words, of_array);
    }
  }
}

struct Share {
  double opacity, scale, place;
};

// One of `of` parts of a Gaussian: see `shares` of the reference.
__device__ Share share(double opacity, int of) {
  const int parts = min(of, kMostCopies);
  const double variance = (2.0 + 1.0 / (double(parts) * parts)) / 3.0;
  double weight = 0.0;
  for (int k = 0; k < parts; ++k) {
    const double place = double(2 * k + 1 - parts) / parts;
    weight += exp(-0.5 * place * place / variance);
  }
  const double old = min(opacity, 1.0 - 1.1920928955078125e-7), clear = log1p(-old);
  const double pair_weight = exp(-1.0 / 6.0), overlap = exp(-1.0 / 3.0) * sqrt(0.5);
  const double pair = min(-expm1(clear / 2) / pair_weight, old);
  const double shrunk = old / ((2 * pair - pair * pair * overlap) * sqrt(0.75));
  return {min(-expm1(clear / parts) / (weight / parts), old), sqrt(variance) * shrunk, shrunk};
}

// Makes row i part `number` of `of`: see `part_offsets` of the reference.
__device__ void make_part(const ShareInputs& in, int64_t i, int number, int of, float* means, float* log_scales,
                          float* logits) {
  const float* const sizes = log_scales + 3 * i;
  const Share part = share(double(sigmoid(logits[i])), of);
  const int axis = sizes[1] > sizes[0] ? (sizes[2] > sizes[1] ? 2 : 1) : (sizes[2] > sizes[0] ? 2 : 0);
  const float size = expf(sizes[axis]) * (float(2 * int64_t(number) + 1 - of) / float(of) * float(part.place));
  const Quat<float> quat = {in.quats[4 * i], in.quats[4 * i + 1], in.quats[4 * i + 2], in.quats[4 * i + 3]};
  const Mat3<float> frame = rotation(scaled(quat, inverse_length(quat)));
  const Vec3<float> along = {axis == 0 ? size : 0.f, axis == 1 ? size : 0.f, axis == 2 ? size : 0.f};
  means[3 * i] += dot(frame.r0, along);
  means[3 * i + 1] += dot(frame.r1, along);
  means[3 * i + 2] += dot(frame.r2, along);
  const float opacity = max(float(part.opacity), in.min_opacity);
  logits[i] = logf(opacity / (1.f - opacity));
  log_scales[3 * i + axis] += logf(float(part.scale));
}

__global__ void __launch_bounds__(kThreads)
    share_kernel(const __grid_constant__ ShareInputs in, float* __restrict__ means, float* __restrict__ log_scales,
                 float* __restrict__ logits, const __grid_constant__ RowArrays cleared) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  const int copies = i < in.points ? in.copies[i] : 0;
  const int source = i < in.points && in.sources != nullptr ? in.sources[i] : -1;
  const int of = 1 + (source >= 0 ? in.copies[source] : copies);
  if (of > 1) make_part(in, i, source >= 0 ? in.numbers[i] : 0, of, means, log_scales, logits);
  for (unsigned left = __ballot_sync(~0u, copies > 0); left != 0; left &= left - 1) {
    const int64_t row = i - int(threadIdx.x % 32) + __ffs(left) - 1;
    each_array(cleared, [&](auto* rows, int words, int w) { rows[row * words + w] = 0; });
  }
}

__global__ void __launch_bounds__(kThreads)
    copy_kernel(const __grid_constant__ RowArrays arrays, const int32_t* __restrict__ sources, int points) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  const int source = i < points ? sources[i] : -1;
  for (unsigned left = __ballot_sync(~0u, source >= 0); left != 0; left &= left - 1) {
    const int lane = __ffs(left) - 1;
    const int64_t from = __shfl_sync(~0u, source, lane), to = i - int(threadIdx.x % 32) + lane;
    each_array(arrays, [&](auto* rows, int words, int w) { rows[to * words + w] = rows[from * words + w]; });
  }
}

// A row of the grid for each array, whose words follow each other.
__global__ void __launch_bounds__(kThreads)
    take_kernel(const __grid_constant__ RowArrays arrays, const __grid_constant__ RowArrays to,
                const int64_t* __restrict__ index, int points) {
  const int k = blockIdx.y, words = arrays.words[k];
  const int64_t end = int64_t(points) * words, stride = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < end; i += stride) {
    const int64_t row = i / words, from = index[row] * words + (i - row * words);
    if (arrays.unit[k] == 4) {
      static_cast<uint32_t*>(to.rows[k])[i] = static_cast<const uint32_t*>(arrays.rows[k])[from];
    } else if (arrays.unit[k] == 2) {
      static_cast<uint16_t*>(to.rows[k])[i] = static_cast<const uint16_t*>(arrays.rows[k])[from];
    } else {
      static_cast<uint8_t*>(to.rows[k])[i] = static_cast<const uint8_t*>(arrays.rows[k])[from];
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    turn_kernel(const float4* __restrict__ quats, const float* __restrict__ vectors, int points, int64_t sets,
                float* __restrict__ turned) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= points * sets) return;
  const float4 q = quats[i % points];
  const Quat<float> quat = {q.x, q.y, q.z, q.w};
  const Mat3<float> frame = rotation(scaled(quat, inverse_length(quat)));
  const Vec3<float> v = {vectors[3 * i], vectors[3 * i + 1], vectors[3 * i + 2]};
  turned[3 * i] = dot(frame.r0, v);
  turned[3 * i + 1] = dot(frame.r1, v);
  turned[3 * i + 2] = dot(frame.r2, v);
}

int blocks(int points) { return (points + kThreads - 1) / kThreads; }

}  // namespace

cudaError_t draw_sources_launch(const DrawInputs& in, int32_t* sources, int32_t* copies, cudaStream_t stream) {
  if (in.points == 0) return cudaSuccess;
  draw_kernel<<<blocks(in.points), kThreads, 0, stream>>>(in, sources, copies);
  return cudaGetLastError();
}

cudaError_t share_out_launch(const ShareInputs& in, float* means, float* log_scales, float* logits,
                             const RowArrays& cleared, cudaStream_t stream) {
  if (in.points == 0) return cudaSuccess;
  share_kernel<<<blocks(in.points), kThreads, 0, stream>>>(in, means, log_scales, logits, cleared);
  return cudaGetLastError();
}

cudaError_t copy_rows_launch(const RowArrays& arrays, const int32_t* sources, int points, cudaStream_t stream) {
  if (points == 0) return cudaSuccess;
  copy_kernel<<<blocks(points), kThreads, 0, stream>>>(arrays, sources, points);
  return cudaGetLastError();
}

cudaError_t take_rows_launch(const RowArrays& arrays, const RowArrays& to, const int64_t* index, int points,
                             cudaStream_t stream) {
  if (points == 0 || arrays.count == 0) return cudaSuccess;
  int widest = 1;
  for (int k = 0; k < arrays.count; ++k) widest = arrays.words[k] > widest ? arrays.words[k] : widest;
  const int64_t wanted = (int64_t(points) * widest + 4 * kThreads - 1) / (4 * kThreads);
  const unsigned across = unsigned(wanted < 4096 ? wanted : 4096);
  take_kernel<<<dim3(across, unsigned(arrays.count)), kThreads, 0, stream>>>(arrays, to, index, points);
  return cudaGetLastError();
}

cudaError_t turn_launch(const float* quats, const float* vectors, int points, int64_t sets, float* turned,
                        cudaStream_t stream) {
  const int64_t all = points * sets;
  if (all == 0) return cudaSuccess;
  turn_kernel<<<unsigned((all + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      reinterpret_cast<const float4*>(quats), vectors, points, sets, turned);
  return cudaGetLastError();
}

}  // namespace nsmg
