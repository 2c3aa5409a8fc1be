#include "hvd/torch/sync_batch_norm.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <ios>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "hvd/elastic.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "layers/batch_statistics.h"
#include "layers/layer_exchange.h"
#include "operations/agreement.h"

namespace hvd {
namespace libtorch {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// Replaces an undefined tensor by nullopt, since autograd's arguments must be defined.
std::optional<torch::Tensor> given(const torch::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

/// The arguments of backward that are not tensors.
struct Layer : torch::CustomClassHolder {
  std::shared_ptr<LayerExchange> exchange;
  double eps = 0;
};
using LayerPtr = c10::intrusive_ptr<Layer>;

/// The derivative, as a separate autograd function, whose backward() refuses a second derivative.
struct JoinedBackward : Function<JoinedBackward> {
  static variable_list forward(AutogradContext* context, const torch::Tensor& gradient,
                               const torch::Tensor& input,
                               const std::optional<torch::Tensor>& weight,
                               const torch::Tensor& mean, const torch::Tensor& var,
                               const torch::Tensor& count, const LayerPtr& layer,
                               bool wants_input) {
    context->saved_data["name"] = layer->exchange->name();
    const Normalization by{
        .mean = mean, .var = var, .weight = weight.value_or(torch::Tensor()), .eps = layer->eps};
    const torch::Tensor own = gradient_sums(gradient, input, by);
    torch::Tensor of_input = torch::empty({0}, input.options());
    if (wants_input)
      of_input = input_gradient(gradient, input, by, layer->exchange->summed(own), count);
    return {of_input, own[0], own[1]};
  }
  static variable_list backward(AutogradContext* context, const variable_list&) {
    throw UsageError("SyncBatchNorm (" + context->saved_data["name"].toStringRef() +
                     "): second derivatives are not supported; expected backward() without "
                     "create_graph, or a model without this layer where they are needed (a "
                     "gradient penalty)");
  }
};

struct JoinedForward : Function<JoinedForward> {
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& input,
                               const std::optional<torch::Tensor>& weight_or_none,
                               const std::optional<torch::Tensor>& bias_or_none,
                               const torch::Tensor& mean, const torch::Tensor& var,
                               const torch::Tensor& count, const LayerPtr& layer) {
    const torch::Tensor weight = weight_or_none.value_or(torch::Tensor());
    const torch::Tensor bias = bias_or_none.value_or(torch::Tensor());
    context->save_for_backward({input, weight, mean, var, count});
    context->saved_data["layer"] = c10::IValue::make_capsule(layer);
    if (bias.defined()) context->saved_data["bias"] = bias.scalar_type();
    return normalize(input, {.mean = mean, .var = var, .weight = weight, .eps = layer->eps}, bias);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const torch::Tensor& weight = saved[1];
    const auto layer =
        c10::static_intrusive_pointer_cast<Layer>(context->saved_data["layer"].toCapsule());
    const variable_list result =
        JoinedBackward::apply(gradients[0], saved[0], given(weight), saved[2], saved[3], saved[4],
                              layer, context->needs_input_grad(0));
    variable_list all(7);
    if (context->needs_input_grad(0)) all[0] = result[0];
    if (!weight.defined()) return all;  // without weight and bias
    if (context->needs_input_grad(1)) all[1] = result[2].to(weight.scalar_type());
    if (context->needs_input_grad(2))
      all[2] = result[1].to(context->saved_data["bias"].toScalarType());
    return all;
  }
};

}  // namespace

std::string layer_type(std::size_t dimensions) {
  return "SyncBatchNorm" + std::to_string(dimensions) + "d";
}

const std::shared_ptr<LayerExchange>& LayerExchangeHolder::in(const ProcessSet& process_set) {
  if (!exchange_ || generation_ != elastic::generation()) {
    exchange_ = make_layer_exchange(process_set);
    generation_ = elastic::generation();
  }
  return exchange_;
}

void check_layer_set(const ProcessSet& process_set, const std::string& who) {
  if (process_set.id() != 0) require_member(who, process_set);
}

}  // namespace libtorch

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::_check_input_dim(const torch::Tensor& input) {
  const std::string who = libtorch::layer_type(D) + "::forward(): ";
  constexpr std::int64_t kDimensions = D + 2;
  const std::int64_t features = this->options.num_features();
  const bool fits = input.dim() == kDimensions || (D == 1 && input.dim() == 2);
  if (!fits || input.size(1) != features) {
    throw UsageError(who + "expected a tensor of " + (D == 1 ? "2 or " : "") +
                     std::to_string(kDimensions) + " dimensions with " + std::to_string(features) +
                     " features in dimension 1, got shape " + shape_to_string(input.sizes().vec()));
  }
  if (!input.is_floating_point()) {
    throw UsageError(who + "expected floating point numbers, got " +
                     c10::toString(input.scalar_type()));
  }
}

