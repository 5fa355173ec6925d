// The members of the aggregate device: GPUs, or pretended ones in host memory, and the memory that they all address.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace aggregate {

// Memory that all members can address: one virtual range of equal shards, each on its own member.
struct Memory {
  virtual ~Memory() = default;
  // Shares are multiples of this number of bytes.
  virtual size_t granularity() const = 0;
  // Returns a range with `shard` bytes on each member, or nullptr if a member lacks memory.
  virtual void* map(size_t shard) = 0;
  virtual void unmap(void* base, size_t shard) = 0;
};

// Host memory of `members` pretended GPUs with `limit` bytes each.
std::unique_ptr<Memory> host_memory(int members, size_t limit);
// Memory of GPUs by CUDA's virtual memory management. Throws c10::Error if the driver cannot do that.
std::unique_ptr<Memory> cuda_memory(const std::vector<int>& gpus);

// Starts the device again with other members. Throws if memory is in use. Bytes below `small` stay on the first member.
void start(std::vector<c10::Device> members, std::unique_ptr<Memory> memory, size_t small);

bool is_started();
int count();
c10::Device device(int member);
size_t small();

// Between construction and destruction all members may work: the others wait for what the first was given before,
// and the first waits for them afterwards. So all work is ordered by the first member's stream, without the host.
struct Together {
  Together();
  ~Together();
};

// Waits until all members have finished.
void synchronize();
// Raises torch's error if this process was forked from one that had started the device.
void check_not_forked();
bool forked();

c10::Allocator* allocator();
void empty_cache();

// Bytes of tensors, of unused blocks, and of tensors at most since the start, on each member.
std::vector<int64_t> memory_stats();
// Bytes on each member of a storage: all on the first if it is small.
std::vector<int64_t> shards(const void* base, size_t bytes);

} // namespace aggregate
