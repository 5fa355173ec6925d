// `take_lines`, `keep_line` and `show_patches` on CUDA.
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstdint>
#include <vector>

#include "cuda/bind/check.h"
#include "cuda/common/served.h"

namespace nsmg {
namespace served_bind {

void take_lines(at::TensorList tables, const at::Tensor& at, at::TensorList into) {
  TORCH_CHECK_VALUE(!tables.empty() && tables.size() <= kMostTables && tables.size() == into.size(),
                    "take_lines takes 1 to ", kMostTables, " tables and as many places, not ", tables.size(), " and ",
                    into.size(), ".");
  cuda_checked(at, "at", {1}, at::kLong, at);
  ServedTables served{};
  served.count = int(tables.size());
  served.lines = cuda_count(tables[0].size(0), "lines");
  for (size_t k = 0; k < tables.size(); ++k) {
    const at::Tensor &table = tables[k], &place = into[k];
    TORCH_CHECK_TYPE(table.element_size() == 4 && table.scalar_type() == place.scalar_type(), "table ", k,
                     " and its place must be of one kind of numbers of 4 bytes.");
    TORCH_CHECK_VALUE(table.dim() == 2 && table.size(0) == served.lines && place.numel() == table.size(1) &&
                          table.is_contiguous() && place.is_contiguous(),
                      "table ", k, " must be [", served.lines, ", ", place.numel(), "], and it and its place contiguous.");
    TORCH_CHECK_TYPE(place.device() == at.device() && (table.is_cuda() ? table.device() == at.device() : table.is_pinned()),
                     "table ", k, " must be on ", at.device(), " or in page-locked memory, and its place on ", at.device(),
                     ".");
    served.tables[k] = {static_cast<const int32_t*>(table.const_data_ptr()),
                        static_cast<int32_t*>(place.mutable_data_ptr()), int(table.size(1))};
  }
  const c10::cuda::CUDAGuard guard(at.device());
  NSMG_CUDA_CHECK(take_lines_launch(served, at.const_data_ptr<int64_t>(), c10::cuda::getCurrentCUDAStream()));
}

void keep_line(const at::Tensor& line, const at::Tensor& table, const at::Tensor& at) {
  cuda_floats(table, "table", {-1, line.numel()}, line);
  cuda_floats(line, "line", {-1}, line);
  cuda_checked(at, "at", {1}, at::kLong, line);
  TORCH_CHECK_VALUE(line.is_contiguous() && table.is_contiguous(), "line and table must be contiguous.");
  const c10::cuda::CUDAGuard guard(line.device());
  NSMG_CUDA_CHECK(keep_line_launch(line.const_data_ptr<float>(), table.mutable_data_ptr<float>(),
                                   cuda_count(table.size(0), "lines"), int(line.numel()),
                                   at.mutable_data_ptr<int64_t>(), c10::cuda::getCurrentCUDAStream()));
}

void show_patches(const at::Tensor& images, const at::Tensor& chosen, at::IntArrayRef patches, const at::Tensor& pictures) {
  cuda_ints(chosen, "chosen", {-1}, images);
  TORCH_CHECK_VALUE(images.dim() == 4 && images.is_contiguous() && pictures.dim() == 1 && pictures.is_contiguous() &&
                        patches.size() % 5 == 0,
                    "need contiguous images [V, H, W, C] and pictures [n], and 5 numbers a patch.");
  TORCH_CHECK_TYPE(images.scalar_type() == pictures.scalar_type() && images.device() == pictures.device(),
                   "images and pictures must be of one dtype on one device.");
  const int64_t bytes = images.element_size(), height = images.size(1), width = images.size(2);
  const int64_t pixel = bytes * images.size(3), places = chosen.numel();
  Shown shown{static_cast<const uint8_t*>(images.const_data_ptr()),
              static_cast<uint8_t*>(pictures.mutable_data_ptr()),
              chosen.const_data_ptr<int32_t>(),
              height * width * pixel,
              width * pixel,
              cuda_count(images.size(0), "images")};
  std::vector<ShownPatch> shown_patches;
  int64_t to = 0;
  for (size_t k = 0; k < patches.size(); k += 5) {
    const int64_t place = patches[k], x0 = patches[k + 1], y0 = patches[k + 2], x1 = patches[k + 3], y1 = patches[k + 4];
    TORCH_CHECK_VALUE(place >= 0 && place < places && 0 <= x0 && x0 <= x1 && x1 <= width && 0 <= y0 && y0 <= y1 &&
                          y1 <= height,
                      "patch ", k / 5, " does not lie in one of ", places, " images of ", width, "x", height, ".");
    ShownPatch patch{(x1 - x0) * pixel, (y0 * width + x0) * pixel, to, int(y1 - y0), int(place)};
    to += patch.row_bytes * patch.rows;
    if (x0 == 0 && x1 == width) {  // one stretch
      patch.row_bytes *= patch.rows;
      patch.rows = patch.row_bytes > 0 ? 1 : 0;
    }
    shown_patches.push_back(patch);
  }
  TORCH_CHECK_VALUE(to <= pictures.numel() * bytes, "the patches have ", to / bytes, " numbers, pictures ",
                    pictures.numel(), ".");
  const c10::cuda::CUDAGuard guard(images.device());
  NSMG_CUDA_CHECK(show_patches_launch(shown, shown_patches.data(), int(shown_patches.size()),
                                      c10::cuda::getCurrentCUDAStream()));
}

}  // namespace served_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("take_lines", &nsmg::served_bind::take_lines);
  m.impl("keep_line", &nsmg::served_bind::keep_line);
  m.impl("show_patches", &nsmg::served_bind::show_patches);
}
