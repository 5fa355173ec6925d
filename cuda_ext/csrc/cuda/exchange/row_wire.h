// Rows and their gradients in columns of words, as collectives carry them; see cuda_ext/ops/exchange/row_wire.py for
// what the words are. Everything runs on the given stream, waits for nothing and takes its sizes from the arguments
// alone.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/exchange/row_exchange.h"

namespace nsmg {

inline constexpr int kMostSegments = 128;  // 1.5 KiB of a launch's 4 KiB of arguments

// A segment for each rank, of `words` columns with a capacity of `capacities` rows: this one's in full, others' maybe
// rounded. One whose start is kStays is not in the wire.
inline constexpr int64_t kStays = -1;
struct WireSegments {
  int64_t starts[kMostSegments];
  int32_t capacities[kMostSegments];
  int ranks, rank;
  bool half;
};

// place [ranks, count].
cudaError_t pack_wire_launch(const PackRows& rows, const int32_t* place, const WireSegments& to, bool slots,
                             uint32_t* wire, cudaStream_t stream);

// counts [ranks]; arrays of as many rows as all capacities together.
cudaError_t unpack_wire_launch(const uint32_t* wire, const WireSegments& come, const int64_t* counts, bool slots,
                               int views, const UnpackedRows& rows, cudaStream_t stream);

// place [count]; lines start to start + capacity of the arrays are the segment's. Owners are left as they are.
cudaError_t keep_rows_launch(const PackRows& rows, const int32_t* place, const UnpackedRows& to, int64_t start,
                             int capacity, bool slots, cudaStream_t stream);

// records [all capacities together, returned.floats], aligned to 16 bytes.
cudaError_t pack_gradients_launch(const Returned& returned, const float* records, const int64_t* counts,
                                  const WireSegments& to, uint32_t* wire, cudaStream_t stream);

// place [ranks, count]; own [capacities[rank], returned.floats] and records [count, returned.floats], aligned to 16
// bytes.
cudaError_t collect_wire_launch(const Returned& returned, const int32_t* place, const int64_t* real,
                                const uint32_t* wire, const WireSegments& come, const float* own, int count,
                                float* records, cudaStream_t stream);

}  // namespace nsmg
