// Number of rows that overlap each patch of a batch: the rows that a patch needs from this rank.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/exchange/row_exchange.h"

namespace nsmg {

// `patches` is device memory, `host_patches` long; they must ascend by view, and `rank` is the patch's place in
// `counts` [patch_count]. Runs on the given stream and waits for nothing.
cudaError_t footprint_launch(const RouteRows& rows, const RankPatch* host_patches, int patch_count, RankPatch* patches,
                         int64_t* counts, cudaStream_t stream);

}  // namespace nsmg
