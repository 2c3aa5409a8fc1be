#pragma once

#include <mpi.h>

#include <limits>
#include <string>

#include "bench/report.h"

namespace hvd::bench {

/// The speed at which the cores of ranks 0 and 1 exchange data. Cores that share a cache need about
/// 100 ns for a round trip, cores of different chiplets or sockets about 500 ns. NaN if it was not
/// measured.
struct CoreDistance {
  double round_trip_ns = std::numeric_limits<double>::quiet_NaN();   ///< of a flag
  double write_gb_per_s = std::numeric_limits<double>::quiet_NaN();  ///< into cache lines of rank 1
  double read_gb_per_s = std::numeric_limits<double>::quiet_NaN();   ///< of what rank 0 has written
};

Json to_json(const CoreDistance&);
/// "107 ns, write 14.8 GB/s, read 29.1 GB/s".
std::string to_text(const CoreDistance&);

/// Memory that all ranks map if they share a host. Ranks 0 and 1 measure the distance of their
/// cores with it. All ranks can wait for each other with it, without a call that belongs to a
/// contender. Not thread-safe.
class SharedFlags {
 public:
  /// Collective.
  explicit SharedFlags(MPI_Comm);
  ~SharedFlags();
  SharedFlags(const SharedFlags&) = delete;
  SharedFlags& operator=(const SharedFlags&) = delete;

  /// Whether the ranks share a host and could map the memory: the same on all ranks.
  bool available() const noexcept { return region_ != nullptr; }
  /// Waits until all ranks have called it. Polls. @pre available()
  void meet();
  /// Measures for some milliseconds on the cores where ranks 0 and 1 run now, while the other ranks
  /// sleep. Collective; the result is the same on all ranks, a median of many samples.
  CoreDistance measure();

 private:
  struct Region;
  void map(const char* name, int flags);
  void unmap() noexcept;
  void pass();
  double time_round_trip();
  void time_copies(CoreDistance&);

  MPI_Comm all_;
  int rank_ = 0, size_ = 1;
  long meetings_ = 0, passes_ = 0;
  Region* region_ = nullptr;  ///< null if it is not available
};

}  // namespace hvd::bench
