#include "operations/sparse.h"

#include <memory>
#include <utility>

#include "hvd/error.h"
#include "operations/differentiation.h"
#include "operations/operation_tasks.h"

namespace hvd {
namespace libtorch {
namespace {

torch::ScalarType check_sparse(const torch::Tensor& coo, const AllreduceOptions& options) {
  const Label label{"sparse_allreduce", options.name};
  if (!coo.defined()) {
    throw UsageError(label.str() + ": the tensor is undefined; expected one with data");
  }
  if (coo.layout() != torch::kSparse) {
    throw UsageError(label.str() + ": expected a sparse COO tensor, got layout " +
                     c10::str(coo.layout()) + "; use allreduce or convert it with to_sparse()");
  }
  check_tensor(coo.detach()._values(), label);
  if (options.op != ReduceOp::kSum && !is_average(options.op)) {
    throw UsageError(label.str() + ": op: expected sum or average, got " +
                     std::string(to_string(options.op)) +
                     "; make the tensor dense with to_dense() (an optimizer: sparse_as_dense)");
  }
  const bool scaled =
      is_average(options.op) || options.prescale_factor != 1 || options.postscale_factor != 1;
  if (coo.scalar_type() == torch::kBool && scaled) {
    throw UsageError(label.str() + ": bool can neither be averaged nor scaled; use a sum (or)");
  }
  return coo.scalar_type();
}

/// The type in which sums are computed. Integers must not overflow before they are averaged.
torch::ScalarType accumulation_type(torch::ScalarType type) {
  if (c10::isReducedFloatingType(type)) return torch::kFloat32;
  return c10::isIntegralType(type, /*includeBool=*/false) ? torch::kInt64 : type;
}

/// Scales as the core does: integers in double, rounded toward zero.
torch::Tensor scaled(const torch::Tensor& values, double factor) {
  if (factor == 1) return values;
  if (c10::isFloatingType(values.scalar_type())) return values * factor;
  return (values.to(torch::kFloat64) * factor).to(values.scalar_type());
}

}  // namespace

SparseReduction::SparseReduction(const torch::Tensor& coo, AllreduceOptions options)
    : options_(std::move(options)), type_(check_sparse(coo, options_)) {
  const torch::NoGradGuard no_grad;
  const torch::ScalarType wide = accumulation_type(type_);
  torch::Tensor own = coo.detach();
  // Coalescing reduces the bytes that are sent. Values that are added in a wider type are added
  // only once, after the exchange.
  if (wide == type_) own = own.coalesce();
  const torch::Tensor values = scaled(own._values().to(wide), options_.prescale_factor);
  gather(own._indices().t(), derived_name(options_.name, "indices"));
  gather(values.to(wire_type(type_, options_.compression).value_or(type_)), options_.name);
  gather(torch::tensor(own.sizes().vec(), torch::kInt64).unsqueeze(0),
         derived_name(options_.name, "shape"));
  make_group(options_.name, submissions_);
}

void SparseReduction::gather(const torch::Tensor& part, std::string name) {
  OperationTask task = allgather_task(part, {.name = {}, .process_set = options_.process_set},
                                      std::move(name), std::make_shared<GatheredResult>());
  submissions_.push_back(std::move(task.submission));
  parts_.push_back(std::move(task.finish));
}

/// The ranks already have equal numbers of sparse and dense dimensions: otherwise the other two
/// allgathers would have failed.
std::vector<std::int64_t> SparseReduction::common_shape(const torch::Tensor& shapes) const {
  const torch::Tensor first = shapes[0];
  for (std::int64_t i = 1; i < shapes.size(0); ++i) {
    if (torch::equal(shapes[i], first)) continue;
    const auto text = [](const torch::Tensor& shape) {
      const auto* data = shape.const_data_ptr<std::int64_t>();
      return shape_to_string({data, data + shape.numel()});
    };
    throw MismatchError(Label{"sparse_allreduce", options_.name}.str() +
                        ": shape differs: " + text(first) + " and " + text(shapes[i]) +
                        "; every rank must submit the same shape");
  }
  const auto* data = first.const_data_ptr<std::int64_t>();
  return {data, data + first.numel()};
}

torch::Tensor SparseReduction::result() const {
  const torch::NoGradGuard no_grad;
  const torch::Tensor indices = parts_[0]().t();
  const torch::Tensor values = parts_[1]().to(accumulation_type(type_));
  const torch::Tensor shapes = parts_[2]();
  const std::vector<std::int64_t> shape = common_shape(shapes);
  const torch::Tensor sum = torch::sparse_coo_tensor(indices, values, shape).coalesce();
  torch::Tensor reduced = sum._values();
  const bool average = is_average(options_.op);
  const std::int64_t count =
      options_.op == ReduceOp::kAverageOfSet ? options_.process_set.size() : shapes.size(0);
  if (average && !c10::isFloatingType(type_) && options_.postscale_factor == 1) {
    reduced = reduced.div(count, "trunc");
  } else {
    const double divisor = average ? static_cast<double>(count) : 1;
    reduced = scaled(reduced, options_.postscale_factor / divisor);
  }
  return torch::_sparse_coo_tensor_unsafe(sum._indices(), reduced.to(type_), shape)
      ._coalesced_(true);
}

namespace {

Handle start_sparse(const torch::Tensor& coo, const AllreduceOptions& options, Progress progress) {
  const auto reduction = std::make_shared<SparseReduction>(coo, options);
  return start(reduction->take_submissions(), {[reduction] { return reduction->result(); }},
               progress);
}

}  // namespace
}  // namespace libtorch

Handle sparse_allreduce_async(const torch::Tensor& coo, const AllreduceOptions& options) {
  libtorch::check_detached(coo, "sparse_allreduce", options.name);
  return libtorch::start_sparse(coo, options, Progress::kBackground);
}

torch::Tensor sparse_allreduce(const torch::Tensor& coo, const AllreduceOptions& options) {
  if (libtorch::differentiates(coo)) {
    throw UsageError(libtorch::Label{"sparse_allreduce", options.name}.str() +
                     ": not differentiable, but the tensor requires grad; pass detach() or use "
                     "allreduce on a dense tensor");
  }
  return libtorch::start_sparse(coo, options, Progress::kCaller).wait();
}

}  // namespace hvd
