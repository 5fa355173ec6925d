// The definitions of primitive.h for compositing.
#pragma once

#include "cuda/raster/primitive_traits.h"
#include "cuda/raster/raster_backward.h"
#include "cuda/raster/raster_forward.h"

namespace nsmg {
namespace {

constexpr int kRowThreads = 128;

template <typename Primitive>
__global__ void __launch_bounds__(kRowThreads)
pack_kernel(const __grid_constant__ RowPointers<Primitive> columns, int64_t rows, float4* __restrict__ table,
            int32_t* __restrict__ counts) {
  if (blockIdx.x == 0 && threadIdx.x <= 2 * kLengthClasses) counts[threadIdx.x] = 0;  // and that of segments
  const int64_t row = int64_t(blockIdx.x) * kRowThreads + threadIdx.x;
  if (row >= rows) return;
  float numbers[Primitive::RowColumns::kNumbers];
  Primitive::RowColumns::load(columns, row, numbers);
  const auto splat = Primitive::pack(numbers);
  float4 quads[kPackedQuads<Primitive>] = {};
  memcpy(quads, &splat, sizeof(splat));
#pragma unroll
  for (int q = 0; q < kPackedQuads<Primitive>; ++q) table[kPackedQuads<Primitive> * row + q] = quads[q];
}

template <typename Primitive>
__global__ void __launch_bounds__(kRowThreads)
finish_kernel(const float4* __restrict__ table, const float4* __restrict__ records, int64_t rows,
              const __grid_constant__ typename Primitive::RowColumns::template Pointers<float> gradients) {
  const int64_t row = int64_t(blockIdx.x) * kRowThreads + threadIdx.x;
  if (row >= rows) return;
  float4 quads[kSumQuads<Primitive>];
#pragma unroll
  for (int q = 0; q < kSumQuads<Primitive>; ++q) quads[q] = records[kSumQuads<Primitive> * row + q];
  float sums[Primitive::kGradients], found[Primitive::RowColumns::kNumbers];
  memcpy(sums, quads, sizeof(sums));
  Primitive::gradients(unpack_splat<Primitive>(table + kPackedQuads<Primitive> * row), sums, found);
  Primitive::RowColumns::store(gradients, row, found);
}

unsigned row_blocks(int64_t rows) { return unsigned((rows + kRowThreads - 1) / kRowThreads); }

}  // namespace

template <typename Primitive>
cudaError_t pack_primitives(const RowPointers<Primitive>& columns, const RasterShape& shape, const RasterState& state,
                            const RasterPlan& plan, cudaStream_t stream) {
  const auto kernel = pack_kernel<Primitive>;
  kernel<<<shape.rows > 0 ? row_blocks(shape.rows) : 1, kRowThreads, 0, stream>>>(columns, shape.rows, state.table,
                                                                                 plan.classes);
  return cudaGetLastError();
}

template <typename Primitive>
cudaError_t draw_primitives(const int32_t* row_ids, const RasterShape& shape, const RasterState& state,
                            const RasterPlan& plan, const PrimitiveOutputs& outputs, cudaStream_t stream) {
  if (shape.tiles == 0) return cudaSuccess;
  const auto kernel = forward<PrimitiveTraits<Primitive>, false>;
  kernel<<<unsigned(shape.tiles), kTileThreads, 0, stream>>>(row_ids, int(shape.rows), 0, state, plan, 0, outputs);
  return cudaGetLastError();
}

template <typename Primitive>
cudaError_t draw_primitives_backward(const int32_t* row_ids, const RasterShape& shape, const RasterState& state,
                                     const PrimitivePixelGradients& pixels, float* records,
                                     const typename Primitive::RowColumns::template Pointers<float>& gradients,
                                     cudaStream_t stream) {
  if (shape.rows == 0) return cudaSuccess;
  if (shape.tiles > 0) {  // without tiles nothing has written the slots
    const auto kernel = backward<PrimitiveTraits<Primitive>>;
    const RecordTarget target{records, nullptr, nullptr, nullptr, false};
    kernel<<<unsigned(shape.chunk_slots()), kTileThreads, 0, stream>>>(row_ids, int(shape.rows), 0, state, pixels,
                                                                       target);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  const auto kernel = finish_kernel<Primitive>;
  kernel<<<row_blocks(shape.rows), kRowThreads, 0, stream>>>(
      state.table, reinterpret_cast<const float4*>(records), shape.rows, gradients);
  return cudaGetLastError();
}

// Compiles the kernels of a primitive.
#define NSMG_DRAW_PRIMITIVES(P)                                                                                    \
  template cudaError_t pack_primitives<P>(const RowPointers<P>&, const RasterShape&, const RasterState&,           \
                                          const RasterPlan&, cudaStream_t);                                        \
  template cudaError_t draw_primitives<P>(const int32_t*, const RasterShape&, const RasterState&, const RasterPlan&, \
                                          const PrimitiveOutputs&, cudaStream_t);                                  \
  template cudaError_t draw_primitives_backward<P>(const int32_t*, const RasterShape&, const RasterState&,         \
                                                   const PrimitivePixelGradients&, float*,                         \
                                                   const P::RowColumns::Pointers<float>&, cudaStream_t)

}  // namespace nsmg
