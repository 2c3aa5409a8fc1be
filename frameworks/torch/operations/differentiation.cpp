#include "operations/differentiation.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <utility>

#include "hvd/error.h"
#include "hvd/hvd.h"

namespace hvd::libtorch {
namespace {

using Derivative = std::function<torch::Tensor(const torch::Tensor& gradient)>;

/// The result of a collective and its derivative. The derivative stays in autograd's saved data
/// until backward().
struct Attached : torch::CustomClassHolder {
  torch::Tensor output;  ///< moved out by forward()
  Derivative derivative;
};

struct AttachedFunction : torch::autograd::Function<AttachedFunction> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context,
                               const torch::Tensor& input, c10::intrusive_ptr<Attached> attached) {
    context->saved_data["shape"] = input.sizes().vec();
    context->saved_data["attached"] = c10::IValue::make_capsule(attached);
    return std::move(attached->output);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto attached =
        c10::static_intrusive_pointer_cast<Attached>(context->saved_data["attached"].toCapsule());
    const auto shape = context->saved_data["shape"].toIntVector();
    return {attached->derivative(gradients[0]).reshape(shape), torch::Tensor()};
  }
};

torch::Tensor attach(const torch::Tensor& input, torch::Tensor output, Derivative derivative) {
  auto attached = c10::make_intrusive<Attached>();
  attached->output = std::move(output);
  attached->derivative = std::move(derivative);
  return AttachedFunction::apply(input, std::move(attached));
}

AllreduceOptions with_name(AllreduceOptions options, std::string name) {
  options.name = std::move(name);
  return options;
}

/// The factor of each rank's contribution to a linear reduction.
double factor_of(const AllreduceOptions& options) {
  const double divisor = is_average(options.op) ? options.process_set.size() : 1;
  return options.prescale_factor * options.postscale_factor / divisor;
}

/// Casts the gradient to the dtype in which the forward pass sent its data.
torch::Tensor compressed(const torch::Tensor& gradient, Compression compression) {
  const auto wire = wire_type(gradient.scalar_type(), compression);
  return wire ? gradient.to(*wire) : gradient;
}

/// @param rows the number of rows of the operation's input
torch::Tensor require_rows(torch::Tensor gathered, std::int64_t rows, const Label& label) {
  if (gathered.size(0) == rows) return gathered;
  throw Error(label.str() + ": expected the gradients of " + std::to_string(rows) + " rows, got " +
              std::to_string(gathered.size(0)) +
              "; a rank has called join() since the forward pass");
}

}  // namespace

bool differentiates(const torch::Tensor& tensor) {
  return torch::GradMode::is_enabled() && tensor.defined() && tensor.requires_grad();
}

std::string backward_name(const std::string& name) { return derived_name(name, "backward"); }

void check_differentiable(const torch::Tensor& tensor, const AllreduceOptions& options,
                          std::string_view operation) {
  if (options.op == ReduceOp::kSum || is_average(options.op)) return;
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
  return attach(input, std::move(output),
                [how = with_name(options, std::move(name))](const torch::Tensor& gradient) {
                  return allreduce(gradient, how);
                });
}

torch::Tensor attach_reduce(const torch::Tensor& input, torch::Tensor output, int root_rank,
                            const AllreduceOptions& options, std::string name) {
  if (!differentiates(input)) return output;
  return attach(
      input, std::move(output),
      [how = with_name(options, std::move(name)), root_rank](const torch::Tensor& gradient) {
        const torch::Tensor root = broadcast(compressed(gradient, how.compression), root_rank,
                                             {.name = how.name, .process_set = how.process_set});
        return root.to(gradient.scalar_type()) * factor_of(how);
      });
}

torch::Tensor attach_scatter(const torch::Tensor& input, torch::Tensor output, int root_rank,
                             const CollectiveOptions& options) {
  if (!differentiates(input)) return output;
  const CollectiveOptions back{.name = backward_name(options.name),
                               .process_set = options.process_set};
  return attach(input, std::move(output),
                [back, root_rank, rows = input.size(0)](const torch::Tensor& gradient) {
                  torch::Tensor whole = gather(gradient, root_rank, back);
                  if (rank() == root_rank)
                    return require_rows(std::move(whole), rows, Label{"scatter", back.name});
                  std::vector<std::int64_t> shape = gradient.sizes().vec();
                  shape.front() = rows;
                  return gradient.new_zeros(shape);
                });
}

torch::Tensor attach_reducescatter(const torch::Tensor& input, torch::Tensor output,
                                   const AllreduceOptions& options, std::string name) {
  if (!differentiates(input)) return output;
  return attach(input, std::move(output),
                [how = with_name(options, std::move(name)),
                 rows = input.size(0)](const torch::Tensor& gradient) {
                  const torch::Tensor whole =
                      require_rows(allgather(compressed(gradient, how.compression),
                                             {.name = how.name, .process_set = how.process_set}),
                                   rows, Label{"reducescatter", how.name});
                  return whole.to(gradient.scalar_type()) * factor_of(how);
                });
}

torch::Tensor attach_allgather(const torch::Tensor& input, torch::Tensor output,
                               const CollectiveOptions& options, std::string name,
                               const GatheredResult& gathered) {
  if (!differentiates(input)) return output;
  const std::vector<std::int64_t>& all_rows = gathered.first_dims;
  const auto own = all_rows.begin() + options.process_set.rank();
  const std::int64_t first_row = std::accumulate(all_rows.begin(), own, std::int64_t{0});
  const std::int64_t rows = *own;
  const bool equal_shares =
      rows > 0 && std::all_of(all_rows.begin(), all_rows.end(),
                              [rows](std::int64_t others) { return others == rows; });
  const AllreduceOptions sum{
      .name = std::move(name), .op = ReduceOp::kSum, .process_set = options.process_set};
  return attach(input, std::move(output),
                [sum, first_row, rows, equal_shares](const torch::Tensor& gradient) {
                  if (equal_shares) return reducescatter(gradient, sum);
                  return allreduce(gradient, sum).narrow(0, first_row, rows);
                });
}

torch::Tensor attach_broadcast(const torch::Tensor& input, torch::Tensor output, int root_rank,
                               const CollectiveOptions& options) {
  if (!differentiates(input)) return output;
  const AllreduceOptions how{.name = backward_name(options.name),
                             .op = ReduceOp::kSum,
                             .process_set = options.process_set};
  return attach(input, std::move(output), [how, root_rank](const torch::Tensor& gradient) {
    const torch::Tensor sum = allreduce(gradient, how);
    return rank() == root_rank ? sum : torch::zeros_like(sum);
  });
}

torch::Tensor attach_alltoall(const torch::Tensor& input, torch::Tensor output,
                              torch::Tensor received_splits, const CollectiveOptions& options) {
  if (!differentiates(input)) return output;
  const CollectiveOptions back{.name = backward_name(options.name),
                               .process_set = options.process_set};
  return attach(input, std::move(output),
                [back, splits = std::move(received_splits)](const torch::Tensor& gradient) {
                  return alltoall(gradient, splits, back).output;
                });
}

}  // namespace hvd::libtorch
