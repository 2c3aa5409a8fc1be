#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>

#include "base/text.h"
#include "doctor/diagnosis.h"
#include "doctor/format.h"

// The limits below are stated in docs/doctor.md, with their reasons.

namespace hvd::launcher::doctor {
namespace {

constexpr std::array<std::string_view, 3> kSeverityNames = {"info", "warning", "error"};

constexpr std::uint64_t kSmallSharedMemory = std::uint64_t{64} << 20;  // docker's default
constexpr std::uint64_t kFewFiles = 256;
constexpr std::uint64_t kFewProcesses = 512;
constexpr double kClockOffsetWarning_s = 0.1;
constexpr double kSlowFlag_ns = 300;  // cores of one cache need 20 to 150 ns

class Findings {
 public:
  void add(Finding finding) { findings_.push_back(std::move(finding)); }
  std::vector<Finding> sorted() && {
    std::stable_sort(findings_.begin(), findings_.end(),
                     [](const Finding& a, const Finding& b) { return a.severity > b.severity; });
    return std::move(findings_);
  }

 private:
  std::vector<Finding> findings_;
};

std::string component(const HostFacts& facts, const std::string& name) {
  const auto found = facts.components.find(name);
  return found == facts.components.end() ? "" : found->second;
}

/// Whether build_info() gives a version, and not the reason why the component cannot be used.
bool has_component(const HostFacts& facts, const std::string& name) {
  const std::string value = component(facts, name);
  return !value.empty() && value.find_first_of("0123456789") == 0;
}

void check_reached(const HostResult& host, Findings& findings) {
  if (host.facts) return;
  const bool missing = host.facts.unknown.find("not found") != std::string::npos ||
                       host.facts.unknown.find("cannot run") != std::string::npos;
  findings.add({.id = missing ? "hvd_missing" : "host_unreachable",
                .severity = Severity::kError,
                .host = host.name,
                .what = text("the host could not collect its facts: ", host.facts.unknown),
                .advice = host.local ? "install hvd completely: hvd-doctor-rank belongs to hvdrun"
                          : missing  ? "install the same hvd at the same path on this host"
                                     : text("test the remote shell: ssh -o BatchMode=yes ",
                                            host.name, " true (or name another one with --rsh)")});
}

void check_shared_memory(const HostResult& host, Findings& findings) {
  const SharedMemoryFacts& shm = host.facts->shared_memory;
  if (!shm.usable) {
    findings.add(
        {.id = "shm_unusable",
         .severity = Severity::kError,
         .host = host.name,
         .what = text("/dev/shm cannot be used: ", shm.usable.unknown,
                      "; ranks of this host exchange tensors by messages, which is slower, "
                      "and they poll for them"),
         .advice = "mount -o remount,rw,size=50% /dev/shm, or mount -t tmpfs tmpfs "
                   "/dev/shm (docker: --shm-size=1g)"});
  } else if (shm.free_bytes && *shm.free_bytes < kSmallSharedMemory) {
    findings.add({.id = "shm_small",
                  .severity = Severity::kWarning,
                  .host = host.name,
                  .what = text("/dev/shm has ", format_bytes(*shm.free_bytes), " free, less than ",
                               format_bytes(kSmallSharedMemory),
                               "; hvd then uses memory without a name (memfd), but Open MPI may "
                               "end with SIGBUS"),
                  .advice = "docker: --shm-size=1g; elsewhere: mount -o remount,size=1g /dev/shm; "
                            "and see what fills it: ls -l /dev/shm"});
  }
}

void check_limits(const HostResult& host, Findings& findings) {
  const LimitFacts& limits = host.facts->limits;
  if (limits.open_files) {
    const Limit& files = *limits.open_files;
    const bool hard = files.hard && *files.hard < kFewFiles;
    if (hard || (files.soft && *files.soft < kFewFiles)) {
      findings.add({.id = "few_open_files",
                    .severity = hard ? Severity::kError : Severity::kWarning,
                    .host = host.name,
                    .what = text("a process may open ", format_limit(files.soft),
                                 " files (hard limit ", format_limit(files.hard),
                                 "); each rank needs a few for every other rank, and a job that "
                                 "runs out of them fails"),
                    .advice = hard ? "raise the hard limit: 'nofile' in /etc/security/limits.conf "
                                     "(docker: --ulimit nofile=65536)"
                                   : "ulimit -n 4096 before the job"});
    }
  }
  if (limits.processes && limits.processes->soft && *limits.processes->soft < kFewProcesses) {
    findings.add({.id = "few_processes",
                  .severity = Severity::kWarning,
                  .host = host.name,
                  .what = text("the user may run ", *limits.processes->soft,
                               " processes and threads; a rank with its libraries takes dozens"),
                  .advice = "ulimit -u 4096, or 'nproc' in /etc/security/limits.conf"});
  }
  const bool pins = !host.facts->rdma_devices.empty();
  if (pins && limits.locked_memory_bytes && limits.locked_memory_bytes->soft) {
    findings.add(
        {.id = "locked_memory_limited",
         .severity = Severity::kWarning,
         .host = host.name,
         .what = text("a process may lock ", format_bytes(*limits.locked_memory_bytes->soft),
                      " of memory, and ", join_text(host.facts->rdma_devices, ", "),
                      " pin all memory that they send"),
         .advice = "ulimit -l unlimited, or 'memlock unlimited' in "
                   "/etc/security/limits.conf (docker: --ulimit memlock=-1)"});
  }
}

/// Whether other processes use so much time that the measured times of this host are unreliable.
bool is_busy(const CpuFacts& cpus) { return cpus.load && *cpus.load > cpus.online + 1; }

void check_cpus(const HostResult& host, int ranks, Findings& findings) {
  const CpuFacts& cpus = host.facts->cpus;
  if (cpus.quota && *cpus.quota < ranks) {
    findings.add({.id = "cpu_quota",
                  .severity = *cpus.quota < 1 ? Severity::kError : Severity::kWarning,
                  .host = host.name,
                  .what = text("the cgroup grants ", format_number(*cpus.quota), " CPUs to ", ranks,
                               ranks == 1 ? " rank" : " ranks",
                               "; the kernel stops all of them when that time is used up, for up "
                               "to 100 ms at a time"),
                  .advice = text("docker: --cpus=", ranks,
                                 "; Kubernetes: resources.limits.cpu; or fewer ranks: -np ",
                                 std::max(1, static_cast<int>(*cpus.quota)))});
  }
  if (is_busy(cpus)) {
    findings.add(
        {.id = "host_busy",
         .severity = Severity::kInfo,
         .host = host.name,
         .what = text(format_number(*cpus.load), " processes have wanted to run on ", cpus.online,
                      " CPUs in the last minute; all times here are larger "
                      "than on an idle host"),
         .advice = "see what runs (top), and repeat the measurement"});
  }
  if (static_cast<int>(cpus.allowed.size()) < ranks) {
    findings.add({.id = "few_cpus",
                  .severity = Severity::kWarning,
                  .host = host.name,
                  .what = text(ranks, " ranks share ", cpus.allowed.size(), " of the host's ",
                               cpus.online, " CPUs; each waits for the others' turns"),
                  .advice = static_cast<int>(cpus.allowed.size()) < cpus.online
                                ? "give the job more CPUs: taskset, docker --cpuset-cpus, or the "
                                  "batch system's request"
                                : "run as many ranks as CPUs"});
  }
}

void check_cpu_pairs(const HostResult& host, Findings& findings) {
  const CpuFacts& cpus = host.facts->cpus;
  if (!cpus.pairs) return;
  for (const CpuPair& pair : *cpus.pairs) {
    const bool cache = pair.shares == "core" || pair.shares.starts_with("L");
    if (!pair.round_trip_ns) continue;
    const std::string trip =
        text("a flag takes ", format_number(*pair.round_trip_ns), " ns there and back");
    const std::string cpus_text = text("CPUs ", pair.first, " and ", pair.second);
    if (!cache) {
      findings.add({.id = "no_shared_cache",
                    .severity = Severity::kInfo,
                    .host = host.name,
                    .what = text(cpus_text, " share no cache (only the ", pair.shares, "): ", trip,
                                 ", so small operations between ranks on them take longer"),
                    .advice = "keep the ranks of a small job on CPUs that share a cache (--bind "
                              "auto chooses neighbours)"});
    } else if (*pair.round_trip_ns > kSlowFlag_ns && !is_busy(cpus)) {
      findings.add({.id = "slow_flag",
                    .severity = Severity::kInfo,
                    .host = host.name,
                    .what = text(cpus_text, " are said to share ", pair.shares, ", but ", trip,
                                 "; a virtual machine's CPUs may lie on distant cores, and small "
                                 "operations take longer"),
                    .advice = "pin the virtual CPUs to neighbouring cores on the machine below, "
                              "if it is yours"});
    }
  }
}

void check_memory(const HostResult& host, Findings& findings) {
  const MemoryFacts& memory = host.facts->memory;
  if (memory.overcommit && *memory.overcommit == 2) {
    findings.add({.id = "no_overcommit",
                  .severity = Severity::kWarning,
                  .host = host.name,
                  .what =
                      "vm.overcommit_memory is 2; hvd reserves address space that it fills only "
                      "in part, and the kernel counts all of it",
                  .advice = "sysctl vm.overcommit_memory=0"});
  }
  if (memory.cross_memory_attach && !*memory.cross_memory_attach) {
    findings.add({.id = "no_cross_memory_attach",
                  .severity = Severity::kInfo,
                  .host = host.name,
                  .what = "a process may not read another's memory (ptrace permission); Open MPI "
                          "then copies large messages twice, and ranks cannot map each other's "
                          "tensors",
                  .advice = "sysctl kernel.yama.ptrace_scope=0 (docker: --cap-add SYS_PTRACE)"});
  }
}

void check_libraries(const HostResult& host, const JobResult& job, Findings& findings) {
  const HostFacts& facts = *host.facts;
  if (const std::string broken = component(facts, "runtime"); !broken.empty()) {
    findings.add({.id = "runtime_broken",
                  .severity = Severity::kError,
                  .host = host.name,
                  .what = broken,
                  .advice = "install hvd again; ldd on libhvd_core.so shows missing libraries"});
    return;
  }
  const std::string ucx = component(facts, "UCX");
  if (!has_component(facts, "UCX") && !ucx.starts_with("not built")) {
    findings.add(
        {.id = "ucx_missing",
         .severity = job.succeeded ? Severity::kWarning : Severity::kError,
         .host = host.name,
         .what = text("UCX cannot be loaded: ", ucx, "; hvdrun then needs an MPI to start jobs"),
         .advice = "apt install libucx0 (or the vendor's UCX, with its folder in "
                   "LD_LIBRARY_PATH)"});
  }
  if (!facts.mpirun && !has_component(facts, "UCX") && host.local) {
    findings.add(
        {.id = "no_launcher",
         .severity = Severity::kError,
         .host = host.name,
         .what = text("there is neither a usable UCX nor an mpirun: ", facts.mpirun.unknown),
         .advice = "apt install libucx0, or apt install openmpi-bin"});
  }
}

/// Reports a value that should be equal on all hosts.
void check_equal(const Diagnosis& diagnosis, const std::string& id, const std::string& what,
                 Severity severity, const std::string& consequence, const std::string& advice,
                 std::string (*value_of)(const HostFacts&), Findings& findings) {
  std::map<std::string, std::vector<std::string>> hosts_of;
  for (const HostResult& host : diagnosis.hosts)
    if (host.facts) hosts_of[value_of(*host.facts)].push_back(host.name);
  if (hosts_of.size() < 2) return;
  std::vector<std::string> parts;
  for (const auto& [value, hosts] : hosts_of)
    parts.push_back(text(value.empty() ? "unknown" : value, " on ", join_text(hosts, ", ")));
  findings.add({.id = id,
                .severity = severity,
                .host = "",
                .what = text(what, " differs between the hosts (", join_text(parts, "; "), "); ",
                             consequence),
                .advice = advice});
}

void check_same_software(const Diagnosis& diagnosis, Findings& findings) {
  check_equal(
      diagnosis, "build_differs", "the build of hvd", Severity::kError, "hvd::init() refuses that",
      "install one build of hvd at the same path on every host",
      [](const HostFacts& facts) { return facts.hvd; }, findings);
  check_equal(
      diagnosis, "ucx_differs", "the version of UCX", Severity::kWarning,
      "two versions may choose different protocols", "install the same UCX on every host",
      [](const HostFacts& facts) { return component(facts, "UCX"); }, findings);
  check_equal(
      diagnosis, "mpi_differs", "the version of MPI", Severity::kWarning,
      "ranks of different MPIs cannot communicate", "install the same MPI on every host",
      [](const HostFacts& facts) { return component(facts, "MPI"); }, findings);
  check_equal(
      diagnosis, "nccl_differs", "the version of NCCL", Severity::kWarning,
      "hvd then copies GPU tensors through the host's memory",
      "install the same NCCL on every host",
      [](const HostFacts& facts) { return component(facts, "NCCL"); }, findings);
}

void check_job(const JobResult& job, Findings& findings) {
  if (!job.succeeded) {
    findings.add({.id = "job_failed",
                  .severity = Severity::kError,
                  .host = "",
                  .what = text("no job could be measured: ", job.error),
                  .advice = job.command.empty() ? "" : text("run it by hand: ", job.command)});
  }
  for (const std::string& warning : job.warnings) {
    findings.add({.id = "hvd_warning",
                  .severity = Severity::kWarning,
                  .host = "",
                  .what = text("hvd has logged: ", warning),
                  .advice = "docs/guides/troubleshooting.md has a row for this text"});
  }
  for (const RankReport& rank : job.ranks) {
    for (const ClockOffset& clock : rank.clocks) {
      if (std::abs(clock.offset_s) < kClockOffsetWarning_s + clock.error_s) continue;
      findings.add({.id = "clock_offset",
                    .severity = Severity::kWarning,
                    .host = host_of(job, clock.rank),
                    .what = text("the clock is ", format_seconds(std::abs(clock.offset_s)),
                                 clock.offset_s > 0 ? " ahead of" : " behind", " that of ",
                                 rank.host, "; times in logs and timelines do not fit together"),
                    .advice = "chronyc makestep, or timedatectl set-ntp true"});
    }
  }
}

/// Reports ranks of one host that use messages although they could use shared memory.
void check_backends(const JobResult& job, Findings& findings) {
  for (const RankReport& rank : job.ranks) {
    for (const Measurement& measured : rank.measurements) {
      const bool messages = measured.backend == "ucx" || measured.backend == "mpi";
      if (measured.scope != "host" || measured.operation != "allreduce" || !messages) continue;
      findings.add({.id = "no_shared_memory",
                    .severity = Severity::kWarning,
                    .host = rank.host,
                    .what = text("ranks of this host exchange tensors by messages over ",
                                 measured.backend, ", not by shared memory"),
                    .advice = "see the findings about /dev/shm; HVD_BACKEND must be unset"});
      break;
    }
  }
}

/// The interface that carries the job's connections between hosts. If there are none, the first one
/// whose addresses no other host has.
std::string good_interface(const Diagnosis& diagnosis,
                           const std::map<std::string, std::vector<std::string>>& owners) {
  for (const RankReport& rank : diagnosis.job.ranks) {
    for (const Connection& connection : rank.connections)
      if (!connection.interface.empty()) return connection.interface;
  }
  for (const HostResult& host : diagnosis.hosts) {
    if (!host.facts) continue;
    for (const Interface& interface : host.facts->interfaces) {
      if (std::all_of(interface.addresses.begin(), interface.addresses.end(),
                      [&](const std::string& own) { return owners.at(own).size() == 1; }))
        return interface.name;
    }
  }
  return "INTERFACE";
}

/// Reports addresses that several hosts have: a rank that connects to such an address may reach its
/// own host.
void check_addresses(const Diagnosis& diagnosis, Findings& findings) {
  std::map<std::string, std::vector<std::string>> owners;
  std::map<std::string, std::string> interface_of;
  for (const HostResult& host : diagnosis.hosts) {
    if (!host.facts) continue;
    for (const Interface& interface : host.facts->interfaces) {
      for (const std::string& address : interface.addresses) {
        owners[address].push_back(host.name);
        interface_of[address] = interface.name;
      }
    }
  }
  const std::string good = good_interface(diagnosis, owners);
  for (const auto& [address, hosts] : owners) {
    if (hosts.size() < 2) continue;
    findings.add(
        {.id = "address_of_several_hosts",
         .severity = diagnosis.job.succeeded ? Severity::kWarning : Severity::kError,
         .host = "",
         .what = text(join_text(hosts, ", ", " and "), " all have the address ", address, " (",
                      interface_of[address],
                      "), as docker's and libvirt's bridges do; a rank that connects to it reaches "
                      "its own host"),
         .advice = text("hvdrun -x UCX_NET_DEVICES=", good,
                        "; with Open MPI: --mpi-args '--mca btl_tcp_if_include ", good,
                        " --mca oob_tcp_if_include ", good, "'")});
  }
}

void check_reach(const JobResult& job, Findings& findings) {
  for (const RankReport& rank : job.ranks) {
    std::map<int, std::pair<int, int>> reached;  // by rank: addresses that answer, all
    for (const Reach& reach : rank.reach) {
      reached[reach.rank].first += reach.reached ? 1 : 0;
      ++reached[reach.rank].second;
    }
    for (const Reach& reach : rank.reach) {
      if (reach.reached) continue;
      const bool none = reached[reach.rank].first == 0;
      findings.add({.id = none ? "no_address_reached" : "address_not_reached",
                    .severity = none ? Severity::kError : Severity::kInfo,
                    .host = host_of(job, reach.rank),
                    .what = text(reach.address, " (", reach.interface, ") cannot be reached from ",
                                 rank.host, ": ", reach.problem),
                    .advice = none ? "open TCP between the hosts in the firewall, all ports from "
                                     "1024 on"
                                   : "if jobs hang at the start, name the interface that works: "
                                     "-x UCX_NET_DEVICES=..."});
    }
  }
}

/// Reports RDMA adapters that a job does not use although it has several hosts.
void check_rdma(const Diagnosis& diagnosis, Findings& findings) {
  if (!diagnosis.job.transports) return;
  std::set<std::string> hosts;
  for (const RankReport& rank : diagnosis.job.ranks) hosts.insert(rank.host);
  const auto& used = *diagnosis.job.transports;
  const bool only_tcp = std::all_of(used.begin(), used.end(), [](const std::string& transport) {
    return transport.starts_with("tcp/") || transport.starts_with("self/");
  });
  if (hosts.size() < 2 || used.empty() || !only_tcp) return;
  for (const HostResult& host : diagnosis.hosts) {
    if (!host.facts || host.facts->rdma_devices.empty()) continue;
    findings.add({.id = "rdma_unused",
                  .severity = Severity::kWarning,
                  .host = host.name,
                  .what = text("messages go over TCP although the host has ",
                               join_text(host.facts->rdma_devices, ", ")),
                  .advice = "unset UCX_TLS and UCX_NET_DEVICES; install UCX's parts for RDMA "
                            "(Debian: libucx0 with rdma-core); raise ulimit -l"});
  }
}

/// The ranks that the job starts on a host.
int ranks_on(const JobResult& job, const HostResult& host) {
  const auto count = std::count_if(job.ranks.begin(), job.ranks.end(), [&](const RankReport& rank) {
    return rank.host == host.facts->hostname;
  });
  return count > 0 ? static_cast<int>(count) : host.slots;
}

}  // namespace

std::string host_of(const JobResult& job, int rank) {
  const auto found = std::find_if(job.ranks.begin(), job.ranks.end(),
                                  [rank](const RankReport& report) { return report.rank == rank; });
  return found == job.ranks.end() ? text("the host of rank ", rank) : found->host;
}

std::string_view to_string(Severity severity) {
  return kSeverityNames[static_cast<std::size_t>(severity)];
}

std::vector<Finding> find_problems(const Diagnosis& diagnosis) {
  Findings findings;
  for (const HostResult& host : diagnosis.hosts) {
    check_reached(host, findings);
    if (!host.facts) continue;
    check_libraries(host, diagnosis.job, findings);
    check_shared_memory(host, findings);
    check_limits(host, findings);
    check_cpus(host, ranks_on(diagnosis.job, host), findings);
    check_memory(host, findings);
    check_cpu_pairs(host, findings);
  }
  check_same_software(diagnosis, findings);
  check_job(diagnosis.job, findings);
  check_backends(diagnosis.job, findings);
  check_addresses(diagnosis, findings);
  check_reach(diagnosis.job, findings);
  check_rdma(diagnosis, findings);
  return std::move(findings).sorted();
}

int exit_code(const Diagnosis& diagnosis) {
  return std::any_of(diagnosis.findings.begin(), diagnosis.findings.end(),
                     [](const Finding& f) { return f.severity == Severity::kError; })
             ? 1
             : 0;
}

}  // namespace hvd::launcher::doctor
