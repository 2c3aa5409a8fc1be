#pragma once

#include <optional>
#include <string>

#include "base/clock.h"
#include "control/control_plane.h"
#include "control/lock_relay.h"
#include "control/schedule_lock.h"
#include "engine/runtime_options.h"

namespace hvd::runtime {

/// There is none when it is switched off, or some host's ranks share no memory.
control::ScheduleLock make_lock(const RuntimeOptions&, control::ControlPlane&);

/// The first rank of each of several hosts tells the others how far its host has got.
std::optional<control::LockRelay> make_relay(const control::ScheduleLock&, control::ControlPlane&);

/// How long a locked rank waits before it, or those it waits for, go back to negotiating, which
/// finds out and tells who is missing: short beside the times after which stalls are told.
Duration lock_patience(const RuntimeOptions&);

}  // namespace hvd::runtime
