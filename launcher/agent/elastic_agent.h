#pragma once

#include "agent/host_order.h"

namespace hvd::launcher {

/// The agent of one host of an elastic job: starts a worker in a slot whenever hvdrun orders it,
/// passes the bytes of its member socket on, ends it when ordered, and ends all workers if hvdrun
/// does not renew the lease (core/member/lease.h) or the connection is lost. Returns its exit code.
/// @throws LaunchError (kUnavailable, kInternal) when this host has too few descriptors.
int run_elastic_agent(const HostOrder& order);

}  // namespace hvd::launcher
