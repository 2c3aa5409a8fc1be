#include "hvd/torch/operations.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
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

/// Horovod's numbers of the reductions. Its average divides by the size of the set, also while a
/// rank has joined.
ReduceOp reduce_op(int number) {
  constexpr ReduceOp kOps[] = {ReduceOp::kAverageOfSet, ReduceOp::kSum, ReduceOp::kAdasum,
                               ReduceOp::kMin,          ReduceOp::kMax, ReduceOp::kProduct};
  if (number < 0 || number >= static_cast<int>(std::size(kOps))) {
    throw UsageError(
        "op: expected hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max or hvd.Product, got " +
        std::to_string(number));
  }
  return kOps[number];
}

/// A kind of operation. Operations of different kinds may have the same name at the same time, as
/// in Horovod: the kind precedes the name, except in an allreduce.
struct Kind {
  const char* operation;
  bool prefixed = true;

  std::string own(const std::string& name) const {
    return prefixed && !name.empty() ? std::string(operation) + '.' + name : name;
  }
};
constexpr Kind kAllreduce{"allreduce", /*prefixed=*/false};
constexpr Kind kAllgather{"allgather"};
constexpr Kind kBroadcast{"broadcast"};
constexpr Kind kAlltoall{"alltoall"};
constexpr Kind kReducescatter{"reducescatter"};
constexpr Kind kSparseAllreduce{"sparse_allreduce"};
constexpr Kind kGather{"gather"};
constexpr Kind kBroadcastObject{"broadcast_object"};
constexpr Kind kAllgatherObject{"allgather_object"};

/// The names of asynchronous calls since the program has last waited for an operation. A second
/// call under such a name is refused, whether the first operation is done or not, so that a program
/// does not depend on how fast it is. Thread-safe.
class NamesInUse {
 public:
  /// Calls start(own name), which starts an operation of that kind and name.
  /// @throws UsageError for a name that is in use
  template <class Start>
  auto use(const Kind& kind, const std::string& name, const ProcessSet& set, const Start& start) {
    const std::string own = kind.own(name);
    if (name.empty()) return start(own);
    const std::string key = key_of(own, set);
    if (!claim(key)) refuse(kind, name);
    try {
      return start(own);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      names_.erase(key);
      throw;
    }
  }
  /// @throws UsageError for a name that is in use
  void check(const Kind& kind, const std::string& name, const ProcessSet& set) {
    if (!any_.load(std::memory_order_relaxed) || name.empty()) return;
    const std::lock_guard lock(mutex_);
    forget_waited();
    if (names_.contains(key_of(kind.own(name), set))) refuse(kind, name);
  }
  void end_wait() noexcept { waits_.fetch_add(1, std::memory_order_relaxed); }

 private:
  static std::string key_of(const std::string& own, const ProcessSet& set) {
    return std::to_string(set.id()) + '/' + own;
  }
  [[noreturn]] static void refuse(const Kind& kind, const std::string& name) {
    throw UsageError(std::string(kind.operation) + " '" + name +
                     "': an asynchronous call of this name has not been waited for; expected a "
                     "call of synchronize() in between, or another name");
  }
  bool claim(const std::string& key) {
    const std::lock_guard lock(mutex_);
    forget_waited();
    any_.store(true, std::memory_order_relaxed);
    return names_.insert(key).second;
  }
  /// The caller has the lock.
  void forget_waited() {
    const std::uint64_t waits = waits_.load(std::memory_order_relaxed);
    if (seen_ == waits) return;
    names_.clear();
    any_.store(false, std::memory_order_relaxed);
    seen_ = waits;
  }

  std::mutex mutex_;
  std::unordered_set<std::string> names_;
  std::uint64_t seen_ = 0;
  std::atomic<bool> any_ = false;  // may be true while no name is in use, never false while one is
  std::atomic<std::uint64_t> waits_ = 0;
};
NamesInUse names_in_use;

/// Runs a call that waits for an operation. An error also counts as the end of the wait.
template <class Call>
auto waiting(const Call& call) {
  try {
    auto result = call();
    names_in_use.end_wait();
    return result;
  } catch (const UsageError&) {
    throw;  // mostly from a call that has not started an operation
  } catch (...) {
    names_in_use.end_wait();
    throw;
  }
}

/// The arguments for hvd that give a reduction Horovod's results.
struct Prepared {
  AllreduceOptions options;
  std::vector<Tensor> inputs;
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

