#pragma once

#include <torch/csrc/utils/pybind.h>

#include <exception>

// The parts of hvd._C. Every call drops Python's lock before it enters hvd.
namespace hvd::python {

namespace py = pybind11;
using Unlocked = py::call_guard<py::gil_scoped_release>;

/// hvd's exceptions become the classes of hvd.errors.
void translate_errors(py::module_& module);
/// Sets Python's error for an exception of hvd. @return false for another exception @pre the caller
/// has Python's lock (unchecked: Python checks it in its debug build)
bool set_python_error(const std::exception_ptr& pending);
/// Ranks, process sets, the timeline, and the queries of the build.
void add_job(py::module_& module);
/// Collectives on tensors and objects, and their handles.
void add_operations(py::module_& module);
/// SyncBatchNorm.
void add_layers(py::module_& module);
/// The gradients of an optimizer.
void add_gradients(py::module_& module);
/// The program has waited for an operation: names of earlier asynchronous calls may be used again.
void end_wait() noexcept;
/// Raises KeyboardInterrupt, and what other handlers of signals raise, on the main thread.
void raise_signals();
/// hvd::init(). The program's signals end the wait, and the ranks still meet: the next call of
/// these three functions waits for that.
void join_job();
/// hvd::shutdown(). Handles of earlier operations then raise UsageError. Signals: as join_job().
void leave_job();
/// Waits for a call that a signal has ended. Its error is dropped.
void finish_start_or_end();
/// leave_job() has ended.
void forget_operations() noexcept;

}  // namespace hvd::python
