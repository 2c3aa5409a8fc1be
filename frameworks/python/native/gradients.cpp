#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "hvd/torch/gradient_synchronizer.h"

namespace hvd::python {
namespace {

/// Replaces a hook's exception by one that carries the exception of Python, so that backward()
/// raises the right class. Runs on a thread of autograd, which may not hold Python's lock.
void raise_in_backward() {
  const py::gil_scoped_acquire gil;
  if (!set_python_error(std::current_exception())) return;
  python_error error;
  error.persist();
  throw error;
}

/// A synchronizer with a context manager for Python.
class Gradients {
 public:
  Gradients(const std::vector<std::pair<std::string, torch::Tensor>>& parameters,
            const DistributedOptimizerOptions& options) {
    NamedParameters named;
    for (const auto& [name, parameter] : parameters) named.insert(name, parameter);
    synchronizer_ = std::make_unique<GradientSynchronizer>(named, options);
  }

  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;
  /// Hooks that hold the reducer's lock may wait for Python's.
  ~Gradients() {
    const py::gil_scoped_release unlocked;
    guards_.clear();
    synchronizer_.reset();
  }

  GradientSynchronizer& operator*() const { return *synchronizer_; }
  void accumulate(bool begin) {
    if (begin) {
      guards_.push_back(synchronizer_->no_sync());
    } else if (!guards_.empty()) {
      guards_.pop_back();
    }
  }

 private:
  std::unique_ptr<GradientSynchronizer> synchronizer_;
  std::vector<NoSync> guards_;
};

std::unique_ptr<Gradients> make_gradients(
    const std::vector<std::pair<std::string, torch::Tensor>>& parameters, bool average,
    int compression, int passes, double predivide, std::vector<std::vector<std::string>> groups,
    bool sparse_as_dense, bool bucket_view, std::optional<int> check_every,
    const ProcessSet& process_set) {
  return std::make_unique<Gradients>(
      parameters, DistributedOptimizerOptions{.op = average ? ReduceOp::kAverage : ReduceOp::kSum,
                                              .compression = static_cast<Compression>(compression),
                                              .backward_passes_per_step = passes,
                                              .gradient_predivide_factor = predivide,
                                              .groups = std::move(groups),
                                              .sparse_as_dense = sparse_as_dense,
                                              .gradient_as_bucket_view = bucket_view,
                                              .process_set = process_set,
                                              .divide_by_size = true,
                                              .check_every = check_every});
}

}  // namespace

void add_gradients(py::module_& module) {
  set_gradient_error_handler(&raise_in_backward);
  py::class_<Gradients>(module, "Gradients")
      .def(
          "synchronize", [](const Gradients& self) { (*self).synchronize(); }, Unlocked())
      .def(
          "end_step", [](const Gradients& self) { (*self).end_step(); }, Unlocked())
      .def(
          "discard", [](const Gradients& self) { (*self).discard(); }, Unlocked())
      .def(
          "in_flight", [](const Gradients& self) { return (*self).in_flight(); }, Unlocked())
      .def(
          "synchronized", [](const Gradients& self) { return (*self).synchronized(); }, Unlocked())
      .def("accumulate", &Gradients::accumulate, py::arg("begin"), Unlocked())
      .def(
          "set_backward_passes_per_step",
          [](const Gradients& self, int passes) { (*self).set_backward_passes_per_step(passes); },
          py::arg("passes"), Unlocked());
  module.def("make_gradients", &make_gradients, py::arg("parameters"), py::arg("average"),
             py::arg("compression"), py::arg("passes"), py::arg("predivide"), py::arg("groups"),
             py::arg("sparse_as_dense"), py::arg("bucket_view"), py::arg("check_every"),
             py::arg("process_set"), Unlocked());
}

}  // namespace hvd::python
