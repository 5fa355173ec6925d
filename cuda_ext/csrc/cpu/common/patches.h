// The list of patches an operator renders, cut into tiles; and a way to spread uneven tiles over the cores.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace nsmg {

struct Patch {
  int view, x0, y0, x1, y1;
  int64_t first_pixel, first_tile;
  int tiles_x, tiles_y;
  int width() const { return x1 - x0; }
  int height() const { return y1 - y0; }
};

struct Tile {
  int x0, y0, x1, y1;  // pixels of the whole view
  int64_t pixel;       // index of the tile's first pixel among all pixels
  int64_t pitch;       // pixels from one row of the patch to the next
};

struct PatchList {
  std::vector<Patch> patches;
  int64_t pixels = 0, tiles = 0;
  int tile_size = 0;

  PatchList(c10::IntArrayRef numbers, int64_t tile_size_) : tile_size(static_cast<int>(tile_size_)) {
    TORCH_CHECK_VALUE(tile_size_ >= 1 && tile_size_ <= 64, "tile_size must lie in 1..64, got ", tile_size_);
    TORCH_CHECK_VALUE(numbers.size() % 5 == 0, "patches holds 5 integers a patch (view, x0, y0, x1, y1), got ",
                numbers.size(), " in all");
    for (size_t k = 0; k < numbers.size(); k += 5) {
      Patch p{int(numbers[k]), int(numbers[k + 1]), int(numbers[k + 2]), int(numbers[k + 3]), int(numbers[k + 4]),
              pixels, tiles, 0, 0};
      TORCH_CHECK_VALUE(p.view >= 0 && p.x0 >= 0 && p.y0 >= 0 && p.x1 >= p.x0 && p.y1 >= p.y0, "patch ", k / 5,
                  " is (view, x0, y0, x1, y1) = (", p.view, ", ", p.x0, ", ", p.y0, ", ", p.x1, ", ", p.y1,
                  "): need view, x0, y0 >= 0, x1 >= x0 and y1 >= y0");
      const bool empty = p.width() == 0 || p.height() == 0;
      p.tiles_x = empty ? 0 : (p.width() + tile_size - 1) / tile_size;
      p.tiles_y = empty ? 0 : (p.height() + tile_size - 1) / tile_size;
      pixels += int64_t(p.width()) * p.height();
      tiles += int64_t(p.tiles_x) * p.tiles_y;
      patches.push_back(p);
    }
  }

  std::vector<Tile> cut() const {
    std::vector<Tile> all;
    all.reserve(tiles);
    for (const Patch& p : patches)
      for (int row = 0; row < p.tiles_y; ++row)
        for (int column = 0; column < p.tiles_x; ++column) {
          const int x0 = p.x0 + column * tile_size, y0 = p.y0 + row * tile_size;
          all.push_back({x0, y0, std::min(x0 + tile_size, p.x1), std::min(y0 + tile_size, p.y1),
                         p.first_pixel + int64_t(y0 - p.y0) * p.width() + (x0 - p.x0), p.width()});
        }
    return all;
  }
};

// Calls work(task) for every task in [0, tasks), each by whichever thread is free: dense tiles stand together, so equal
// ranges would leave threads idle. `make_worker` is called once a thread and returns its `work` (with its own buffers).
template <typename MakeWorker>
void for_each_task(int64_t tasks, const MakeWorker& make_worker) {
  if (tasks == 0) return;
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), tasks);
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    auto work = make_worker();
    for (int64_t task = next++; task < tasks; task = next++) work(task);
  });
}

}  // namespace nsmg
