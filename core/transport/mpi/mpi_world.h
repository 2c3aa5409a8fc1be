#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "base/clock.h"
#include "base/topology.h"
#include "transport/node/node.h"

namespace hvd::message {
class Carrier;
}

namespace hvd::mpi {

class Communicator;
class CallWatch;

/// Exit code of a process in which an MPI call does not return (docs/guides/troubleshooting.md).
/// EX_TEMPFAIL: the job may be tried again.
inline constexpr int kHangExitCode = 75;

struct WorldOptions {
  /// Joining fails with PeerLostError if a rank has not arrived after this time.
  std::chrono::milliseconds start_timeout = std::chrono::seconds(300);
  /// Limit of one MPI call. The process ends with kHangExitCode when a call exceeds it. Choose it
  /// shorter than the timeout after which a silent rank counts as lost, so that this rank reports
  /// the cause first.
  std::chrono::milliseconds call_timeout = std::chrono::seconds(15);
  /// False behaves as if the host had no shared memory; for tests.
  bool control_segment = true;
};

/// This process's membership in one job over MPI: a communicator for control messages, one for
/// data, and the node of its host.
///
/// Only the thread that drives the engine calls it, except topology(), which any thread may call.
/// This header does not need mpi.h.
class MpiWorld {
 public:
  /// Initialises MPI if necessary (see mpi/environment.h) and joins the job. Collective.
  static std::shared_ptr<MpiWorld> join(const WorldOptions& = {});
  MpiWorld(const MpiWorld&) = delete;
  MpiWorld& operator=(const MpiWorld&) = delete;
  /// Not collective. Without a farewell() the world counts as failed, and MPI is not finalised.
  ~MpiWorld();

  const Topology& topology() const noexcept { return node_->topology(); }
  /// This rank's host. It does not use MPI and may outlive the world.
  const std::shared_ptr<host::Node>& node() const noexcept { return node_; }
  const Communicator& control_communicator() const noexcept { return *control_; }
  const Communicator& data_communicator() const noexcept { return *data_; }

  /// Gathers `bytes` bytes of each rank on all ranks, in rank order. Collective; for the start of a
  /// job.
  /// @throws PeerLostError when a rank has not arrived in time, or when the process of a rank of
  /// this host has ended
  void allgather(const void* mine, void* all, int bytes, std::chrono::milliseconds timeout) const;

  /// Records that this rank leaves in order, so that MPI is finalised. The control segment has its
  /// own farewell.
  void farewell() noexcept { left_in_order_ = true; }
  /// Records a failure: MPI does not clean up any more.
  void mark_failed() noexcept;
  /// True after mark_failed(): other ranks may never respond.
  bool failed() const noexcept { return failed_; }

 private:
  MpiWorld() = default;
  void check_ranks_of_host() const;
  [[noreturn]] void end_because(const std::string& call, int peer, Duration lasted) noexcept;

  std::unique_ptr<Communicator> control_;
  std::unique_ptr<Communicator> data_;
  std::shared_ptr<host::Node> node_;
  bool left_in_order_ = false;
  bool failed_ = false;
  std::unique_ptr<CallWatch> watch_;  // last: it uses the members above
};

/// Makes a carrier that uses the two communicators of `world`. It passes only the channel bits of a
/// tag to MPI, because MPI's envelopes hold the source and each job has its own communicators.
/// Messages are never cancelled; see Note [Memory after a failure]. Threading: see
/// message::Carrier.
std::shared_ptr<message::Carrier> make_mpi_carrier(std::shared_ptr<MpiWorld>);

}  // namespace hvd::mpi
