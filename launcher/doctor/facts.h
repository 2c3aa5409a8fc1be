#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "doctor/fact.h"

/// The facts that `hvdrun doctor` collects. docs/doctor.md describes their names in JSON, which are
/// those of the members.
namespace hvd::launcher::doctor {

/// CPUs that share a cache.
struct SharedCache {
  std::string cache;  ///< "L3"
  std::vector<int> cpus;
};

/// Two CPUs of one distance, and the time that a flag takes from the first to the second and back.
struct CpuPair {
  int first = 0;
  int second = 0;
  std::string shares;  ///< the closest thing that both share: "core", "L3", "NUMA node", "machine"
  Fact<double> round_trip_ns;
};

struct CpuFacts {
  std::vector<int> allowed;     ///< this process's affinity mask
  int online = 0;               ///< all CPUs of the host
  std::optional<double> quota;  ///< CPUs that the cgroups grant; null: no limit
  Fact<double> load;            ///< runnable processes in the last minute
  Fact<std::vector<SharedCache>> caches;
  Fact<std::vector<CpuPair>> pairs;  ///< one for each distance
};

/// /dev/shm.
struct SharedMemoryFacts {
  Fact<bool> usable;  ///< a file can be made and mapped there; unknown: why it cannot
  Fact<std::uint64_t> total_bytes;
  Fact<std::uint64_t> free_bytes;
};

/// A resource limit; null: unlimited.
struct Limit {
  std::optional<std::uint64_t> soft;
  std::optional<std::uint64_t> hard;
};

struct LimitFacts {
  Fact<Limit> open_files;
  Fact<Limit> locked_memory_bytes;
  Fact<Limit> processes;
};

struct MemoryFacts {
  Fact<std::uint64_t> available_bytes;
  Fact<int> overcommit;              ///< vm.overcommit_memory
  Fact<std::string> huge_pages;      ///< transparent huge pages: "always", "madvise", "never"
  Fact<std::string> huge_pages_shm;  ///< the same for shared memory
  Fact<bool> cross_memory_attach;    ///< a process may read the memory of its parent
};

struct Interface {
  std::string name;
  std::vector<std::string> addresses;
  /// The kernel's name of a virtual kind ("bridge", "tun", "virtual"); empty: hardware.
  std::string virtual_kind;
};

/// Facts of one host, which need no job.
struct HostFacts {
  std::string hostname;
  std::string hvd;  ///< version and build
  std::map<std::string, std::string>
      components;            ///< hvd::build_info(): version, or why it is missing
  Fact<std::string> mpirun;  ///< path and version
  CpuFacts cpus;
  SharedMemoryFacts shared_memory;
  LimitFacts limits;
  MemoryFacts memory;
  std::vector<Interface> interfaces;
  std::vector<std::string> rdma_devices;  ///< /sys/class/infiniband
};

/// The time of an operation between some ranks.
struct Measurement {
  std::string operation;  ///< "allreduce", or "send": a broadcast between two ranks
  std::string scope;      ///< "host": ranks of one host; "hosts": one or more ranks of several
  std::vector<int> ranks;
  std::uint64_t bytes = 0;
  Fact<double> median_us;  ///< of one operation; of a send, one way
  int repetitions = 0;
  std::string backend;  ///< the backend that ran it; empty: unknown
};

/// How far the clock of another host is ahead of that of rank 0's.
struct ClockOffset {
  int rank = 0;  ///< the rank there
  double offset_s = 0;
  double error_s = 0;  ///< the largest possible error
};

/// A TCP connection of a rank to another host.
struct Connection {
  std::string interface;  ///< of this side; empty: unknown
  std::string address;
  std::string peer;
};

/// The result of connecting to an address of another host.
struct Reach {
  int rank = 0;  ///< the rank there
  std::string interface;
  std::string address;
  bool reached = false;
  std::string problem;  ///< why the address was not reached; empty if it was
};

/// The report of a rank of the job.
struct RankReport {
  int rank = 0;
  int local_rank = 0;
  std::string host;  ///< as the rank reports it
  std::string controller;
  std::string init_method;
  std::string error;  ///< empty: the rank has succeeded
  std::vector<Measurement> measurements;
  std::vector<ClockOffset> clocks;
  std::vector<Connection> connections;
  std::vector<Reach> reach;
};

// NOLINTBEGIN
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SharedCache, cache, cpus)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CpuPair, first, second, shares, round_trip_ns)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CpuFacts, allowed, online, quota, load, caches, pairs)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SharedMemoryFacts, usable, total_bytes, free_bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Limit, soft, hard)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(LimitFacts, open_files, locked_memory_bytes, processes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(MemoryFacts, available_bytes, overcommit, huge_pages,
                                   huge_pages_shm, cross_memory_attach)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Interface, name, addresses, virtual_kind)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(HostFacts, hostname, hvd, components, mpirun, cpus,
                                   shared_memory, limits, memory, interfaces, rdma_devices)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Measurement, operation, scope, ranks, bytes, median_us,
                                   repetitions, backend)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ClockOffset, rank, offset_s, error_s)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Connection, interface, address, peer)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Reach, rank, interface, address, reached, problem)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankReport, rank, local_rank, host, controller, init_method,
                                   error, measurements, clocks, connections, reach)
// NOLINTEND

/// Begins the line on which a rank or a collector prints its facts in JSON.
inline constexpr const char* kRecordPrefix = "hvd-doctor ";

}  // namespace hvd::launcher::doctor