  Prepared prepared(std::vector<Tensor> tensors) const {
    Prepared result{.options = options(), .inputs = std::move(tensors)};
    if (prescale != 1 && std::any_of(result.inputs.begin(), result.inputs.end(), is_integer))
      scale(result);
    return result;
  }

 private:
  /// Multiplies integers in float64 and truncates, on each rank before the sum, as Horovod does.
  /// hvd would truncate only once, after the sum. Floating tensors of the same group are also
  /// multiplied here.
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
  /// Converts the received splits to the dtype and device of the caller's splits.
  Call& like(const std::optional<Tensor>& splits) {
    if (splits) splits_ = splits->options();
    return *this;
  }

  bool poll() const {
    check();
    const bool done = handle_.done();
    if (done) names_in_use.end_wait();
    return done;
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
    std::vector<Tensor> results = waiting([this] { return handle_.wait_all(); });
    const torch::NoGradGuard no_grad;
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
        "the handle belongs to a job that this process has left; expected a handle that was "
        "returned since the last init()");
  }

  Handle handle_;
  Form form_;
  std::uint64_t job_;
  std::vector<Tensor> targets_ = {};
  torch::TensorOptions splits_ = torch::kInt32;
};

using Form = Call::Form;

void refuse_transform(const Tensor& tensor) {
  constexpr c10::DispatchKeySet kTransforms(
      {c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper});
  if (!tensor.defined() || !tensor.key_set().has_any(kTransforms)) return;
  throw UsageError(
      "the tensor belongs to a transform of torch.func, and hvd does not support its "
      "derivatives; expected a plain tensor: call hvd outside of the transform");
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
  return Call(hvd::allreduce_async(ready.inputs.front(), ready.options), Form::kTensor);
}

Call allreduce_async_in_place(const Tensor& tensor, const Reduction& how) {
  refuse_transform(tensor);
  Prepared ready = how.prepared({tensor});
  if (!ready.changed) return Call(hvd::allreduce_async_(tensor, ready.options), Form::kTensor);
  return Call(hvd::allreduce_async(ready.inputs.front().detach(), ready.options), Form::kTensor)
      .into({tensor});
}

Tensor allreduce(const Tensor& tensor, const Reduction& how) {
  names_in_use.check(kAllreduce, how.name, how.set);
  const Prepared ready = how.prepared({plain(tensor)});
  return waiting([&] { return hvd::allreduce(ready.inputs.front(), ready.options); });
}

Tensor allreduce_in_place(const Tensor& tensor, const Reduction& how) {
  names_in_use.check(kAllreduce, how.name, how.set);
  refuse_transform(tensor);
  const Prepared ready = how.prepared({tensor});
  const torch::NoGradGuard no_grad;
  return waiting([&] {
    if (!ready.changed) return hvd::allreduce_(tensor, ready.options);
    tensor.detach().copy_(hvd::allreduce(ready.inputs.front().detach(), ready.options));
    return tensor;
  });
}

Call grouped_allreduce_async(const std::vector<Tensor>& tensors, const Reduction& how) {
  Prepared ready = how.prepared(plain_list(tensors));
  return Call(hvd::grouped_allreduce_async(ready.inputs, ready.options), Form::kList);
}

Call grouped_allreduce_async_in_place(const std::vector<Tensor>& tensors, const Reduction& how) {
  Prepared ready = how.prepared(plain_list(tensors));
  if (!ready.changed)
    return Call(hvd::grouped_allreduce_async_(tensors, ready.options), Form::kList);
  return Call(hvd::grouped_allreduce_async(ready.inputs, ready.options), Form::kList).into(tensors);
}

Call sparse_allreduce_async(const Tensor& tensor, const Reduction& how) {
  return Call(hvd::sparse_allreduce_async(plain(tensor), how.options()), Form::kTensor);
}

Call reducescatter_async(const Tensor& tensor, const Reduction& how) {
  Prepared ready = how.prepared({plain(tensor)});
  return Call(hvd::reducescatter_async(ready.inputs.front(), ready.options), Form::kTensor);
}

Call grouped_reducescatter_async(const std::vector<Tensor>& tensors, const Reduction& how) {
  Prepared ready = how.prepared(plain_list(tensors));
  return Call(hvd::grouped_reducescatter_async(ready.inputs, ready.options), Form::kList);
}

