#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings.h"
#include "hvd/hvd.h"

namespace hvd::python {
namespace {

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
  module.def("barrier", &hvd::barrier, py::arg("process_set"), Unlocked());
  module.def("join", [] { return hvd::join(); }, Unlocked());
}

}  // namespace hvd::python
