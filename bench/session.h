#pragma once

#include <mpi.h>

#include <iosfwd>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bench/report.h"
#include "bench/shared_flags.h"

namespace hvd::bench {

struct SessionOptions {
  /// glibc keeps freed memory instead of unmapping it, so that MPI's temporary buffers cause no
  /// page faults.
  bool retain_heap = false;
  /// The bench starts MPI with MPI's own defaults. Otherwise hvd starts it, with the settings that
  /// hvd prefers.
  bool plain_mpi = false;
  /// How hvd's ranks find each other (hvd::Options); empty: over MPI. The other contenders use MPI
  /// in any case.
  std::string init_method = {};
};

/// Starts hvd and MPI, and holds a communicator for hvd's peers in the benchmark. One per process;
/// not thread-safe.
class Session {
 public:
  /// @throws hvd::Error; std::runtime_error when MPI allows calls from only one thread, because
  /// both hvd and the other contenders call it
  explicit Session(const SessionOptions&);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  /// How hvd's ranks found each other; empty: over MPI.
  const std::string& init_method() const noexcept { return options_.init_method; }
  /// Makes hvd join a job again, after hvd::shutdown().
  void join(const std::string& init_method) const;
  /// The communicator of the other contenders. hvd sends no messages on it.
  MPI_Comm peers() const noexcept { return peers_; }

  /// Waits until all ranks have called it. Ranks of one host wait for each other at a counter in
  /// shared memory, so that the wait brings no contender's code into the caches. It polls, so use
  /// it only for short waits between measurements.
  void align() const;
  /// The same for long waits: a rank that is early sleeps and leaves its core to other processes.
  /// Does not use hvd, because that would disturb hvd's schedule.
  void align_asleep() const;
  /// Replaces each sample by the slowest rank's, because an operation is complete when it is
  /// complete on every rank.
  void slowest(std::vector<double>& samples) const;
  double slowest(double sample) const;
  double sum(double value) const;
  bool all(bool mine) const;

  /// Measures how far apart the cores of ranks 0 and 1 are now. Collective.
  CoreDistance core_distance() const { return flags_->measure(); }
  /// Describes the machine, its load and the settings, as seen by this rank now.
  Json describe() const;

 private:
  SessionOptions options_;
  int rank_ = 0;
  int size_ = 1;
  bool started_mpi_ = false;
  MPI_Comm peers_ = MPI_COMM_NULL;
  std::unique_ptr<SharedFlags> flags_;
};

/// Prints the result of describe() as text.
void print_description(const Json&, std::ostream&);

}  // namespace hvd::bench
