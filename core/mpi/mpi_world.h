#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "host/host_board.h"
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
  bool host_board = true;
};

/// One job, as this process takes part in it over MPI: who is where, how to wake the ranks of this
/// host, and two private communicators, one for control messages and one for data.
///
/// Used by the thread that drives the engine, except topology() and ring(), which any thread may
/// call. This header does not need mpi.h.
///
/// Hosts are told apart by name, boot and /dev/shm. The environment variable
/// HVD_TEST_HOSTS="a,a,b,b" (one name per rank; for tests only) overrides that: ranks with
/// different names then treat each other as remote.
class MpiWorld {
 public:
  /// Initialises MPI if necessary (see mpi/environment.h) and meets the other ranks. Collective.
  static std::shared_ptr<MpiWorld> join(const WorldOptions& = {});
  MpiWorld(const MpiWorld&) = delete;
  MpiWorld& operator=(const MpiWorld&) = delete;
  /// Not collective. A world that ends without farewell() counts as failed: MPI is not finalized
  /// then.
  ~MpiWorld();

  const Topology& topology() const noexcept { return topology_; }
  const Communicator& control_communicator() const noexcept { return *control_; }
  const Communicator& data_communicator() const noexcept { return *data_; }

  /// All ranks of this host share the board. When false they poll: see rung_by_all().
  bool board_shared() const noexcept { return board_shared_; }
  /// The ranks of every host share its board. The same on every rank.
  bool all_boards_shared() const noexcept { return all_boards_shared_; }
  /// Room for segments on the host of this rank when the job began, in bytes, as the host's first
  /// rank found it: that of /dev/shm where segments cannot do without it. The same on every rank.
  std::uint64_t shared_memory_free(int world_rank) const noexcept {
    return free_of_host_[static_cast<std::size_t>(
        topology_.host_of_rank[static_cast<std::size_t>(world_rank)])];
  }
  /// Every rank of the job can ring this one.
  bool rung_by_all() const noexcept {
    return board_shared_ && topology_.local_size == topology_.size;
  }
  /// Begins the names of what the ranks of this host share; no other job has the same.
  const std::string& host_name_prefix() const noexcept { return board_name_; }
  host::HostBoard& board() noexcept { return *board_; }
  /// See control::ControlPlane.
  LockWords* lock_words(int world_rank) noexcept;
  LockWords* outside_lock_words() noexcept;
  /// World rank of the process in a slot of the board.
  int rank_of_slot(int slot) const noexcept { return local_ranks_[static_cast<std::size_t>(slot)]; }
  /// Wakes a rank of this host; no effect on others.
  void ring(int world_rank) noexcept;
  /// A message is on its way to that rank, which will know of it if it is on this host.
  void announce(int world_rank) noexcept;
  /// One that was announced has been received here.
  void note_received() noexcept { ++mail_received_; }
  /// All that was announced has been received. @pre rung_by_all()
  bool mail_empty() const noexcept { return board_->own_mail() == mail_received_; }

  /// Every rank contributes `bytes` bytes; all receive everything, in rank order. Collective, while
  /// a job begins.
  /// @throws PeerLostError when not every rank has arrived in time.
  void allgather(const void* mine, void* all, int bytes, std::chrono::milliseconds timeout) const;

  /// This rank leaves in order.
  void farewell() noexcept;
  /// Something broke: MPI is not asked to clean up any more.
  void mark_failed() noexcept;
  /// Waiting for other ranks may be in vain.
  bool failed() const noexcept { return failed_; }

 private:
  MpiWorld() = default;
  void find_topology(std::chrono::steady_clock::time_point deadline);
  void set_up_board(const WorldOptions&, std::chrono::steady_clock::time_point deadline);
  [[noreturn]] void end_because(const std::string& call, int peer, Duration lasted) noexcept;

  std::unique_ptr<Communicator> control_;
  std::unique_ptr<Communicator> data_;
  Topology topology_;
  std::vector<int> local_ranks_;   ///< world rank per slot
  std::vector<int> slot_of_rank_;  ///< per world rank; -1 on other hosts
  std::string board_name_;         ///< agreed by the ranks of this host
  std::unique_ptr<host::HostBoard> board_;
  bool board_shared_ = false;
  bool all_boards_shared_ = false;
  std::vector<std::uint64_t> free_of_host_;  ///< per host of the topology
  std::uint64_t mail_received_ = 0;
  bool said_farewell_ = false;
  bool failed_ = false;
  std::unique_ptr<CallWatch> watch_;  // last: it looks at what is above
};

}  // namespace hvd::mpi
