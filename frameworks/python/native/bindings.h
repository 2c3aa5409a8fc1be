#pragma once

#include <torch/csrc/utils/pybind.h>

// The parts of hvd._C. Every call drops Python's lock before it enters hvd.
namespace hvd::python {

namespace py = pybind11;
using Unlocked = py::call_guard<py::gil_scoped_release>;

/// hvd's exceptions become the classes of hvd.errors.
void translate_errors(py::module_& module);
/// Ranks, process sets, the timeline, and the queries of the build.
void add_job(py::module_& module);
/// Collectives on tensors and objects, and their handles.
void add_operations(py::module_& module);
/// hvd::shutdown(). Handles of earlier operations then raise UsageError.
void leave_job();

}  // namespace hvd::python
