#include <c10/util/Exception.h>

#include <exception>

#include "bindings.h"
#include "hvd/error.h"

namespace hvd::python {
namespace {

/// The classes of hvd.errors. Never destroyed, because translations may run while the interpreter
/// ends.
struct Classes {
  py::object usage, not_initialized, internal, mismatch, stalled, peer_lost, shutdown;
};
Classes* classes = nullptr;

void set_error(const py::object& kind, const char* text) { PyErr_SetString(kind.ptr(), text); }

void set_peer_lost(const PeerLostError& error) {
  const py::object raised = classes->peer_lost(error.what(), error.rank());
  PyErr_SetObject(classes->peer_lost.ptr(), raised.ptr());
}

/// The most derived classes first.
void translate(std::exception_ptr pending) {
  if (!pending) return;
  try {
    std::rethrow_exception(pending);
  } catch (const NotInitializedError& error) {
    set_error(classes->not_initialized, error.what());
  } catch (const UsageError& error) {
    set_error(classes->usage, error.what());
  } catch (const MismatchError& error) {
    set_error(classes->mismatch, error.what());
  } catch (const StalledError& error) {
    set_error(classes->stalled, error.what());
  } catch (const PeerLostError& error) {
    set_peer_lost(error);
  } catch (const ShutdownError& error) {
    set_error(classes->shutdown, error.what());
  } catch (const Error& error) {
    set_error(classes->internal, error.what());
  } catch (const c10::DistError&) {
    throw;  // torch translates it
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  }
}

}  // namespace

bool set_python_error(const std::exception_ptr& pending) {
  try {
    translate(pending);
  } catch (...) {
    return false;
  }
  return PyErr_Occurred() != nullptr;
}

void translate_errors(py::module_& /*module*/) {
  const py::module_ errors = py::module_::import("hvd.errors");
  classes = new Classes{.usage = errors.attr("UsageError"),
                        .not_initialized = errors.attr("NotInitializedError"),
                        .internal = errors.attr("HorovodInternalError"),
                        .mismatch = errors.attr("MismatchError"),
                        .stalled = errors.attr("StalledError"),
                        .peer_lost = errors.attr("PeerLostError"),
                        .shutdown = errors.attr("ShutdownError")};
  py::register_local_exception_translator(&translate);
}

}  // namespace hvd::python
