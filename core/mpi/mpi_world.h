#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "base/clock.h"
#include "host/node.h"
#include "hvd/topology.h"

namespace hvd::mpi {

class Communicator;
class CallWatch;

/// Of a process in which a call of MPI does not return: docs/errors.md. EX_TEMPFAIL: the job may be
/// tried again.
inline constexpr int kHangExitCode = 75;

struct WorldOptions {
  /// Joining fails with PeerLostError when a rank has not arrived by then.
  std::chrono::milliseconds start_timeout = std::chrono::seconds(300);
  /// A call of MPI that takes longer does not return: the process ends with kHangExitCode. To be
  /// less than what makes a silent rank a lost one, so that this rank says what has happened before
  /// others guess.
  std::chrono::milliseconds call_timeout = std::chrono::seconds(15);
  /// False: as if the host had no shared memory. For tests.
  bool control_segment = true;
};

/// One job, as this process takes part in it over MPI: two private communicators, one for control
/// messages and one for data, and the host that joining has shown it.
///
/// Used by the thread that drives the engine, except topology(), which any thread may call. This
/// header does not need mpi.h.
class MpiWorld {
 public:
  /// Initialises MPI if necessary (see mpi/environment.h) and meets the other ranks. Collective.
  static std::shared_ptr<MpiWorld> join(const WorldOptions& = {});
  MpiWorld(const MpiWorld&) = delete;
  MpiWorld& operator=(const MpiWorld&) = delete;
  /// Not collective. A world that ends without farewell() counts as failed: MPI is not finalized
  /// then.
  ~MpiWorld();

  const Topology& topology() const noexcept { return node_->topology(); }
  /// This rank's host. It needs no MPI, and may outlive the world.
  const std::shared_ptr<host::Node>& node() const noexcept { return node_; }
  const Communicator& control_communicator() const noexcept { return *control_; }
  const Communicator& data_communicator() const noexcept { return *data_; }

  /// Every rank contributes `bytes` bytes; all receive everything, in rank order. Collective, while
  /// a job begins.
  /// @throws PeerLostError when not every rank has arrived in time.
  void allgather(const void* mine, void* all, int bytes, std::chrono::milliseconds timeout) const;

  /// This rank leaves in order, as far as MPI is concerned: the control segment has a farewell of
  /// its own.
  void farewell() noexcept { said_farewell_ = true; }
  /// Something broke: MPI is not asked to clean up any more.
  void mark_failed() noexcept;
  /// Waiting for other ranks may be in vain.
  bool failed() const noexcept { return failed_; }

 private:
  MpiWorld() = default;
  [[noreturn]] void end_because(const std::string& call, int peer, Duration lasted) noexcept;

  std::unique_ptr<Communicator> control_;
  std::unique_ptr<Communicator> data_;
  std::shared_ptr<host::Node> node_;
  bool said_farewell_ = false;
  bool failed_ = false;
  std::unique_ptr<CallWatch> watch_;  // last: it looks at what is above
};

}  // namespace hvd::mpi
