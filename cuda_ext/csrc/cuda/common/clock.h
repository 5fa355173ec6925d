// The device's clock, read where a stream has got to (add_clock): a kernel of one thread, which a CUDA graph can hold. An
// event in a graph would hold up what follows it several times as long.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace nsmg {

// sum [1] += sign * nanoseconds.
cudaError_t add_clock_launch(int64_t* sum, int sign, cudaStream_t stream);

}  // namespace nsmg
