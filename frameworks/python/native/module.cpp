#include <pybind11/chrono.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "bindings.h"
#include "hvd/background.h"
#include "hvd/hvd.h"
#include "hvd/torch/c10d_backend.h"
#include "hvd/torch/handle.h"

// hvd._C: the part of hvd::torch that the package hvd needs. Every call releases Python's lock
// before it enters hvd.

namespace {

namespace py = pybind11;

std::atomic<bool> exit_has_begun = false;

bool interpreter_ends() noexcept {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#else
  return _Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#endif
}

/// Python ends a thread that takes its lock while the interpreter ends, and C++ turns this into
/// std::terminate(). Such a thread stops here instead. hvd's own threads stop when the interpreter
/// ends, because the program's exit handlers may wait for futures. Other threads stop when the exit
/// handlers run. The main thread may take the lock.
void stop_at_the_end() noexcept {
  while ((interpreter_ends() || (exit_has_begun && !hvd::BackgroundThread::here())) &&
         ::gettid() != ::getpid())
    ::pause();
}

/// Called by an exit handler. Leaves time for threads that wait for Python's lock to take it.
void stop_threads() {
  exit_has_begun = true;
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
}

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                               int rank, int size,
                                               const std::vector<std::int64_t>& ranks,
                                               std::chrono::milliseconds timeout,
                                               bool enable_reconfigure) {
  if (enable_reconfigure) {
    return c10::make_intrusive<hvd::C10dBackend>(hvd::C10dBackend::Unformed(), store, rank, size,
                                                 timeout);
  }
  return c10::make_intrusive<hvd::C10dBackend>(store, rank, size, ranks, timeout);
}

void monitored_barrier(const c10::intrusive_ptr<c10d::Backend>& backend,
                       std::chrono::milliseconds timeout, bool wait_all_ranks) {
  c10d::BarrierOptions options;
  options.timeout = timeout;
  backend->monitoredBarrier(options, wait_all_ranks);
}

}  // namespace

void hvd::python::raise_signals() {
  stop_at_the_end();
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

PYBIND11_MODULE(_C, module) {
  using hvd::python::Unlocked;
  hvd::set_wait_check(hvd::python::raise_signals);
  hvd::set_return_check(stop_at_the_end);
  module.attr("__torch_version__") = HVD_TORCH_VERSION;
  module.def("make_backend", &make_backend, py::arg("store"), py::arg("rank"), py::arg("size"),
             py::arg("ranks"), py::arg("timeout"), py::arg("enable_reconfigure"), Unlocked());
  module.def("monitored_barrier", &monitored_barrier, py::arg("backend"), py::arg("timeout"),
             py::arg("wait_all_ranks"), Unlocked());
  module.def("flight_record", [] {
    std::string record;
    {
      const py::gil_scoped_release unlocked;
      record = hvd::flight_record();
    }
    return py::bytes(record);
  });
  module.def("init", &hvd::python::join_job, Unlocked());
  module.def("finish_start_or_end", &hvd::python::finish_start_or_end, Unlocked());
  module.def("shutdown", &hvd::python::leave_job, Unlocked());
  module.def(
      "fail", [](const std::string& cause) { hvd::fail(cause); }, py::arg("cause"), Unlocked());
  module.def("is_initialized", &hvd::is_initialized, Unlocked());
  module.def("rank", &hvd::rank, Unlocked());
  module.def("size", &hvd::size, Unlocked());
  module.def("local_rank", &hvd::local_rank, Unlocked());
  module.def("local_size", &hvd::local_size, Unlocked());
  module.def("init_method", &hvd::init_method, Unlocked());
  module.def("controller", &hvd::controller, Unlocked());
  module.def("build_info", &hvd::build_info, Unlocked());
  module.def("stop_threads", &stop_threads, Unlocked());
  module.def("metrics_json", [] { return hvd::metrics().to_json(); }, Unlocked());
  hvd::python::translate_errors(module);
  hvd::python::add_job(module);
  hvd::python::add_operations(module);
  hvd::python::add_gradients(module);
  hvd::python::add_layers(module);
}
