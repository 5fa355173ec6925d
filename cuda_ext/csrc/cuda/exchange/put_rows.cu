// A thread reads 16 bytes of an array and writes them to every rank's memory, this GPU's own with them: so no array is read
// twice, and a warp's writes lie side by side.
#include <cuda_runtime.h>

#include "cuda/exchange/put_rows.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 1024;  // of an array, at most: a block takes what is left in turns

// 0 for what is shut, bit for bit; a gate that is no number is open, as in torch's ReLU.
__device__ __forceinline__ void shut(int4& words, int64_t line, int column, const PutArrays& put) {
  int* word = &words.x;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int gate = column + k - put.gate_column;
    if (gate >= 0 && gate < put.gate_width && put.gate[line * put.gate_width + gate] <= 0.0f) word[k] = 0;
  }
}

__global__ void __launch_bounds__(kThreads)
    put_rows_kernel(const PutArrays put, const int64_t* real_, const int64_t* destinations, int ranks) {
  const PutArray array = put.arrays[blockIdx.y];
  if (array.taken == 0) return;
  const int64_t given = *real_, real = given < put.capacity ? given : put.capacity;
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x, stride = int64_t(gridDim.x) * kThreads;
  const bool gated = put.gate != nullptr && blockIdx.y + 1 == put.count;
  const int64_t* places = destinations + blockIdx.y;
  if (array.width % 4 == 0) {
    // Whole quads of a line, as many as are taken.
    const int quads = array.width / 4, wanted = (array.taken + 3) / 4;
    for (int64_t item = first; item < real * wanted; item += stride) {
      const int64_t line = item / wanted, at = line * quads + item % wanted;
      int4 words = reinterpret_cast<const int4*>(array.lines)[at];
      if (gated) shut(words, line, int(item % wanted) * 4, put);
      for (int rank = 0; rank < ranks; ++rank) reinterpret_cast<int4*>(places[int64_t(rank) * put.count])[at] = words;
    }
    return;
  }
  // Whole lines, one after the other: quads of words whatever line they are of, and at the end what is left.
  const int offset = blockIdx.y == 0 ? put.offset : 0;
  const int64_t words = real * array.width, whole = words / 4;
  for (int64_t at = first; at < whole; at += stride) {
    int4 value = reinterpret_cast<const int4*>(array.lines)[at];
    value = {value.x + offset, value.y + offset, value.z + offset, value.w + offset};
    for (int rank = 0; rank < ranks; ++rank) reinterpret_cast<int4*>(places[int64_t(rank) * put.count])[at] = value;
  }
  if (first < words % 4) {
    const int64_t at = whole * 4 + first;
    for (int rank = 0; rank < ranks; ++rank) {
      reinterpret_cast<int32_t*>(places[int64_t(rank) * put.count])[at] = array.lines[at] + offset;
    }
  }
}

}  // namespace

cudaError_t put_rows_launch(const PutArrays& put, const int64_t* real, const int64_t* destinations, int ranks,
                              cudaStream_t stream) {
  if (put.capacity == 0 || put.count == 0) return cudaSuccess;
  int64_t most = 0;
  for (int k = 0; k < put.count; ++k) {
    const int64_t quads = (int64_t(put.capacity) * put.arrays[k].width + 3) / 4;
    most = quads > most ? quads : most;
  }
  const int64_t wanted = (most + kThreads - 1) / kThreads;
  const dim3 blocks(unsigned(wanted < kBlocks ? wanted : kBlocks), unsigned(put.count));
  put_rows_kernel<<<blocks, kThreads, 0, stream>>>(put, real, destinations, ranks);
  return cudaGetLastError();
}

}  // namespace nsmg
