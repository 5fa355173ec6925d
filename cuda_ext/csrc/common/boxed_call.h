// One call of an operator that is bound once for several primitives or signatures: arguments by the names that the
// operators' one schema (cuda_ext/dispatch/schema.py) gives them, results by the schema's names or in its order. For the
// files that see torch.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cstdint>
#include <deque>
#include <string_view>
#include <utility>
#include <vector>

namespace nsmg {

class BoxedCall {
 public:
  BoxedCall(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
      : schema_(op.schema()), arguments_(torch::jit::last(stack, schema_.arguments().size())),
        results_(schema_.returns().size()) {}

  // The argument behind the one that was read last, for a binding of several operators that name it differently.
  const char* next_name() const { return schema_.arguments().at(next_).name().c_str(); }
  // The first argument, which is a tensor.
  const at::Tensor& first() const { return arguments_[0].toTensor(); }

  bool knows(std::string_view name) const { return schema_.argumentIndexWithName(name).has_value(); }
  bool has(std::string_view name) { return !value(name).isNone(); }
  const at::Tensor& tensor(std::string_view name) { return value(name).toTensor(); }
  std::vector<at::Tensor> tensors(std::string_view name) { return value(name).toTensorVector(); }
  int64_t integer(std::string_view name) { return value(name).toInt(); }
  double real(std::string_view name) { return value(name).toDouble(); }
  bool flag(std::string_view name) { return value(name).toBool(); }
  at::IntArrayRef integers(std::string_view name) { return integers_.emplace_back(value(name).toIntVector()); }
  at::ArrayRef<double> numbers(std::string_view name) { return numbers_.emplace_back(value(name).toDoubleVector()); }

  // Sets the result of this name; without a name, the first that is not set.
  void result(c10::IValue made, std::string_view name = {}) {
    for (size_t k = 0; k < results_.size(); ++k) {
      if (!results_[k].isNone() || (!name.empty() && schema_.returns()[k].name() != name)) continue;
      results_[k] = std::move(made);
      return;
    }
    TORCH_CHECK(false, schema_.name(), " has no result ", name, " left to set.");
  }

  // Replaces the arguments by the results.
  void finish(torch::jit::Stack& stack) {
    torch::jit::drop(stack, schema_.arguments().size());
    for (c10::IValue& made : results_) {
      TORCH_CHECK(!made.isNone(), schema_.name(), " did not set all of its results.");
      stack.emplace_back(std::move(made));
    }
  }

 protected:
  // Bindings mostly read in the schema's order: the search begins behind the argument that was read last.
  const c10::IValue& value(std::string_view name) {
    const auto& known = schema_.arguments();
    for (size_t k = 0; k < known.size(); ++k) {
      const size_t at = (next_ + k) % known.size();
      if (known[at].name() != name) continue;
      next_ = at + 1;
      return arguments_[at];
    }
    TORCH_CHECK(false, schema_.name(), " has no argument ", name, ".");
  }

  const c10::FunctionSchema& schema_;
  at::ArrayRef<c10::IValue> arguments_;

 private:
  size_t next_ = 0;
  std::deque<std::vector<int64_t>> integers_;
  std::deque<std::vector<double>> numbers_;
  std::vector<c10::IValue> results_;
};

template <typename Call, void (*kBody)(Call&)>
void run_call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op, *stack);
  kBody(call);
  call.finish(*stack);
}

// What `m.impl` takes for a binding.
template <typename Call, void (*kBody)(Call&)>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<&run_call<Call, kBody>>();
}

// The shape of a column: [count] where its width is 1.
inline std::vector<int64_t> column_shape(int64_t count, int64_t width) {
  return width == 1 ? std::vector<int64_t>{count} : std::vector<int64_t>{count, width};
}

}  // namespace nsmg
