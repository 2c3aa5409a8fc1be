#include "operations/differentiation.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

#include "hvd/error.h"
#include "hvd/hvd.h"

namespace hvd::libtorch {
namespace {

/// The arguments of a backward, stored in autograd's saved data.
struct Backward : torch::CustomClassHolder {
  torch::Tensor output;  ///< moved to the graph once
  AllreduceOptions options;
  int root = 0;
  std::int64_t first_row = 0;
  std::int64_t rows = 0;
  bool equal_shares = false;
  torch::Tensor splits;

  CollectiveOptions collective() const {
    return {.name = options.name, .process_set = options.process_set};
  }
};
using BackwardPtr = c10::intrusive_ptr<Backward>;

template <class Rule>
struct AttachedFunction : torch::autograd::Function<AttachedFunction<Rule>> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context,
                               const torch::Tensor& input, BackwardPtr state) {
    context->saved_data["shape"] = input.sizes().vec();
    context->saved_data["state"] = c10::IValue::make_capsule(state);
    return std::move(state->output);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto state =
        c10::static_intrusive_pointer_cast<Backward>(context->saved_data["state"].toCapsule());
    const auto shape = context->saved_data["shape"].toIntVector();
    return {Rule::apply(*state, gradients[0]).reshape(shape), torch::Tensor()};
  }
};

struct AllreduceRule {
  static torch::Tensor apply(const Backward& state, const torch::Tensor& gradient) {
    return allreduce(gradient, state.options);
  }
};

/// The factor of each rank's contribution to a linear reduction.
double factor_of(const AllreduceOptions& options) {
  const double divisor = options.op == ReduceOp::kAverage ? options.process_set.size() : 1;
  return options.prescale_factor * options.postscale_factor / divisor;
}

struct ReduceRule {
  static torch::Tensor apply(const Backward& state, const torch::Tensor& gradient) {
    const auto wire = wire_type(gradient.scalar_type(), state.options.compression);
    const torch::Tensor root =
        broadcast(wire ? gradient.to(*wire) : gradient, state.root, state.collective());
    return root.to(gradient.scalar_type()) * factor_of(state.options);
  }
};

struct ScatterRule {
  static torch::Tensor apply(const Backward& state, const torch::Tensor& gradient) {
    const torch::Tensor whole = gather(gradient, state.root, state.collective());
    if (rank() != state.root) {
      std::vector<std::int64_t> shape = gradient.sizes().vec();
      shape.front() = state.rows;
      return gradient.new_zeros(shape);
    }
    if (whole.size(0) != state.rows) {
      throw Error(Label{"scatter", state.options.name}.str() + ": expected the gradients of " +
                  std::to_string(state.rows) + " rows, got " + std::to_string(whole.size(0)) +
                  "; a rank has called join() since");
    }
    return whole;
  }
};

struct ReducescatterRule {
  static torch::Tensor apply(const Backward& state, const torch::Tensor& gradient) {
    const auto wire = wire_type(gradient.scalar_type(), state.options.compression);
    torch::Tensor whole = allgather(wire ? gradient.to(*wire) : gradient, state.collective());
    if (whole.size(0) != state.rows) {
      throw Error(Label{"reducescatter", state.options.name}.str() +
                  ": expected the gradients of " + std::to_string(state.rows) + " rows, got " +
                  std::to_string(whole.size(0)) + "; a rank has called join() since");
    }
    return whole.to(gradient.scalar_type()) * factor_of(state.options);
  }
};

struct AllgatherRule {
  static torch::Tensor apply(const Backward& state, const torch::Tensor& gradient) {
    if (state.equal_shares) return reducescatter(gradient, state.options);
    return allreduce(gradient, state.options).narrow(0, state.first_row, state.rows);
  }
};

struct BroadcastRule {
  static torch::Tensor apply(const Backward& state, const torch::Tensor& gradient) {
    const torch::Tensor sum = allreduce(gradient, state.options);
    return rank() == state.root ? sum : torch::zeros_like(sum);
  }
};

struct AlltoallRule {
  static torch::Tensor apply(const Backward& state, const torch::Tensor& gradient) {
    return alltoall(gradient, state.splits, state.collective()).output;
  }
};

BackwardPtr make_state(const CollectiveOptions& options, std::string name) {
  auto state = c10::make_intrusive<Backward>();
  state->options = {
      .name = std::move(name), .op = ReduceOp::kSum, .process_set = options.process_set};
  return state;
}

