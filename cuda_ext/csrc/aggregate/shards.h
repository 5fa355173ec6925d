// Calls torch's own kernels on shards of tensors: each member's call sees plain tensors of that member.
#pragma once

#include "members.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <string>
#include <vector>

namespace aggregate {

using at::Tensor;
using torch::jit::Stack;

// Rows [begin, begin + length) of a dimension, and the member that computes them.
struct Part {
  int member;
  int64_t begin, length;
};

// The non-empty parts of a dimension of `size` rows: even, in the members' order, as in memory.
std::vector<Part> parts_of(int64_t size);

// A dimension that is split (negative: counted from the last), and its rows.
struct Cut {
  int64_t dim, size;
};

// Says for each tensor of a call which of its dimensions is split, one letter each:
// '.': none; 'l': none, and members read their own copies of large tensors; 's': the cut's; 'a': the last but one; 'b': the third from the end; '0' to '9': that one.
// For results only: '+': none, but the members' results are added; '-': an empty tensor takes their place.
// A tensor with one row there is broadcast: each member's call sees all of it.
int64_t split_dim(char letter, const Cut& cut, const Tensor& tensor);

// An operator and what its schema says about its arguments.
struct Operator {
  explicit Operator(const c10::OperatorHandle& handle);
  bool is_tensor(size_t argument) const { return letter_of[argument] >= 0; }
  c10::OperatorHandle handle;
  std::vector<int> letter_of; // of each argument: the number of its letter, or -1
  std::vector<int> returned; // of each result: the argument that it is, or -1
  bool copies; // whether it is copy_
  bool stages; // whether kernels may write results to contiguous tensors only
  std::vector<size_t> outs; // arguments that receive results
  int dim_argument = -1, keepdim_argument = -1; // the arguments "dim" and "keepdim"
};

// A tensor of one member on the memory of `tensor`, or on rows of its dimension `dim`.
Tensor plain(const Tensor& tensor, int member, int64_t dim = -1, int64_t begin = 0, int64_t length = 0);
// A tensor of the aggregate device on the memory of a plain one.
Tensor wrapped(const Tensor& plain);
Tensor empty_like_sizes(const Tensor& plain, at::IntArrayRef sizes);

// Copies `from` to `to`, plain tensors of one member, by a kernel. For memory of several GPUs the driver's copies, which
// copy_ calls, are taken for copies between GPUs on all members but the first.
void copy_by_kernel(const Tensor& to, const Tensor& from);

// Calls an operator on the first member alone.
void call_alone(const Operator& op, const Stack& arguments, Stack& results);
// Calls `op` once for each part of the cut. `rows`: an argument that repeats the number of rows, or -1.
void call_shards(
    const Operator& op, const Stack& arguments, const std::string& letters, const std::string& outs, Cut cut, int rows,
    Stack& results);
// The same for given parts; `change` adapts the arguments of the k-th.
using Change = std::function<void(Stack& arguments, size_t k)>;
void call_parts(
    const Operator& op, const Stack& arguments, const std::string& letters, const std::string& outs, Cut cut, int rows,
    const std::vector<Part>& parts, const Change& change, Stack& results);
// Calls `op` for one member, on its shard if a part is given, and returns the results.
Stack call_member(
    const Operator& op, const Stack& arguments, const std::string& letters, const Cut& cut, const Part& part,
    int rows = -1);

// Calls `work` with the number of each part, all at once: operators may make the host wait for their member.
void at_once(const std::vector<Part>& parts, const std::function<void(size_t k)>& work);
// The members' k-th results in one tensor, joined as `letter` says (see split_dim).
Tensor joined(
    const std::vector<Stack>& found, size_t k, char letter, const Cut& cut, const std::vector<Part>& parts);
// The members' k-th results of any lengths one behind the other, `added[i]` added to those of the i-th.
Tensor in_line(
    const std::vector<Stack>& found, size_t k, const std::vector<Part>& parts, const std::vector<int64_t>& added);

// Calls of each member since the start.
std::vector<int64_t>& calls();

} // namespace aggregate
