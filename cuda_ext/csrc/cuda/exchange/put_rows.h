// Lines of several arrays into the memory of other GPUs (put_rows): as many as are valid, not the whole capacity. On
// the given stream, without a wait, its sizes from the arguments alone, so that a CUDA graph can hold it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace nsmg {

inline constexpr int kMostPutArrays = 8;

// An array of lines of `width` words of 4 bytes, of which the first `taken` are written.
struct PutArray {
  const int32_t* lines;
  int width, taken;
};

// Arguments: `count` arrays of `capacity` lines. Where gate [capacity, gate_width] is not null, words gate_column and
// those after it of the last array are floats, and 0 where the gate is not above 0. `offset` is added to the words of the
// first array, whose width is then no multiple of 4. An array of which no words are taken is not written.
struct PutArrays {
  PutArray arrays[kMostPutArrays];
  int count, capacity;
  const float* gate;
  int gate_column, gate_width;
  int offset;
};

// real [1] in device memory: how many lines there are; lines beyond the capacity are not written. destinations
// [ranks, count] in device memory: where each rank keeps each array, aligned to 16 bytes.
cudaError_t put_rows_launch(const PutArrays& put, const int64_t* real, const int64_t* destinations, int ranks,
                              cudaStream_t stream);

}  // namespace nsmg
