// A thread takes a few rows; a block adds up in shared memory where the numbers fit there. Sums of integers: the same on
// every run.
#include <cuda_runtime.h>

#include "common/ellipse.h"
#include "cuda/exchange/row_spans.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;
constexpr int kShared = 8192;  // numbers that a block holds
constexpr int kRows = 8;       // of a thread
constexpr int kTile = 16;

__global__ void __launch_bounds__(kThreads)
    spans_kernel(SpanRows rows, int width, int height, int layers, int lines, unsigned long long* spans) {
  extern __shared__ int sums[];
  const int64_t total = int64_t(layers) * rows.cells_count * 2 * lines;
  const bool here = total <= kShared;
  for (int k = int(threadIdx.x); here && k < total; k += kThreads) sums[k] = 0;
  __syncthreads();
  const auto add = [&](int64_t place) {
    if (here)
      atomicAdd(&sums[place], 1);
    else
      atomicAdd(&spans[place], 1ull);
  };
  int64_t real = rows.count;
  if (rows.real != nullptr && *rows.real < real) real = *rows.real;
  const int64_t start = int64_t(blockIdx.x) * kThreads * kRows + threadIdx.x;
  for (int step = 0; step < kRows; ++step) {
    const int64_t row = start + int64_t(step) * kThreads;
    if (row >= real) break;
    const int2 radius = reinterpret_cast<const int2*>(rows.radii)[row];
    const int layer = rows.layers[row];
    if (radius.x <= 0 || radius.y <= 0 || layer < 0 || layer >= layers) continue;
    const float2 mean = reinterpret_cast<const float2*>(rows.means2d)[row];
    int first, end;
    covered_steps(Span<float>{mean.x - float(radius.x), mean.x + float(radius.x)}, 0.f, width, first, end);
    if (first >= end) continue;
    covered_steps(Span<float>{mean.y - float(radius.y), mean.y + float(radius.y)}, 0.f, height, first, end);
    if (first >= end) continue;
    for (int cell = 0; cell < rows.cells_count; ++cell) {
      if (rows.cells != nullptr && !rows.cells[int64_t(cell) * rows.count + row]) continue;
      const int64_t base = (int64_t(layer) * rows.cells_count + cell) * 2 * lines;
      add(base + first / kTile);
      add(base + lines + (end - 1) / kTile);
    }
  }
  __syncthreads();
  for (int k = int(threadIdx.x); here && k < total; k += kThreads) {
    if (sums[k] > 0) atomicAdd(&spans[k], static_cast<unsigned long long>(sums[k]));
  }
}

}  // namespace

cudaError_t spans_launch(const SpanRows& rows, int width, int height, int layers, int64_t* spans, cudaStream_t stream) {
  const int lines = (height + kTile - 1) / kTile;
  const int64_t total = int64_t(layers) * rows.cells_count * 2 * lines;
  if (total == 0) return cudaSuccess;
  cudaError_t status = cudaMemsetAsync(spans, 0, size_t(total) * sizeof(int64_t), stream);
  if (status != cudaSuccess || rows.count == 0) return status;
  const int blocks = (rows.count + kThreads * kRows - 1) / (kThreads * kRows);
  const size_t shared = total <= kShared ? size_t(total) * sizeof(int) : 0;
  spans_kernel<<<blocks, kThreads, shared, stream>>>(rows, width, height, layers, lines,
                                                     reinterpret_cast<unsigned long long*>(spans));
  return cudaGetLastError();
}

}  // namespace nsmg
