#include "hvd/torch/operations.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/torch/object.h"
#include "hvd/torch/parameters.h"

namespace hvd::python {
namespace {

using torch::Tensor;

/// The number of jobs that this process has left. Handles of an earlier job are refused.
std::atomic<std::uint64_t> jobs_left = 0;

/// Horovod's numbers of the reductions.
ReduceOp reduce_op(int number) {
  constexpr ReduceOp kOps[] = {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kAdasum,
                               ReduceOp::kMin,     ReduceOp::kMax, ReduceOp::kProduct};
  if (number < 0 || number >= static_cast<int>(std::size(kOps))) {
    throw UsageError(
        "op: expected hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max or hvd.Product, got " +
        std::to_string(number));
  }
  return kOps[number];
}

/// The results of integers are sums, which are still to be divided by the size of the set.
struct Division {
  std::int64_t divisor = 1;
  double factor = 1;
  std::vector<torch::ScalarType> types = {};  ///< of the results

  Tensor of(const Tensor& sum, torch::ScalarType type) const {
    if (c10::isFloatingType(type)) return (sum * (factor / static_cast<double>(divisor))).to(type);
    if (factor == 1) return sum.div(divisor, "trunc").to(type);
    return (sum.to(torch::kFloat64) * factor / static_cast<double>(divisor)).to(type);
  }
};

/// The arguments that hvd gets for a reduction with Horovod's results.
struct Prepared {
  AllreduceOptions options;
  std::vector<Tensor> inputs;
  std::optional<Division> division = {};
  bool changed = false;  ///< whether the inputs are not the caller's tensors
};

bool is_integer(const Tensor& tensor) {
  return tensor.defined() && c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/false);
}

/// The arguments of a reduction.
struct Reduction {
  std::string name;
  int op;
  double prescale;
  double postscale;
  ProcessSet set;

  AllreduceOptions options() const {
    return {.name = name,
            .op = reduce_op(op),
            .prescale_factor = prescale,
            .postscale_factor = postscale,
            .process_set = set};
  }

  /// Horovod divides by the size of the set, also while a rank has joined, where
  /// hvd::ReduceOp::kAverage divides by the number of ranks that contribute. A factor does it for
  /// floating types; the sums of integers are divided afterwards, and those of 8 and 16 bits are
  /// added with 32. hvd refuses averages of bool.
  Prepared prepared(std::vector<Tensor> tensors) const {
    Prepared result{.options = options(), .inputs = std::move(tensors)};
    const bool integers = std::any_of(result.inputs.begin(), result.inputs.end(), is_integer);
    if (integers && prescale != 1) scale(result);
    const bool bools = std::any_of(
        result.inputs.begin(), result.inputs.end(),
        [](const Tensor& tensor) { return tensor.defined() && tensor.dtype() == torch::kBool; });
    if (result.options.op != ReduceOp::kAverage || bools) return result;
    result.options.op = ReduceOp::kSum;
    if (integers) {
      divide_later(result);
    } else {
      result.options.postscale_factor = postscale / set.size();
    }
    return result;
  }

 private:
  /// Multiplies integers in float64 and truncates, on each rank before the sum, as Horovod does.
  /// hvd would truncate only once, after the sum. Floating tensors of the same group are multiplied
  /// here, too.
  void scale(Prepared& result) const {
    const torch::NoGradGuard no_grad;
    for (Tensor& tensor : result.inputs) {
      if (!tensor.defined()) continue;
      tensor = is_integer(tensor)
                   ? (tensor.detach().to(torch::kFloat64) * prescale).to(tensor.scalar_type())
                   : tensor.detach() * prescale;
    }
    result.options.prescale_factor = 1;
    result.changed = true;
  }

  void divide_later(Prepared& result) const {
    Division division{.divisor = set.size(), .factor = postscale};
    for (Tensor& tensor : result.inputs) {
      division.types.push_back(tensor.scalar_type());
      if (is_integer(tensor) && tensor.element_size() < 4) tensor = tensor.to(torch::kInt32);
    }
    result.options.postscale_factor = 1;
    result.division = std::move(division);
    result.changed = true;
  }
};

/// An operation that runs, and the form of its result in Python.
class Call {
 public:
  enum class Form { kTensor, kList, kRows, kRowsAndSplits };

  Call(Handle handle, Form form) : handle_(std::move(handle)), form_(form), job_(jobs_left) {}

