#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <string>

#include "bootstrap/rendezvous.h"
#include "transport/carrier.h"
#include "transport/node/node.h"

namespace hvd::runtime {

/// This process's membership in a job whose ranks have found each other, independent of the library
/// that carries their messages.
///
/// Used by the thread that joins. The node and the carrier may outlive it.
class World {
 public:
  virtual ~World() = default;

  /// Text for users: "mpi://", "tcp://host:port".
  virtual const std::string& init_method() const noexcept = 0;
  virtual const std::shared_ptr<host::Node>& node() const noexcept = 0;
  virtual const std::shared_ptr<message::Carrier>& carrier() const noexcept = 0;

  /// Every rank contributes `bytes` bytes, and receives those of all in rank order. Collective. Not
  /// allowed after begun(). @throws PeerLostError when a rank does not contribute in time
  virtual void allgather(const void* mine, void* all, std::size_t bytes) = 0;
  /// Ends the start of the job, and releases the resources that only the start needs. Collective.
  virtual void begun() = 0;
  /// Sends the other ranks, if possible, the reason why this rank cannot begin.
  virtual void abandon(const std::exception& cause) noexcept = 0;
};

/// Makes the World of a job over UCX, from ranks that have joined a rendezvous. Collective.
/// @throws hvd::Error on all ranks when one has no usable UCX; PeerLostError when a rank has not
/// contributed by the deadline
std::shared_ptr<World> join_over_ucx(std::unique_ptr<rendezvous::Rendezvous>, Deadline);

}  // namespace hvd::runtime
