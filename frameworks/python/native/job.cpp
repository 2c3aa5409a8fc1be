#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "hvd/background.h"
#include "hvd/collectives.h"
#include "hvd/hvd.h"
#include "hvd/torch/handle.h"

namespace hvd::python {
namespace {

/// As the calls of <hvd/hvd.h>, but Python's signals end the wait.
std::int64_t run(Submission submission) {
  const Operation operation = submit(std::move(submission), Progress::kCaller);
  wait_with_check(operation);
  operation.status().raise_if_error();
  end_wait();
  return operation.result();
}

int join() {
  BackgroundExchange::wait_for_all();
  return static_cast<int>(run({.parameters = Join{}}));
}

void barrier(const ProcessSet& set) { run({.parameters = Barrier{}, .process_set = set.id()}); }

void add_process_sets(py::module_& module) {
  py::class_<ProcessSet>(module, "ProcessSet")
      .def(py::init<>())
      .def_property_readonly("id", &ProcessSet::id)
      .def("rank", &ProcessSet::rank, Unlocked())
      .def("size", &ProcessSet::size, Unlocked())
      .def("ranks", &ProcessSet::ranks, Unlocked());
  module.def(
      "add_process_set", [](const std::vector<int>& ranks) { return hvd::add_process_set(ranks); },
      py::arg("ranks"), Unlocked());
  module.def("remove_process_set", &hvd::remove_process_set, py::arg("process_set"), Unlocked());
}

}  // namespace

void add_job(py::module_& module) {
  add_process_sets(module);
  module.def("cross_rank", &hvd::cross_rank, Unlocked());
  module.def("cross_size", &hvd::cross_size, Unlocked());
  module.def("is_homogeneous", &hvd::is_homogeneous, Unlocked());
  module.def("mpi_threads_supported", &hvd::mpi_threads_supported, Unlocked());
  module.def("mpi_built", &hvd::mpi_built, Unlocked());
  module.def("nccl_built", &hvd::nccl_built, Unlocked());
  module.def("cuda_built", &hvd::cuda_built, Unlocked());
  module.def("start_timeline", &hvd::start_timeline, py::arg("path"), Unlocked());
  module.def("stop_timeline", &hvd::stop_timeline, Unlocked());
  module.def("barrier", &barrier, py::arg("process_set"), Unlocked());
  module.def("join", &join, Unlocked());
}

}  // namespace hvd::python