  /// Copies the results into these tensors.
  Call& into(std::vector<Tensor> targets) {
    targets_ = std::move(targets);
    return *this;
  }
  Call& divide(std::optional<Division> division) {
    division_ = std::move(division);
    return *this;
  }
  /// Gives the received splits the dtype and the device of the caller's.
  Call& like(const std::optional<Tensor>& splits) {
    if (splits) splits_ = splits->options();
    return *this;
  }

  bool poll() const {
    check();
    return handle_.done();
  }

  py::object wait() const {
    std::vector<Tensor> results;
    {
      const py::gil_scoped_release unlocked;
      results = finished();
    }
    switch (form_) {
      case Form::kList:
        return py::cast(results);
      case Form::kRowsAndSplits:
        return py::make_tuple(results[0], results[1]);
      default:
        return py::cast(results[0]);
    }
  }

  std::vector<Tensor> finished() const {
    check();
    while (!handle_.wait_for(std::chrono::milliseconds(100))) raise_signals();
    std::vector<Tensor> results = handle_.wait_all();
    const torch::NoGradGuard no_grad;
    if (division_) {
      for (std::size_t i = 0; i < results.size(); ++i)
        results[i] = division_->of(results[i], division_->types[i]);
    }
    for (std::size_t i = 0; i < targets_.size(); ++i) {
      targets_[i].detach().copy_(results[i]);
      results[i] = targets_[i];
    }
    if (form_ == Form::kRowsAndSplits) results[1] = results[1].to(splits_);
    return results;
  }

 private:
  void check() const {
    if (job_ == jobs_left) return;
    throw UsageError(
        "the handle is of a job that this process has left; expected one of an operation since "
        "the last init()");
  }

