// Exchange of rows between ranks: route (route_lines), write as records into the memory of other GPUs (pack), read the
// received rows (unpack), and add gradients to the records of their owners (add_records). Everything runs on the given
// stream, waits for nothing and takes its sizes from the arguments alone, so that a CUDA graph can hold it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/exchange/row_columns.h"

namespace nsmg {

inline constexpr int kMostExchanging = 32;  // a bit, and a lane of a warp, for each

// A rectangle of a view that a rank renders, halo included.
struct RankPatch {
  int32_t view, rank, x0, y0, x1, y1;
  int32_t cell = 0;  // cell whose rows are sent there: see RouteRows::in_cells
};

// What routing looks at: `count` lines, of which all before *real are rows.
struct RouteRows {
  const int32_t* view_ids;
  const int64_t* real;
  const float* means2d;
  const int32_t* radii;
  int count;
  const bool* in_cells = nullptr;  // [cells, count] which rows are in each cell; null where all go
};

// Rows per block of the routing kernels.
inline constexpr int kRouteRows = 1024;

inline int route_blocks(int rows) { return static_cast<int>((int64_t{rows} + kRouteRows - 1) / kRouteRows); }

// Device memory: `patches`, `host_patches` long, and `block_counts`, ranks * route_blocks(count) long. Patches are
// copied by value, so the host's may go at once; they must ascend by view. place [ranks, count]; counts [ranks].
cudaError_t route_launch(const RouteRows& rows, const RankPatch* host_patches, int patch_count, RankPatch* patches,
                         int ranks, int32_t* block_counts, int32_t* place, int64_t* counts, cudaStream_t stream);

struct PackRows {
  RowWidths widths;
  const float* columns[kMostColumns];
  const int32_t *radii, *view_ids;
  int count;
};

// place [ranks, count]; destinations [ranks] in device memory, each aligned to 16 bytes. Of a record the floats of the
// columns come first, then as int32, bit for bit, radii x, y, view id and slot, and zeros.
cudaError_t pack_launch(const PackRows& rows, const int32_t* place, const int64_t* destinations, int ranks,
                        int capacity, cudaStream_t stream);

// Arrays of ranks * capacity rows.
struct UnpackedRows {
  RowWidths widths;
  float* columns[kMostColumns];
  int32_t *radii, *view_ids, *owners, *slots;
};

// records [ranks, capacity, 4 record_quads()], aligned to 16 bytes; counts [ranks].
cudaError_t unpack_launch(const float* records, const int64_t* counts, int ranks, int capacity, int views,
                          const UnpackedRows& rows, cudaStream_t stream);

// Adds records [count, floats] to those at sinks[owners[row]] + 4 floats slots[row] bytes. Rows of zeros may have no
// owner.
cudaError_t add_records_launch(const float* records, int count, int floats, const int64_t* sinks, int sink_count,
                               const int32_t* owners, const int32_t* slots, bool system_scope, cudaStream_t stream);

}  // namespace nsmg
