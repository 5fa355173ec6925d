#include "members.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>

namespace aggregate {
namespace {

struct HostMemory final : Memory {
  HostMemory(int members, size_t limit) : members(members), limit(limit) {}
  size_t granularity() const override { return 64; }
  void* map(size_t shard) override {
    if (shard > limit - used) return nullptr;
    void* base = std::aligned_alloc(64, shard * members);
    used += base ? shard : 0;
    return base;
  }
  void unmap(void* base, size_t shard) override {
    std::free(base);
    used -= shard;
  }
  size_t members, limit, used = 0;
};

// All state of the device. Never destroyed: tensors may outlive the end of main.
struct State {
  std::vector<c10::Device> members;
  std::unique_ptr<Memory> memory;
  size_t small = 0;
  std::mutex mutex; // of all below
  std::multimap<size_t, void*> cached; // by shard
  std::unordered_map<void*, size_t> used; // shard
  size_t used_bytes = 0, cached_bytes = 0, peak_bytes = 0, small_tensors = 0; // bytes on each member
  std::vector<c10::Event> events;
};

State& state() {
  static State* one = new State;
  return *one;
}

std::atomic<bool> in_child{false};

State& started() {
  check_not_forked();
  TORCH_CHECK(!state().members.empty(), "The device multigpu has no members: ns_multigpu.aggregate.use names them");
  return state();
}

void release_cached(State& all) {
  for (auto [shard, base] : all.cached) all.memory->unmap(base, shard);
  all.cached.clear();
  all.cached_bytes = 0;
}

void* take(State& all, size_t bytes) {
  const size_t members = all.members.size(), unit = all.memory->granularity();
  const size_t shard = ((bytes + members - 1) / members + unit - 1) / unit * unit;
  std::lock_guard lock(all.mutex);
  auto found = all.cached.lower_bound(shard);
  void* base = nullptr;
  size_t taken = shard;
  if (found != all.cached.end() && found->first <= shard + shard / 8) {
    taken = found->first;
    base = found->second;
    all.cached.erase(found);
    all.cached_bytes -= taken;
  } else if (!(base = all.memory->map(shard)) && !all.cached.empty()) {
    synchronize(); // members may still read what was freed
    release_cached(all);
    base = all.memory->map(shard);
  }
  TORCH_CHECK_WITH(
      OutOfMemoryError, base, "multigpu out of memory. Tried to allocate ", bytes, " bytes over ", members,
      " members. Each holds ", all.used_bytes, " bytes of tensors; nothing is cached.");
  all.used[base] = taken;
  all.used_bytes += taken;
  all.peak_bytes = std::max(all.peak_bytes, all.used_bytes);
  return base;
}

void give_back(void* base) {
  State& all = state();
  std::lock_guard lock(all.mutex);
  auto found = all.used.find(base);
  all.used_bytes -= found->second;
  all.cached_bytes += found->second;
  all.cached.emplace(found->second, base);
  all.used.erase(found);
}

void free_small(void* context) {
  delete static_cast<c10::DataPtr*>(context);
  std::lock_guard lock(state().mutex);
  --state().small_tensors;
}

struct Pool final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    State& all = started();
    const c10::Device ours(c10::kPrivateUse1, 0);
    if (bytes == 0) return {nullptr, ours};
    if (bytes >= all.small) {
      void* base = take(all, bytes);
      return {base, base, &give_back, ours};
    }
    const c10::Device first = all.members[0];
    c10::DeviceGuard guard(first);
    auto* plain = new c10::DataPtr(c10::GetAllocator(first.type())->allocate(bytes));
    std::lock_guard lock(all.mutex);
    ++all.small_tensors;
    return {plain->get(), plain, &free_small, ours};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "multigpu: a storage is copied by its tensor");
  }
};

c10::Stream stream(c10::Device member) { return c10::impl::VirtualGuardImpl(member.type()).getStream(member); }

} // namespace

std::unique_ptr<Memory> host_memory(int members, size_t limit) { return std::make_unique<HostMemory>(members, limit); }

void start(std::vector<c10::Device> members, std::unique_ptr<Memory> memory, size_t small) {
  check_not_forked();
  State& all = state();
  static const int watched = pthread_atfork(nullptr, nullptr, [] { in_child = !state().members.empty(); });
  (void)watched;
  std::lock_guard lock(all.mutex);
  TORCH_CHECK(
      all.used.empty() && all.small_tensors == 0,
      "The members of multigpu cannot change while its tensors exist: delete them first");
  if (!all.cached.empty()) synchronize(); // members may still read what was freed
  release_cached(all);
  all.events.clear();
  all.peak_bytes = 0;
  for (c10::Device member : members) all.events.emplace_back(member.type());
  all.members = std::move(members);
  all.memory = std::move(memory);
  all.small = small;
}

bool is_started() { return !state().members.empty(); }

int count() { return static_cast<int>(started().members.size()); }

c10::Device device(int member) { return state().members[member]; }

size_t small() { return state().small; }

Together::Together() {
  State& all = started();
  if (!all.members[0].is_cuda()) return;
  std::lock_guard lock(all.mutex);
  all.events[0].record(stream(all.members[0]));
  for (size_t member = 1; member < all.members.size(); ++member) all.events[0].block(stream(all.members[member]));
}

Together::~Together() {
  State& all = state();
  if (!all.members[0].is_cuda()) return;
  std::lock_guard lock(all.mutex);
  for (size_t member = 1; member < all.members.size(); ++member) {
    all.events[member].record(stream(all.members[member]));
    all.events[member].block(stream(all.members[0]));
  }
}

void synchronize() {
  for (c10::Device member : state().members) {
    if (member.is_cuda()) c10::impl::VirtualGuardImpl(member.type()).synchronizeDevice(member.index());
  }
}

bool forked() { return in_child; }

void check_not_forked() {
  TORCH_CHECK(
      !in_child,
      "Cannot re-initialize multigpu in forked subprocess. To use multigpu with multiprocessing, you must use the "
      "'spawn' start method");
}

c10::Allocator* allocator() {
  static Pool pool;
  return &pool;
}

void empty_cache() {
  State& all = started();
  std::lock_guard lock(all.mutex);
  synchronize();
  release_cached(all);
}

std::vector<int64_t> memory_stats() {
  State& all = started();
  std::lock_guard lock(all.mutex);
  return {
      static_cast<int64_t>(all.used_bytes), static_cast<int64_t>(all.cached_bytes),
      static_cast<int64_t>(all.peak_bytes)};
}

std::vector<int64_t> shards(const void* base, size_t bytes) {
  State& all = started();
  std::lock_guard lock(all.mutex);
  const auto found = all.used.find(const_cast<void*>(base));
  const size_t shard = found == all.used.end() ? bytes : found->second;
  std::vector<int64_t> held;
  for (size_t member = 0; member < all.members.size(); ++member) {
    held.push_back(static_cast<int64_t>(std::min(shard, bytes)));
    bytes -= std::min(shard, bytes);
  }
  return held;
}

} // namespace aggregate
