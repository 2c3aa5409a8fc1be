#pragma once

#include <string>

#include "agent/host_order.h"

namespace hvd::launcher {

/// The agent of one host of an elastic job: starts and ends workers in slots on hvdrun's orders,
/// forwards the bytes of their member sockets, and ends all workers if hvdrun does not renew the
/// lease (core/member/lease.h) or the connection is lost. Returns the agent's exit code.
/// @throws LaunchError (kUnavailable, kInternal) when this host has too few descriptors.
int run_elastic_agent(const HostOrder& order);

/// Where the hvdrun of the endpoint's node serves.
struct Endpoint {
  std::string host = {};
  int port = 0;
  bool here = false;  ///< an address of this machine
  double start_timeout_s = 120;
};

/// The agent of a node that joins the elastic job at an endpoint by itself, with `slots` slots.
/// SIGTERM and SIGINT let it leave in order. Returns hvdrun's exit code when the job has ended,
/// 0 when the node has left, and kUnavailable if the job is out of reach.
/// @param order without ranks and times
/// @throws LaunchError
int run_node_agent(const HostOrder& order, const Endpoint& endpoint, int slots);

}  // namespace hvd::launcher
