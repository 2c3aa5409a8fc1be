#pragma once

#include <functional>
#include <ostream>

#include "transport/control_plane.h"

/// What every control plane that sends messages has to do, whatever carries them.
namespace hvd::conformance {

/// One rank of a job that has nothing but a control plane.
struct PlaneRank {
  control::ControlPlane& plane;
  /// Waits for all ranks, past the control plane.
  std::function<void()> wait_for_all;
};

struct ControlPlaneCase {
  const char* name;
  /// On every rank at once. Failures are GoogleTest's.
  void (*run)(PlaneRank&);
};
extern const ControlPlaneCase kControlPlaneCases[6];

/// For a test's name.
inline void PrintTo(const ControlPlaneCase& one, std::ostream* out) { *out << one.name; }

}  // namespace hvd::conformance
