// How operators are split over the members: a table of rules, and what no rule can say.
#pragma once

#include "shards.h"

namespace aggregate {

// An operator that calls others or needs two rounds. Pushes the results, or returns false: not with these arguments.
using Custom = bool (*)(const Operator& op, const Stack& arguments, Stack& results);

// The custom function of an operator, or nullptr.
Custom custom(const std::string& name);

// Splats: points by shard, tiles by member.
bool cull(const Operator& op, const Stack& arguments, Stack& results);
bool intersect(const Operator& op, const Stack& arguments, Stack& results);
bool l1_ssim(const Operator& op, const Stack& arguments, Stack& results);
bool l1_ssim_backward(const Operator& op, const Stack& arguments, Stack& results);
bool project_backward(const Operator& op, const Stack& arguments, Stack& results);
bool sh_colors_backward(const Operator& op, const Stack& arguments, Stack& results);
bool rasterize(const Operator& op, const Stack& arguments, Stack& results);
bool rasterize_backward(const Operator& op, const Stack& arguments, Stack& results);

// Reduces shards to partial results and those to the result: the operator of its own results, such as a maximum.
bool reduce_all(const Operator& op, const Stack& arguments, Stack& results);

void fallback(const c10::OperatorHandle& handle, c10::DispatchKeySet, Stack* stack);

// Copies with broadcasting and conversion, each member its shard; from or to one device, that device.
void copy_tensor(const Tensor& from, const Tensor& to, bool non_blocking = false);

// The bytes of the largest tensor, scalars left out.
size_t largest(const Operator& op, const Stack& arguments);

} // namespace aggregate
