// The threads of a block, one running at a time.
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "cuda_runtime.h"

namespace emulation {
namespace {

constexpr size_t kStack = 1 << 16;

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStack);
  unsigned index = 0;
  bool over = false;
  std::vector<std::pair<float4*, const float4*>> copies;
};

// Generations alternate between two places, so that no fiber waits twice.
struct Warp {
  unsigned waiting = 0, generation = 0;
  uint64_t values[2][32];
};

struct Block {
  unsigned waiting = 0, generation = 0, threads;
  bool votes[2] = {true, true};
};

std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<Warp> warps;
Block now;
Fiber* running;
ucontext_t scheduler;
unsigned block_index, blocks;
uint64_t meetings;  // at barriers and in warps, so far
const std::function<void()>* body;
std::mt19937 generator(7);

void begin() {
  (*body)();
  running->over = true;
  swapcontext(&running->context, &scheduler);
}

void yield() { swapcontext(&running->context, &scheduler); }

void run_block(unsigned threads) {
  now = Block();
  now.threads = threads;
  warps.assign((threads + 31) / 32, Warp());
  while (fibers.size() < threads) fibers.push_back(std::make_unique<Fiber>());
  for (unsigned k = 0; k < threads; ++k) {
    Fiber& fiber = *fibers[k];
    fiber.index = k;
    fiber.over = false;
    fiber.copies.clear();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, begin, 0);
  }
  std::vector<unsigned> turns(threads);
  std::iota(turns.begin(), turns.end(), 0u);
  unsigned over = 0;
  while (over < threads) {
    const uint64_t before = over + meetings;
    std::shuffle(turns.begin(), turns.end(), generator);
    for (const unsigned k : turns) {
      running = fibers[k].get();
      if (running->over) continue;
      swapcontext(&scheduler, &running->context);
      over += running->over;
    }
    if (over + meetings == before) {
      std::fprintf(stderr, "%u threads have returned, and the other %u wait for them or for each other\n", over,
                   threads - over);
      std::abort();
    }
  }
}

}  // namespace

unsigned thread() { return running->index; }
Index block() { return {block_index}; }
Index grid() { return {blocks}; }
Index threads() { return {now.threads}; }
bool barrier(bool vote) {
  const unsigned generation = now.generation;
  bool& all = now.votes[generation % 2];
  all = all && vote;
  if (++now.waiting == now.threads) {
    now.waiting = 0;
    now.votes[1 - generation % 2] = true;
    ++now.generation;
    ++meetings;
  } else {
    while (now.generation == generation) yield();
  }
  return all;
}

const uint64_t* exchange(uint64_t value) {
  Warp& warp = warps[thread() / 32];
  const unsigned generation = warp.generation;
  warp.values[generation % 2][thread() % 32] = value;
  if (++warp.waiting == 32) {
    warp.waiting = 0;
    ++warp.generation;
    ++meetings;
  } else {
    while (warp.generation == generation) yield();
  }
  return warp.values[generation % 2];
}

void begin_copy(float4* to, const float4* from) {
  if (generator() % 2 == 0) {
    *to = *from;
  } else {
    running->copies.push_back({to, from});
  }
}

void end_copies() {
  for (const auto& [to, from] : running->copies) *to = *from;
  running->copies.clear();
}

void launch(unsigned grid, unsigned threads, const std::function<void()>& kernel) {
  body = &kernel;
  blocks = grid;
  std::vector<unsigned> turns(grid);
  std::iota(turns.begin(), turns.end(), 0u);
  std::shuffle(turns.begin(), turns.end(), generator);
  for (const unsigned turn : turns) {
    block_index = turn;
    run_block(threads);
  }
}

}  // namespace emulation
