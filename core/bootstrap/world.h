#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "bootstrap/agreement.h"
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

  /// Ends the start of the job, and releases the resources that only the start needs. Collective.
  virtual void begun() = 0;
  /// Sends the other ranks, if possible, the reason why this rank cannot begin.
  virtual void abandon(const std::exception& cause) noexcept = 0;
};

/// Adds the parts of a statement that depend on this rank's position among the ranks of its host.
/// Exceptions become a part of the statement.
using CompleteStatement = std::function<void(RankStatement&, const Topology&)>;
/// Joins the other ranks. The payload is this rank's part in the first exchange.
using JoinRanks =
    std::function<std::unique_ptr<rendezvous::Rendezvous>(std::span<const std::byte> payload)>;

/// Makes the World of a job over UCX, and compares the statements of its ranks. Collective.
/// @param url at which the ranks find each other; UCX uses the network interface towards its host
/// @param agreement receives the conclusion from all statements
/// @throws UsageError on all ranks when a rank cannot begin or a setting differs; hvd::Error when
/// one has no usable UCX; PeerLostError when a rank has not joined or contributed by the deadline
std::shared_ptr<World> join_over_ucx(const std::string& url, const JoinRanks&, int rank, int size,
                                     RankStatement, const CompleteStatement&, Agreement& agreement,
                                     Deadline);

}  // namespace hvd::runtime
