#pragma once

#include <functional>
#include <ostream>

#include "transport/control_plane.h"

/// Test cases for every control plane that sends messages, independent of its transport.
namespace hvd::conformance {

/// One rank of a job that consists of a control plane only.
struct PlaneRank {
  control::ControlPlane& plane;
  /// Waits for all ranks without using the control plane.
  std::function<void()> wait_for_all;
};

struct ControlPlaneCase {
  const char* name;
  /// Called on every rank at the same time. Reports failures to GoogleTest.
  void (*run)(PlaneRank&);
};
extern const ControlPlaneCase kControlPlaneCases[6];

/// For a test's name.
inline void PrintTo(const ControlPlaneCase& one, std::ostream* out) { *out << one.name; }

}  // namespace hvd::conformance