template <std::size_t D, class Derived>
torch::Tensor SyncBatchNormImplBase<D, Derived>::forward(const torch::Tensor& input) {
  _check_input_dim(input);
  const bool tracks = this->is_training() && this->options.track_running_stats();
  double factor = this->options.momentum().value_or(0);
  if (tracks && !this->options.momentum())  // cumulative average of all batches
    factor = 1 / (1 + this->num_batches_tracked.template item<double>());
  const bool alone = !this->is_training() || process_set_.size() == 1;
  torch::Tensor output = alone ? forward_local(input, factor) : forward_joined(input, factor);
  if (tracks) this->num_batches_tracked += 1;
  return output;
}

template <std::size_t D, class Derived>
torch::Tensor SyncBatchNormImplBase<D, Derived>::forward_local(const torch::Tensor& input,
                                                               double factor) {
  return torch::nn::functional::detail::batch_norm(
      input, this->running_mean, this->running_var, this->weight, this->bias,
      this->is_training() || !this->options.track_running_stats(), factor, this->options.eps());
}

template <std::size_t D, class Derived>
torch::Tensor SyncBatchNormImplBase<D, Derived>::forward_joined(const torch::Tensor& input,
                                                                double factor) {
  const torch::Tensor dense = input.contiguous(input.suggest_memory_format());
  const auto layer = c10::make_intrusive<libtorch::Layer>();
  layer->exchange = exchange_.in(process_set_);
  layer->eps = this->options.eps();
  libtorch::JoinedMoments moments;
  {
    const torch::NoGradGuard no_grad;
    moments =
        libtorch::join_moments(layer->exchange->gathered(libtorch::batch_moments(dense.detach())));
    // A rank with two or more values per channel does not check the count, so on a GPU only ranks
    // with fewer values wait for it.
    if (dense.numel() < 2 * dense.size(1) && moments.count.template item<double>() < 2) {
      throw UsageError(libtorch::layer_type(D) + " (" + layer->exchange->name() +
                       "): expected more than 1 value per channel on all ranks together when "
                       "training, got " +
                       std::to_string(moments.count.template item<std::int64_t>()));
    }
    if (this->running_mean.defined()) {
      const auto type = this->running_mean.scalar_type();
      this->running_mean.mul_(1 - factor).add_(moments.mean.to(type), factor);
      this->running_var.mul_(1 - factor).add_(moments.unbiased_var.to(type), factor);
    }
  }
  return libtorch::JoinedForward::apply(dense, libtorch::given(this->weight),
                                        libtorch::given(this->bias), moments.mean, moments.var,
                                        moments.count, layer);
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "hvd::" << libtorch::layer_type(D) << "("
         << this->options.num_features() << ", eps=" << this->options.eps() << ", momentum=";
  if (this->options.momentum()) {
    stream << *this->options.momentum();
  } else {
    stream << "None";
  }
  stream << ", affine=" << this->options.affine()
         << ", track_running_stats=" << this->options.track_running_stats()
         << ", process_set=" << process_set_.id() << ")";
}

template class SyncBatchNormImplBase<1, SyncBatchNorm1dImpl>;
template class SyncBatchNormImplBase<2, SyncBatchNorm2dImpl>;
template class SyncBatchNormImplBase<3, SyncBatchNorm3dImpl>;

}  // namespace hvd