Call allgather_async(const Tensor& tensor, const std::string& name, const ProcessSet& set) {
  return names_in_use.use(kAllgather, name, set, [&](const std::string& own) {
    return Call(hvd::allgather_async(plain(tensor), {own, set}), Form::kTensor);
  });
}

Call grouped_allgather_async(const std::vector<Tensor>& tensors, const std::string& name,
                             const ProcessSet& set) {
  return names_in_use.use(kAllgather, name, set, [&](const std::string& own) {
    return Call(hvd::grouped_allgather_async(plain_list(tensors), {own, set}), Form::kList);
  });
}

Call broadcast_async(const Tensor& tensor, int root_rank, const std::string& name,
                     const ProcessSet& set) {
  return names_in_use.use(kBroadcast, name, set, [&](const std::string& own) {
    return Call(hvd::broadcast_async(plain(tensor), root_rank, {own, set}), Form::kTensor);
  });
}

Call broadcast_async_in_place(const Tensor& tensor, int root_rank, const std::string& name,
                              const ProcessSet& set) {
  refuse_transform(tensor);
  return names_in_use.use(kBroadcast, name, set, [&](const std::string& own) {
    return Call(hvd::broadcast_async_(tensor, root_rank, {own, set}), Form::kTensor);
  });
}

/// Without splits, returns only the rows, as Horovod does.
Call alltoall_async(const Tensor& tensor, const std::optional<Tensor>& splits,
                    const std::string& name, const ProcessSet& set) {
  const Tensor rows = splits ? splits->cpu() : Tensor();
  return names_in_use.use(kAlltoall, name, set, [&](const std::string& own) {
    return Call(hvd::alltoall_async(plain(tensor), rows, {own, set}),
                splits ? Form::kRowsAndSplits : Form::kRows)
        .like(splits);
  });
}

void add_reduction(py::module_& module, const char* name, const Kind& kind,
                   Call (*start)(const Tensor&, const Reduction&)) {
  module.def(
      name,
      [start, kind](const Tensor& tensor, const std::string& label, int op, double prescale,
                    double postscale, const ProcessSet& set) {
        return names_in_use.use(kind, label, set, [&](const std::string& own) {
          return start(tensor, {own, op, prescale, postscale, set});
        });
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

void add_grouped_reduction(py::module_& module, const char* name, const Kind& kind,
                           Call (*start)(const std::vector<Tensor>&, const Reduction&)) {
  module.def(
      name,
      [start, kind](const std::vector<Tensor>& tensors, const std::string& label, int op,
                    double prescale, double postscale, const ProcessSet& set) {
        return names_in_use.use(kind, label, set, [&](const std::string& own) {
          return start(tensors, {own, op, prescale, postscale, set});
        });
      },
      py::arg("tensors"), py::arg("name"), py::arg("op"), py::arg("prescale"), py::arg("postscale"),
      py::arg("process_set"), Unlocked());
}

void add_reductions(py::module_& module) {
  add_blocking_reduction(module, "allreduce", &allreduce);
  add_blocking_reduction(module, "allreduce_", &allreduce_in_place);
  add_reduction(module, "allreduce_async", kAllreduce, &allreduce_async);
  add_reduction(module, "allreduce_async_", kAllreduce, &allreduce_async_in_place);
  add_reduction(module, "sparse_allreduce_async", kSparseAllreduce, &sparse_allreduce_async);
  add_reduction(module, "reducescatter_async", kReducescatter, &reducescatter_async);
  add_grouped_reduction(module, "grouped_allreduce_async", kAllreduce, &grouped_allreduce_async);
  add_grouped_reduction(module, "grouped_allreduce_async_", kAllreduce,
                        &grouped_allreduce_async_in_place);
  add_grouped_reduction(module, "grouped_reducescatter_async", kReducescatter,
                        &grouped_reducescatter_async);
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
        return hvd::gather(tensor, dst_rank, {kGather.own(name), set});
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
          received = hvd::broadcast_object(own, root_rank, {kBroadcastObject.own(name), set});
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
          all = hvd::allgather_object(own, {kAllgatherObject.own(name), set});
        }
        py::list received;
        for (const std::string& one : all) received.append(py::bytes(one));
        return received;
      },
      py::arg("data"), py::arg("name"), py::arg("process_set"));
}

}  // namespace

void end_wait() noexcept { names_in_use.end_wait(); }

void forget_operations() noexcept {
  end_wait();
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
