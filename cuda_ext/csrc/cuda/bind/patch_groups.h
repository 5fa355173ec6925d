// For *_bind.cpp files: the patches of a list, in groups that go to the device with a launch, by value.
#pragma once

#include "cpu/common/patches.h"
#include "cuda/bind/check.h"
#include "cuda/raster/rasterize.h"

namespace nsmg {

struct Cut : PatchList {
  std::vector<PatchGroup> groups;

  Cut(at::IntArrayRef numbers, int64_t size) : PatchList(numbers, size) {
    cuda_count(pixels, "pixels");
    cuda_count(tiles, "tiles");
    for (const Patch& p : patches) {
      if (p.tiles_x == 0) continue;
      const int pixel = int(p.first_pixel), tile = int(p.first_tile);
      if (groups.empty() || groups.back().count == kPatchGroup) groups.push_back({0, tile, 0, 0, {}});
      PatchGroup& group = groups.back();
      group.entries[group.count++] = {p.x0, p.y0, p.x1, p.y1, pixel, tile, p.tiles_x, 0};
      group.tiles += p.tiles_x * p.tiles_y;
    }
  }
};

}  // namespace nsmg