BackwardPtr make_state(const AllreduceOptions& options, std::string name) {
  auto state = c10::make_intrusive<Backward>();
  state->options = options;
  state->options.name = std::move(name);
  return state;
}

template <class Rule>
torch::Tensor attach(const torch::Tensor& input, torch::Tensor output, BackwardPtr state) {
  state->output = std::move(output);
  return AttachedFunction<Rule>::apply(input, std::move(state));
}

}  // namespace

bool differentiates(const torch::Tensor& tensor) {
  return torch::GradMode::is_enabled() && tensor.defined() && tensor.requires_grad();
}

std::string backward_name(const std::string& name) { return derived_name(name, "backward"); }

void check_differentiable(const torch::Tensor& tensor, const AllreduceOptions& options,
                          std::string_view operation) {
  if (options.op == ReduceOp::kSum || options.op == ReduceOp::kAverage) return;
  if (!differentiates(tensor)) return;
  throw UsageError(Label{operation, options.name}.str() + ": " +
                   std::string(to_string(options.op)) +
                   " is not differentiable, but the tensor requires grad; pass detach() or use a "
                   "sum or an average");
}

void check_detached(const torch::Tensor& tensor, std::string_view operation,
                    std::string_view name) {
  if (!differentiates(tensor)) return;
  throw UsageError(Label{operation, name}.str() +
                   ": asynchronous operations are not differentiable, but the tensor requires "
                   "grad, and its gradient would be lost; pass detach(), or use "
                   "the blocking call");
}

void check_detached(at::TensorList tensors, std::string_view operation, std::string_view name) {
  for (const torch::Tensor& tensor : tensors) check_detached(tensor, operation, name);
}

torch::Tensor attach_allreduce(const torch::Tensor& input, torch::Tensor output,
                               const AllreduceOptions& options, std::string name) {
  if (!differentiates(input)) return output;
  return attach<AllreduceRule>(input, std::move(output), make_state(options, std::move(name)));
}

torch::Tensor attach_reduce(const torch::Tensor& input, torch::Tensor output, int root_rank,
                            const AllreduceOptions& options, std::string name) {
  if (!differentiates(input)) return output;
  auto state = make_state(options, std::move(name));
  state->root = root_rank;
  return attach<ReduceRule>(input, std::move(output), std::move(state));
}

torch::Tensor attach_scatter(const torch::Tensor& input, torch::Tensor output, int root_rank,
                             const CollectiveOptions& options) {
  if (!differentiates(input)) return output;
  auto state = make_state(options, backward_name(options.name));
  state->root = root_rank;
  state->rows = input.size(0);
  return attach<ScatterRule>(input, std::move(output), std::move(state));
}

torch::Tensor attach_reducescatter(const torch::Tensor& input, torch::Tensor output,
                                   const AllreduceOptions& options, std::string name) {
  if (!differentiates(input)) return output;
  auto state = make_state(options, std::move(name));
  state->rows = input.size(0);
  return attach<ReducescatterRule>(input, std::move(output), std::move(state));
}

torch::Tensor attach_allgather(const torch::Tensor& input, torch::Tensor output,
                               const CollectiveOptions& options, std::string name,
                               const Gathered& gathered) {
  if (!differentiates(input)) return output;
  auto state = make_state(options, std::move(name));
  const auto own = gathered.first_dims.begin() + options.process_set.rank();
  state->first_row = std::accumulate(gathered.first_dims.begin(), own, std::int64_t{0});
  state->rows = *own;
  state->equal_shares =
      *own > 0 && std::all_of(gathered.first_dims.begin(), gathered.first_dims.end(),
                              [&](std::int64_t rows) { return rows == *own; });
  return attach<AllgatherRule>(input, std::move(output), std::move(state));
}

torch::Tensor attach_broadcast(const torch::Tensor& input, torch::Tensor output, int root_rank,
                               const CollectiveOptions& options) {
  if (!differentiates(input)) return output;
  auto state = make_state(options, backward_name(options.name));
  state->root = root_rank;
  return attach<BroadcastRule>(input, std::move(output), std::move(state));
}

torch::Tensor attach_alltoall(const torch::Tensor& input, torch::Tensor output,
                              torch::Tensor received_splits, const CollectiveOptions& options) {
  if (!differentiates(input)) return output;
  auto state = make_state(options, backward_name(options.name));
  state->splits = std::move(received_splits);
  return attach<AlltoallRule>(input, std::move(output), std::move(state));
}

}  // namespace hvd::libtorch
