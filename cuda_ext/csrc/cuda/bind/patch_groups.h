// For *_bind.cpp files: the tiles of a list of patches, cut into groups that go to the device with a launch, by value.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

#include "cuda/bind/check.h"
#include "cuda/raster/rasterize.h"

namespace nsmg {

struct Cut {
  std::vector<PatchGroup> groups;
  int64_t pixels = 0, tiles = 0;

  Cut(at::IntArrayRef numbers, int64_t size) {
    TORCH_CHECK_VALUE(size >= 1 && size <= 64, "tile_size must lie in 1..64, got ", size);
    TORCH_CHECK_VALUE(numbers.size() % 5 == 0, "patches holds 5 integers a patch (view, x0, y0, x1, y1), got ",
                      numbers.size(), " in all");
    for (size_t k = 0; k < numbers.size(); k += 5) {
      const int64_t x0 = numbers[k + 1], y0 = numbers[k + 2], x1 = numbers[k + 3], y1 = numbers[k + 4];
      TORCH_CHECK_VALUE(numbers[k] >= 0 && x0 >= 0 && y0 >= 0 && x1 >= x0 && y1 >= y0, "patch ", k / 5,
                        " is (view, x0, y0, x1, y1) = ", numbers.slice(k, 5),
                        ": need view, x0, y0 >= 0, x1 >= x0 and y1 >= y0");
      const int64_t across = (x1 - x0 + size - 1) / size, down = (y1 - y0 + size - 1) / size;
      if (across == 0 || down == 0) continue;
      if (groups.empty() || groups.back().count == kPatchGroup) groups.push_back({0, int(tiles), 0, 0, {}});
      PatchGroup& group = groups.back();
      group.entries[group.count++] = {int(x0), int(y0), int(x1), int(y1), int(pixels), int(tiles), int(across), 0};
      pixels += (x1 - x0) * (y1 - y0);
      tiles += across * down;
      cuda_count(pixels, "pixels");
      cuda_count(tiles, "tiles");
      group.tiles = int(tiles) - group.first_tile;
    }
  }
};

}  // namespace nsmg
