// Tile lists cut to windows of depth. Runs on the given stream and waits for nothing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace nsmg {

struct WindowLists {
  const int32_t *offsets, *row_ids;  // [tiles + 1], [capacity]
  const float *depths, *windows;     // [rows], [tiles, 2]
  int tiles, rows, capacity;
};

// How much `temporary` has to be.
cudaError_t clip_bytes(int tiles, size_t* bytes);

// firsts [tiles + 1] and counts [tiles + 1] are for this call alone. offsets [tiles + 1], row_ids [capacity].
cudaError_t clip_launch(const WindowLists& lists, int32_t* firsts, int32_t* counts, void* temporary, size_t bytes,
                        int32_t* offsets, int32_t* row_ids, cudaStream_t stream);

}  // namespace nsmg
