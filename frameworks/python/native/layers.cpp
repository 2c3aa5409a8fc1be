#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "bindings.h"
#include "hvd/torch/sync_batch_norm.h"

namespace hvd::python {
namespace {

using torch::Tensor;

/// The exchange of a Python layer. The layer itself holds the parameters and the running
/// statistics.
class BatchNormLayer {
 public:
  BatchNormLayer(std::int64_t features, double eps, bool tracks, const ProcessSet& process_set)
      : layer_(std::make_shared<SyncBatchNorm1dImpl>(
            torch::nn::BatchNormOptions(features).eps(eps).affine(false).track_running_stats(
                tracks),
            process_set)) {}

  /// @param input of shape [N, features] or [N, features, L]
  /// @param factor of this batch in the running statistics
  Tensor forward(const Tensor& input, const std::optional<Tensor>& weight,
                 const std::optional<Tensor>& bias, const std::optional<Tensor>& running_mean,
                 const std::optional<Tensor>& running_var, double factor) {
    layer_->weight = weight.value_or(Tensor());
    layer_->bias = bias.value_or(Tensor());
    layer_->running_mean = running_mean.value_or(Tensor());
    layer_->running_var = running_var.value_or(Tensor());
    layer_->options.momentum(factor);
    return layer_->forward(input);
  }

 private:
  std::shared_ptr<SyncBatchNorm1dImpl> layer_;
};

}  // namespace

void add_layers(py::module_& module) {
  py::class_<BatchNormLayer>(module, "BatchNormLayer")
      .def(py::init<std::int64_t, double, bool, const ProcessSet&>(), py::arg("features"),
           py::arg("eps"), py::arg("tracks"), py::arg("process_set"), Unlocked())
      .def("forward", &BatchNormLayer::forward, py::arg("input"), py::arg("weight"),
           py::arg("bias"), py::arg("running_mean"), py::arg("running_var"), py::arg("factor"),
           Unlocked());
}

}  // namespace hvd::python
