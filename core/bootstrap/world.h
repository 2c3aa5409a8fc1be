#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <string>

#include "transport/carrier.h"
#include "transport/node/node.h"

namespace hvd::runtime {

/// A job as this process takes part in it, once its ranks have found each other: whatever carries
/// their messages, what a job is made of comes from here. Backends, and what the ranks agree on,
/// are the same for all.
///
/// Used by the thread that joins. The node and the carrier may outlive it.
class World {
 public:
  virtual ~World() = default;

  /// For people: "mpi://", "tcp://host:port".
  virtual const std::string& init_method() const noexcept = 0;
  virtual const std::shared_ptr<host::Node>& node() const noexcept = 0;
  virtual const std::shared_ptr<message::Carrier>& carrier() const noexcept = 0;

  /// Every rank contributes `bytes` bytes; all receive everything, in rank order. Collective, and
  /// only until begun(). @throws PeerLostError when not every rank has come in time
  virtual void allgather(const void* mine, void* all, std::size_t bytes) = 0;
  /// The ranks have agreed on all there is: what only joining needs is given back. Collective.
  virtual void begun() = 0;
  /// This rank cannot begin: the others hear why, as far as they can be told.
  virtual void abandon(const std::exception& cause) noexcept = 0;
};

}  // namespace hvd::runtime
