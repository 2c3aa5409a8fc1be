#pragma once

#include <torch/csrc/utils/pybind.h>

#include <exception>

// The parts of hvd._C. Every call releases Python's lock before it enters hvd.
namespace hvd::python {

namespace py = pybind11;
using Unlocked = py::call_guard<py::gil_scoped_release>;

/// Translates hvd's exceptions to the classes of hvd.errors.
void translate_errors(py::module_& module);
/// Sets Python's error for an exception of hvd. @return false for any other exception @pre the
/// caller holds Python's lock (unchecked: Python checks it in its debug build)
bool set_python_error(const std::exception_ptr& pending);
/// Ranks, process sets, the timeline, and the queries of the build.
void add_job(py::module_& module);
/// Collectives on tensors and objects, and their handles.
void add_operations(py::module_& module);
/// SyncBatchNorm.
void add_layers(py::module_& module);
/// The gradients of an optimizer.
void add_gradients(py::module_& module);
/// Call this when the program has waited for an operation: names of earlier asynchronous calls
/// may then be used again.
void end_wait() noexcept;
/// On the main thread, runs Python's pending signal handlers and raises their exceptions, such as
/// KeyboardInterrupt.
void raise_signals();
/// hvd::init(). A signal of the program ends the wait, but the ranks continue to join; the next
/// call of one of these three functions waits until they have joined.
void join_job();
/// hvd::shutdown(). Handles of earlier operations then raise UsageError. Signals: like join_job().
void leave_job();
/// Waits for the end of a call whose wait a signal has ended, and drops its error.
void finish_start_or_end();
/// Call this when leave_job() has ended.
void forget_operations() noexcept;

}  // namespace hvd::python
