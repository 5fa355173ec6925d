// Lines of a few hundred numbers, which a block reads over the bus at once, and images, at 16 bytes a thread where all
// begins and ends at such.
#include "cuda/common/input_lines.h"

#include <cuda_runtime.h>

namespace nsmg {
namespace {

constexpr int kThreads = 256;
constexpr int kMostBlocks = 1024;  // of a patch: a block takes what is left in turns

struct PatchBatch {
  ShownPatch patches[kPatchesPerLaunch];
};

__global__ void __launch_bounds__(kThreads) take_lines_kernel(const QueuedTables queued, const int64_t* at) {
  const int64_t line = *at;
  if (line < 0 || line >= queued.lines) return;
  const QueuedTable table = queued.tables[blockIdx.x];
  // Volatile: what the host has written since a graph was launched last is not what a cache may hold.
  const volatile int32_t* from = table.lines + line * table.width;
  for (int i = threadIdx.x; i < table.width; i += kThreads) table.into[i] = from[i];
}

__global__ void __launch_bounds__(kThreads)
    keep_line_kernel(const float* line, float* table, int lines, int width, int64_t* at) {
  const int64_t place = *at;
  __syncthreads();  // all have read it
  if (place >= 0 && place < lines) {
    for (int i = threadIdx.x; i < width; i += kThreads) table[place * width + i] = line[i];
  }
  if (threadIdx.x == 0) *at = place + 1;
}

template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    show_patches_kernel(const Shown shown, const __grid_constant__ PatchBatch batch) {
  const ShownPatch patch = batch.patches[blockIdx.y];
  const int image = shown.chosen[patch.place];
  if (image < 0 || image >= shown.images_count) return;
  const auto* from = reinterpret_cast<const Unit*>(shown.images + image * shown.image_bytes + patch.from);
  auto* to = reinterpret_cast<Unit*>(shown.pictures + patch.to);
  const int64_t width = patch.row_bytes / int64_t{sizeof(Unit)}, skip = shown.row_bytes / int64_t{sizeof(Unit)};
  const int64_t units = width * patch.rows, stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < units; i += stride) {
    const int64_t row = i / width;
    to[i] = from[row * skip + (i - row * width)];
  }
}

// Bits that are zero in whatever has to be a multiple of a unit.
uint64_t bits_of(const Shown& shown, const ShownPatch* patches, int count) {
  uint64_t bits = reinterpret_cast<uintptr_t>(shown.images) | reinterpret_cast<uintptr_t>(shown.pictures) |
                  static_cast<uint64_t>(shown.image_bytes);
  for (int k = 0; k < count; ++k) {
    bits |= static_cast<uint64_t>(patches[k].row_bytes | patches[k].from | patches[k].to);
    if (patches[k].rows > 1) bits |= static_cast<uint64_t>(shown.row_bytes);
  }
  return bits;
}

}  // namespace

cudaError_t take_lines_launch(const QueuedTables& tables, const int64_t* at, cudaStream_t stream) {
  if (tables.count == 0) return cudaSuccess;
  take_lines_kernel<<<unsigned(tables.count), kThreads, 0, stream>>>(tables, at);
  return cudaGetLastError();
}

cudaError_t keep_line_launch(const float* line, float* table, int lines, int width, int64_t* at, cudaStream_t stream) {
  keep_line_kernel<<<1, kThreads, 0, stream>>>(line, table, lines, width, at);
  return cudaGetLastError();
}

cudaError_t show_patches_launch(const Shown& shown, const ShownPatch* host_patches, int count, cudaStream_t stream) {
  const uint64_t bits = bits_of(shown, host_patches, count);
  const int unit = bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 1;
  for (int first = 0; first < count; first += kPatchesPerLaunch) {
    const int some = count - first < kPatchesPerLaunch ? count - first : kPatchesPerLaunch;
    PatchBatch batch = {};
    int64_t most = 0;
    for (int k = 0; k < some; ++k) {
      batch.patches[k] = host_patches[first + k];
      const int64_t units = batch.patches[k].row_bytes / unit * batch.patches[k].rows;
      most = units > most ? units : most;
    }
    const int64_t wanted = (most + kThreads - 1) / kThreads;
    if (wanted == 0) continue;
    const dim3 blocks(unsigned(wanted < kMostBlocks ? wanted : kMostBlocks), unsigned(some));
    if (unit == 16) {
      show_patches_kernel<int4><<<blocks, kThreads, 0, stream>>>(shown, batch);
    } else if (unit == 4) {
      show_patches_kernel<int32_t><<<blocks, kThreads, 0, stream>>>(shown, batch);
    } else {
      show_patches_kernel<uint8_t><<<blocks, kThreads, 0, stream>>>(shown, batch);
    }
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace nsmg
