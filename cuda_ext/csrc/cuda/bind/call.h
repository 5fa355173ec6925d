// One call of an operator on CUDA. Arguments are read by the names that the operators' one schema
// (cuda_ext/dispatch/schema.py) gives them, so no binding repeats a signature: each is a `void(Call&)`.
//
// A Call sets the device, checks arguments (shape, dtype, device; errors name the argument), keeps the contiguous
// tensors behind the pointers that it hands out until the call ends, and allocates results and scratch memory. Results
// are returned in the order in which they are made, which must be the schema's.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "cuda/bind/check.h"

namespace nsmg {

template <typename T>
constexpr at::ScalarType scalar_type() {
  return c10::CppTypeToScalarType<T>::value;
}

class Call {
 public:
  using Shape = at::IntArrayRef;  // of an argument: -1 accepts any size

  Call(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
      : schema_(op.schema()), arguments_(torch::jit::last(stack, schema_.arguments().size())), like_(first_tensor()),
        guard_(like_.device()), stream_(c10::cuda::getCurrentCUDAStream()) {}

  cudaStream_t stream() const { return stream_; }
  // Where and as what the first tensor among the arguments is.
  const at::Tensor& like() const { return like_; }

  // ---- arguments as they are ----
  // The argument behind the one that was read last, for a binding of several operators that name it differently.
  const char* next_name() const { return schema_.arguments().at(next_).name().c_str(); }
  const at::Tensor& tensor(const char* name) { return value(name).toTensor(); }
  std::vector<at::Tensor> tensors(const char* name) { return value(name).toTensorVector(); }
  bool has(const char* name) { return !value(name).isNone(); }
  int64_t integer(const char* name) { return value(name).toInt(); }
  double real(const char* name) { return value(name).toDouble(); }
  float number(const char* name) { return static_cast<float>(real(name)); }
  bool flag(const char* name) { return value(name).toBool(); }
  at::IntArrayRef integers(const char* name) { return integers_.emplace_back(value(name).toIntVector()); }
  at::ArrayRef<double> numbers(const char* name) { return numbers_.emplace_back(value(name).toDoubleVector()); }

  // The number of `what`, which the device counts in int32: the size of a tensor's dimension, or an integer argument.
  int count(const char* name, const char* what, int64_t dimension = 0) {
    const at::Tensor& of = tensor(name);
    TORCH_CHECK_VALUE(of.dim() > dimension, name, " must have ", dimension + 1, " dimensions at least, not ",
                      of.sizes(), ".");
    return cuda_count(of.size(dimension), what);
  }
  int counted(const char* name, const char* what) { return cuda_count(integer(name), what); }
  // `each` numbers for each of `number` things.
  const int64_t* integers_of(const char* name, int64_t each, int64_t number, const char* thing) {
    const at::IntArrayRef found = integers(name);
    TORCH_CHECK_VALUE(static_cast<int64_t>(found.size()) == each * number, name, " must hold ", each, " numbers a ",
                      thing, ".");
    return found.data();
  }

  // ---- tensors, checked ----
  // Contiguous; copied where it is not, or does not start at a multiple of `alignment` bytes.
  at::Tensor checked(const char* name, Shape shape, at::ScalarType dtype, uintptr_t alignment = 1) {
    return hold(aligned(cuda_checked(tensor(name), name, shape, dtype, like_), alignment));
  }
  template <typename T>
  const T* in(const char* name, Shape shape, uintptr_t alignment = 1) {
    return checked(name, shape, scalar_type<T>(), alignment).template const_data_ptr<T>();
  }
  const float* floats(const char* name, Shape shape, uintptr_t alignment = 1) {
    return in<float>(name, shape, alignment);
  }
  const int32_t* ints(const char* name, Shape shape, uintptr_t alignment = 1) {
    return in<int32_t>(name, shape, alignment);
  }
  const int64_t* longs(const char* name, Shape shape) { return in<int64_t>(name, shape); }
  // The same, or null where the argument is None.
  template <typename T>
  const T* in_or_null(const char* name, Shape shape) {
    return has(name) ? in<T>(name, shape) : nullptr;
  }
  // An argument that is written in place, which a copy must not be.
  template <typename T>
  T* in_place(const char* name, Shape shape) {
    return written<T>(tensor(name), name, shape);
  }
  template <typename T>
  T* written(const at::Tensor& given, const char* name, Shape shape) const {
    TORCH_CHECK_VALUE(given.is_contiguous(), name, " must be contiguous: it is written in place.");
    return cuda_checked(given, name, shape, scalar_type<T>(), like_).template mutable_data_ptr<T>();
  }

  // ---- results and scratch memory ----
  at::TensorOptions options(at::ScalarType dtype) const { return at::TensorOptions(like_.device()).dtype(dtype); }
  void result(c10::IValue made) { results_.push_back(std::move(made)); }
  template <typename T>
  T* out(Shape shape) {
    return made<T>(at::empty(shape, options(scalar_type<T>())));
  }
  template <typename T>
  T* out_zeros(Shape shape) {
    return made<T>(at::zeros(shape, options(scalar_type<T>())));
  }
  template <typename T>
  T* scratch(int64_t number) {
    return hold(at::empty({number}, options(scalar_type<T>()))).template mutable_data_ptr<T>();
  }
  void* scratch_bytes(int64_t bytes) { return scratch<uint8_t>(bytes); }

  // Keeps a tensor until the call ends.
  at::Tensor& hold(at::Tensor tensor) { return held_.emplace_back(std::move(tensor)); }

  // Replaces the arguments by the results.
  void finish(torch::jit::Stack& stack) {
    TORCH_CHECK(results_.size() == schema_.returns().size(), schema_.name(), " made ", results_.size(),
                " results; its schema has ", schema_.returns().size(), ".");
    torch::jit::drop(stack, schema_.arguments().size());
    for (c10::IValue& made : results_) stack.emplace_back(std::move(made));
  }

 private:
  template <typename T>
  T* made(const at::Tensor& tensor) {
    result(tensor);
    return tensor.mutable_data_ptr<T>();
  }

  // Bindings mostly read in the schema's order: the search begins behind the argument that was read last.
  const c10::IValue& value(const char* name) {
    const auto& known = schema_.arguments();
    for (size_t k = 0; k < known.size(); ++k) {
      const size_t at = (next_ + k) % known.size();
      if (known[at].name() == name) {
        next_ = at + 1;
        return arguments_[at];
      }
    }
    TORCH_CHECK(false, schema_.name(), " has no argument ", name, ".");
  }

  at::Tensor first_tensor() const {
    for (const c10::IValue& given : arguments_) {
      if (given.isTensor() && given.toTensor().is_cuda()) return given.toTensor();
      if (given.isTensorList()) {
        for (const at::Tensor& one : given.toTensorVector())
          if (one.is_cuda()) return one;
      }
    }
    TORCH_CHECK(false, schema_.name(), " was called without a tensor on CUDA.");
  }

  const c10::FunctionSchema& schema_;
  at::ArrayRef<c10::IValue> arguments_;
  at::Tensor like_;
  c10::cuda::CUDAGuard guard_;
  cudaStream_t stream_;
  size_t next_ = 0;
  std::deque<at::Tensor> held_;
  std::deque<std::vector<int64_t>> integers_;
  std::deque<std::vector<double>> numbers_;
  std::vector<c10::IValue> results_;
};

template <void (*kBody)(Call&)>
void run_call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op, *stack);
  kBody(call);
  call.finish(*stack);
}

// What `m.impl` takes for a binding.
template <void (*kBody)(Call&)>
torch::CppFunction bound() {
  return torch::CppFunction::makeFromBoxedFunction<&run_call<kBody>>();
}

}  // namespace nsmg
