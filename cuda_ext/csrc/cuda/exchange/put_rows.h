// Lines of several arrays into the memory of other GPUs (put_rows): as many as there are, not as there is room for. On
// the given stream, without a wait, its sizes from the arguments alone, so that a CUDA graph can hold it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace nsmg {

inline constexpr int kMostTold = 8;

// An array of lines of `width` words of 4 bytes, of which the first `taken` are written.
struct ToldArray {
  const int32_t* lines;
  int width, taken;
};

// What is told: `count` arrays of `capacity` lines. Where gate [capacity, gate_width] is not null, words gate_column and
// those after it of the last array are floats, and 0 where the gate is not above 0. `offset` is added to the words of the
// first array, whose width is then no multiple of 4. An array of which nothing is taken is not told.
struct Told {
  ToldArray arrays[kMostTold];
  int count, capacity;
  const float* gate;
  int gate_column, gate_width;
  int offset;
};

// real [1] in device memory: how many lines there are; what lies behind the capacity is not told. destinations
// [ranks, count] in device memory: where each rank keeps each array, aligned to 16 bytes.
cudaError_t put_rows_launch(const Told& told, const int64_t* real, const int64_t* destinations, int ranks,
                              cudaStream_t stream);

}  // namespace nsmg
