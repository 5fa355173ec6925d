// A table of the host's on the device, by value: so that a CUDA graph can hold it, and nothing waits for a copy.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nsmg {

constexpr int kUploadWords = 896;  // a launch: within the 4 KB of kernel parameters

struct WordBatch {
  uint32_t words[kUploadWords];
};

static __global__ void upload_words_kernel(const __grid_constant__ WordBatch batch, int count, uint32_t* table) {
  for (int k = int(threadIdx.x); k < count; k += int(blockDim.x)) table[k] = batch.words[k];
}

inline void upload_words(const uint32_t* host, int count, uint32_t* table, cudaStream_t stream) {
  for (int first = 0; first < count; first += kUploadWords) {
    WordBatch batch = {};
    const int number = count - first < kUploadWords ? count - first : kUploadWords;
    for (int k = 0; k < number; ++k) batch.words[k] = host[first + k];
    upload_words_kernel<<<1, 256, 0, stream>>>(batch, number, table + first);
  }
}

}  // namespace nsmg
