// How many rows begin and end at each row of tiles of a layer. Runs on the given stream and waits for nothing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace nsmg {

struct SpanRows {
  const int32_t* layers;
  const int64_t* real;  // how many of `count` are rows; null for all
  const float* means2d;
  const int32_t* radii;
  const bool* cells;  // [cells_count, count] which cells of its layer each row is in; null for one that all are in
  int count, cells_count;
};

// spans [layers * cells_count, 2, lines]: of layers of width x height pixels, with this many lines of tiles.
cudaError_t spans_launch(const SpanRows& rows, int width, int height, int layers, int64_t* spans, cudaStream_t stream);

}  // namespace nsmg