  Handle handle_;
  Form form_;
  std::uint64_t job_;
  std::vector<Tensor> targets_ = {};
  std::optional<Division> division_ = {};
  torch::TensorOptions splits_ = torch::kInt32;
};

using Form = Call::Form;

void refuse_transform(const Tensor& tensor) {
  constexpr c10::DispatchKeySet kTransforms(
      {c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper});
  if (!tensor.defined() || !tensor.key_set().has_any(kTransforms)) return;
  throw UsageError(
      "the tensor is one of a transform of torch.func, whose derivatives hvd does not know; "
      "expected a plain tensor: call hvd outside of the transform");
}

/// The tensors of a call that autograd does not record.
Tensor plain(const Tensor& tensor) {
  refuse_transform(tensor);
  return tensor.defined() ? tensor.detach() : tensor;
}

std::vector<Tensor> plain_list(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> all;
  all.reserve(tensors.size());
  for (const Tensor& tensor : tensors) all.push_back(plain(tensor));
  return all;
}

Call allreduce_async(const Tensor& tensor, const Reduction& how) {
  Prepared ready = how.prepared({plain(tensor)});
  return Call(hvd::allreduce_async(ready.inputs.front(), ready.options), Form::kTensor)
      .divide(std::move(ready.division));
}

Call allreduce_async_in_place(const Tensor& tensor, const Reduction& how) {
  refuse_transform(tensor);
  Prepared ready = how.prepared({tensor});
  if (!ready.changed) return Call(hvd::allreduce_async_(tensor, ready.options), Form::kTensor);
  return Call(hvd::allreduce_async(ready.inputs.front().detach(), ready.options), Form::kTensor)
      .into({tensor})
      .divide(std::move(ready.division));
}

Tensor allreduce(const Tensor& tensor, const Reduction& how) {
  const Prepared ready = how.prepared({plain(tensor)});
  const Tensor result = hvd::allreduce(ready.inputs.front(), ready.options);
  return ready.division ? ready.division->of(result, ready.division->types.front()) : result;
}

Tensor allreduce_in_place(const Tensor& tensor, const Reduction& how) {
  refuse_transform(tensor);
  const Prepared ready = how.prepared({tensor});
  if (!ready.changed) return hvd::allreduce_(tensor, ready.options);
  const torch::NoGradGuard no_grad;
  Tensor result = hvd::allreduce(ready.inputs.front().detach(), ready.options);
  if (ready.division) result = ready.division->of(result, ready.division->types.front());
  tensor.detach().copy_(result);
  return tensor;
}

Call grouped_allreduce_async(const std::vector<Tensor>& tensors, const Reduction& how) {
  Prepared ready = how.prepared(plain_list(tensors));
  return Call(hvd::grouped_allreduce_async(ready.inputs, ready.options), Form::kList)
      .divide(std::move(ready.division));
}

Call grouped_allreduce_async_in_place(const std::vector<Tensor>& tensors, const Reduction& how) {
  Prepared ready = how.prepared(plain_list(tensors));
  if (!ready.changed)
    return Call(hvd::grouped_allreduce_async_(tensors, ready.options), Form::kList);
  return Call(hvd::grouped_allreduce_async(ready.inputs, ready.options), Form::kList)
      .into(tensors)
      .divide(std::move(ready.division));
}

Call sparse_allreduce_async(const Tensor& tensor, const Reduction& how) {
  AllreduceOptions options = how.options();
  if (options.op == ReduceOp::kAverage && tensor.defined() && tensor.is_floating_point()) {
    options.op = ReduceOp::kSum;
    options.postscale_factor = how.postscale / how.set.size();
  }
  return Call(hvd::sparse_allreduce_async(plain(tensor), options), Form::kTensor);
}

Call reducescatter_async(const Tensor& tensor, const Reduction& how) {
  Prepared ready = how.prepared({plain(tensor)});
  return Call(hvd::reducescatter_async(ready.inputs.front(), ready.options), Form::kTensor)
      .divide(std::move(ready.division));
}

Call grouped_reducescatter_async(const std::vector<Tensor>& tensors, const Reduction& how) {
  Prepared ready = how.prepared(plain_list(tensors));
  return Call(hvd::grouped_reducescatter_async(ready.inputs, ready.options), Form::kList)
      .divide(std::move(ready.division));
}

Call allgather_async(const Tensor& tensor, const std::string& name, const ProcessSet& set) {
  return Call(hvd::allgather_async(plain(tensor), {name, set}), Form::kTensor);
}

Call grouped_allgather_async(const std::vector<Tensor>& tensors, const std::string& name,
                             const ProcessSet& set) {
  return Call(hvd::grouped_allgather_async(plain_list(tensors), {name, set}), Form::kList);
}

Call broadcast_async(const Tensor& tensor, int root_rank, const std::string& name,
                     const ProcessSet& set) {
  return Call(hvd::broadcast_async(plain(tensor), root_rank, {name, set}), Form::kTensor);
}

Call broadcast_async_in_place(const Tensor& tensor, int root_rank, const std::string& name,
                              const ProcessSet& set) {
  refuse_transform(tensor);
  return Call(hvd::broadcast_async_(tensor, root_rank, {name, set}), Form::kTensor);
}

/// Without splits Horovod returns the rows alone.
Call alltoall_async(const Tensor& tensor, const std::optional<Tensor>& splits,
                    const std::string& name, const ProcessSet& set) {
  const Tensor own = splits ? splits->cpu() : Tensor();
  return Call(hvd::alltoall_async(plain(tensor), own, {name, set}),
              splits ? Form::kRowsAndSplits : Form::kRows)
      .like(splits);
}

void add_reduction(py::module_& module, const char* name,
                   Call (*start)(const Tensor&, const Reduction&)) {
  module.def(
      name,
      [start](const Tensor& tensor, std::string label, int op, double prescale, double postscale,
              const ProcessSet& set) {
        return start(tensor, {std::move(label), op, prescale, postscale, set});
      },
      py::arg("tensor"), py::arg("name"), py::arg("op"), py::arg("prescale"), py::arg("postscale"),
      py::arg("process_set"), Unlocked());
}

void add_blocking_reduction(py::module_& module, const char* name,
                            Tensor (*run)(const Tensor&, const Reduction&)) {
  module.def(
      name,
      [run](const Tensor& tensor, std::string label, int op, double prescale, double postscale,
            const ProcessSet& set) {
        return run(tensor, {std::move(label), op, prescale, postscale, set});
      },
      py::arg("tensor"), py::arg("name"), py::arg("op"), py::arg("prescale"), py::arg("postscale"),
      py::arg("process_set"), Unlocked());
}

void add_grouped_reduction(py::module_& module, const char* name,
                           Call (*start)(const std::vector<Tensor>&, const Reduction&)) {
  module.def(
      name,
      [start](const std::vector<Tensor>& tensors, std::string label, int op, double prescale,
              double postscale, const ProcessSet& set) {
        return start(tensors, {std::move(label), op, prescale, postscale, set});
      },
      py::arg("tensors"), py::arg("name"), py::arg("op"), py::arg("prescale"), py::arg("postscale"),
      py::arg("process_set"), Unlocked());
}

void add_reductions(py::module_& module) {
  add_blocking_reduction(module, "allreduce", &allreduce);
  add_blocking_reduction(module, "allreduce_", &allreduce_in_place);
  add_reduction(module, "allreduce_async", &allreduce_async);
  add_reduction(module, "allreduce_async_", &allreduce_async_in_place);
  add_reduction(module, "sparse_allreduce_async", &sparse_allreduce_async);
  add_reduction(module, "reducescatter_async", &reducescatter_async);
  add_grouped_reduction(module, "grouped_allreduce_async", &grouped_allreduce_async);
  add_grouped_reduction(module, "grouped_allreduce_async_", &grouped_allreduce_async_in_place);
  add_grouped_reduction(module, "grouped_reducescatter_async", &grouped_reducescatter_async);
}

void add_exchanges(py::module_& module) {
  module.def("allgather_async", &allgather_async, py::arg("tensor"), py::arg("name"),
             py::arg("process_set"), Unlocked());
  module.def("grouped_allgather_async", &grouped_allgather_async, py::arg("tensors"),
             py::arg("name"), py::arg("process_set"), Unlocked());
  module.def("broadcast_async", &broadcast_async, py::arg("tensor"), py::arg("root_rank"),
             py::arg("name"), py::arg("process_set"), Unlocked());
  module.def("broadcast_async_", &broadcast_async_in_place, py::arg("tensor"), py::arg("root_rank"),
             py::arg("name"), py::arg("process_set"), Unlocked());
  module.def("alltoall_async", &alltoall_async, py::arg("tensor"), py::arg("splits"),
             py::arg("name"), py::arg("process_set"), Unlocked());
  module.def(
      "gather",
      [](const Tensor& tensor, int dst_rank, const std::string& name, const ProcessSet& set) {
        refuse_transform(tensor);
        return hvd::gather(tensor, dst_rank, {name, set});
      },
      py::arg("tensor"), py::arg("dst_rank"), py::arg("name"), py::arg("process_set"), Unlocked());
}

/// The calls for whole models and for objects, which Python pickles.
void add_state(py::module_& module) {
  module.def(
      "broadcast_parameters",
      [](const std::vector<std::pair<std::string, Tensor>>& parameters, int root_rank,
         const ProcessSet& set) {
        NamedParameters named;
        for (const auto& [name, tensor] : parameters) named.insert(name, tensor);
        hvd::broadcast_parameters(named, root_rank, set);
      },
      py::arg("parameters"), py::arg("root_rank"), py::arg("process_set"), Unlocked());
  module.def(
      "all_reduce",
      [](const std::vector<Tensor>& parameters, int op, const ProcessSet& set) {
        hvd::all_reduce(parameters, reduce_op(op), set);
      },
      py::arg("parameters"), py::arg("op"), py::arg("process_set"), Unlocked());
  module.def(
      "scale_loss",
      [](const Tensor& loss, const ProcessSet& set) { return hvd::scale_loss(loss, set); },
      py::arg("loss"), py::arg("process_set"), Unlocked());
  module.def(
      "broadcast_bytes",
      [](const py::bytes& data, int root_rank, const std::string& name, const ProcessSet& set) {
        const std::string own = data;
        std::string received;
        {
          const py::gil_scoped_release unlocked;
          received = hvd::broadcast_object(own, root_rank, {name, set});
        }
        return py::bytes(received);
      },
      py::arg("data"), py::arg("root_rank"), py::arg("name"), py::arg("process_set"));
  module.def(
      "allgather_bytes",
      [](const py::bytes& data, const std::string& name, const ProcessSet& set) {
        const std::string own = data;
        std::vector<std::string> all;
        {
          const py::gil_scoped_release unlocked;
          all = hvd::allgather_object(own, {name, set});
        }
        py::list received;
        for (const std::string& one : all) received.append(py::bytes(one));
        return received;
      },
      py::arg("data"), py::arg("name"), py::arg("process_set"));
}

}  // namespace

void leave_job() {
  hvd::shutdown();
  ++jobs_left;
}

void add_operations(py::module_& module) {
  py::class_<Call>(module, "Handle")
      .def("poll", &Call::poll, Unlocked())
      .def("wait", &Call::wait)
      .def("__call__", &Call::wait);
  add_reductions(module);
  add_exchanges(module);
  add_state(module);
}

}  // namespace hvd::python
