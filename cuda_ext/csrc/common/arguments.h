// Arguments and results of operators that are bound once for all primitives: torch hands them over on a stack, and their
// names come from the schema. For the files that see torch.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <vector>

namespace nsmg {

class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : schema_(op.schema()), stack_(*stack), first_(stack->size() - schema_.arguments().size()) {}

  // The name of the argument that comes next; and it.
  const char* name() const { return schema_.arguments()[next_].name().c_str(); }
  at::Tensor tensor() { return stack_[first_ + next_++].toTensor(); }
  int64_t integer() { return stack_[first_ + next_++].toInt(); }
  double number() { return stack_[first_ + next_++].toDouble(); }
  std::vector<int64_t> integers() { return stack_[first_ + next_++].toIntVector(); }

  // In place of the arguments, the results.
  void give(const std::vector<at::Tensor>& results) {
    stack_.resize(first_);
    for (const at::Tensor& result : results) stack_.emplace_back(result);
  }

 private:
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  size_t first_, next_ = 0;
};

// The shape of a column: [count] where its width is 1.
inline std::vector<int64_t> column_shape(int64_t count, int64_t width) {
  return width == 1 ? std::vector<int64_t>{count} : std::vector<int64_t>{count, width};
}

// The pointers of columns that are already checked.
template <typename Columns, typename T>
typename Columns::template Pointers<const T> const_pointers(const std::vector<at::Tensor>& tensors) {
  typename Columns::template Pointers<const T> found;
  for (int c = 0; c < Columns::kCount; ++c) found.at[c] = tensors[c].template const_data_ptr<T>();
  return found;
}

template <typename Columns, typename T>
typename Columns::template Pointers<T> pointers(const std::vector<at::Tensor>& tensors) {
  typename Columns::template Pointers<T> found;
  for (int c = 0; c < Columns::kCount; ++c) found.at[c] = tensors[c].template mutable_data_ptr<T>();
  return found;
}

}  // namespace nsmg
