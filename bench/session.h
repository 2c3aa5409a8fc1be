#pragma once

#include <mpi.h>

#include <iosfwd>
#include <span>
#include <string>
#include <vector>

#include "bench/report.h"

namespace hvd::bench {

struct SessionOptions {
  /// glibc keeps freed memory instead of unmapping it: MPI's temporary buffers then cost no page
  /// faults.
  bool retain_heap = false;
  /// The bench starts MPI with MPI's own defaults. Otherwise hvd starts it, with the settings that
  /// hvd prefers.
  bool plain_mpi = false;
  /// How hvd's ranks find each other (hvd::Options); empty: over MPI. The peers use MPI in any
  /// case.
  std::string init_method = {};
};

/// hvd and MPI, both started, with a communicator for the peers. One per process; not thread-safe.
class Session {
 public:
  /// @throws hvd::Error; std::runtime_error when MPI lets only one thread call it, as the peers and
  /// hvd would then get in each other's way.
  explicit Session(const SessionOptions&);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  /// How hvd's ranks found each other; empty: over MPI.
  const std::string& init_method() const noexcept { return options_.init_method; }
  /// hvd joins once more, after hvd::shutdown().
  void join(const std::string& init_method) const;
  /// hvd sends no messages on it.
  MPI_Comm peers() const noexcept { return peers_; }

  /// Returns when all ranks are here. It polls: for short waits between measurements only.
  void align() const;
  /// The same for long waits: a rank that is early leaves its core to others. It does not use hvd,
  /// whose schedule it would disturb.
  void align_asleep() const;
  /// Replaces each sample by the slowest rank's: an operation is over when it is over everywhere.
  void slowest(std::vector<double>& samples) const;
  double slowest(double sample) const;
  double sum(double value) const;
  bool all(bool mine) const;

  /// Machine, load and settings, as this rank sees them now.
  Json describe() const;

 private:
  SessionOptions options_;
  int rank_ = 0;
  int size_ = 1;
  bool started_mpi_ = false;
  MPI_Comm peers_ = MPI_COMM_NULL;
};

/// Prints the result of describe() as text.
void print_description(const Json&, std::ostream&);

}  // namespace hvd::bench
