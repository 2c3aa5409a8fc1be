#include <algorithm>
#include <set>

#include "base/text.h"
#include "doctor/diagnosis.h"
#include "doctor/format.h"

namespace hvd::launcher::doctor {
namespace {

constexpr int kSchema = 1;

/// Lines with a name in the first column.
class Lines {
 public:
  void title(const std::string& line) { lines_ += line + "\n"; }
  void add(const std::string& name, const std::string& value) {
    constexpr std::size_t kColumn = 14;
    std::string line = "  " + name;
    line.resize(std::max(line.size() + 1, kColumn + 2), ' ');
    lines_ += line + value + "\n";
  }
  std::string take() && { return std::move(lines_); }

 private:
  std::string lines_;
};

template <class Value, class Format>
std::string or_unknown(const Fact<Value>& fact, const Format& format) {
  return fact ? format(*fact) : text("unknown: ", fact.unknown);
}

std::string limits_text(const LimitFacts& limits) {
  const auto count = [](const Limit& limit) {
    return limit.soft == limit.hard
               ? format_limit(limit.soft)
               : text(format_limit(limit.soft), " (hard ", format_limit(limit.hard), ")");
  };
  const auto bytes = [](const Limit& limit) {
    return limit.soft ? format_bytes(*limit.soft) : std::string("unlimited");
  };
  return text("open files ", or_unknown(limits.open_files, count), ", locked memory ",
              or_unknown(limits.locked_memory_bytes, bytes), ", processes ",
              or_unknown(limits.processes, count));
}

std::string shared_memory_text(const SharedMemoryFacts& shm) {
  if (!shm.usable) return text("not usable: ", shm.usable.unknown);
  return text(or_unknown(shm.free_bytes, format_bytes), " free of ",
              or_unknown(shm.total_bytes, format_bytes));
}

std::string memory_text(const MemoryFacts& memory) {
  const auto as_is = [](const std::string& value) { return value; };
  return text(or_unknown(memory.available_bytes, format_bytes), " available, overcommit ",
              or_unknown(memory.overcommit, [](int mode) { return text(mode); }), ", huge pages ",
              or_unknown(memory.huge_pages, as_is),
              " (shared memory: ", or_unknown(memory.huge_pages_shm, as_is),
              "), reading other processes ",
              or_unknown(memory.cross_memory_attach,
                         [](bool allowed) { return allowed ? "allowed" : "refused"; }));
}

std::string cpus_text(const CpuFacts& cpus) {
  std::string line =
      text(cpus.allowed.size(), " of ", cpus.online, " (", format_cpus(cpus.allowed), "), quota ",
           cpus.quota ? format_number(*cpus.quota) : std::string("none"), ", load ",
           or_unknown(cpus.load, format_number));
  if (!cpus.caches) return text(line, "; caches unknown: ", cpus.caches.unknown);
  std::vector<std::string> shared;
  constexpr std::size_t kShown = 8;
  for (const SharedCache& cache : *cpus.caches) {
    if (shared.size() < kShown) shared.push_back(text(cache.cache, " ", format_cpus(cache.cpus)));
  }
  if (cpus.caches->size() > kShown) shared.push_back(text(cpus.caches->size() - kShown, " more"));
  return text(line, "; shared caches: ", shared.empty() ? "none" : join_text(shared, ", "));
}

void add_host(const HostResult& host, Lines& lines) {
  lines.title(text("host ", host.name, host.local ? " (this host)" : ""));
  if (!host.facts) {
    lines.add("no facts", host.facts.unknown);
    return;
  }
  const HostFacts& facts = *host.facts;
  if (facts.hostname != host.name) lines.add("name", facts.hostname);
  lines.add("hvd", facts.hvd.empty() ? "unknown" : facts.hvd);
  for (const auto& [name, value] : facts.components) {
    if (name != "shared memory") lines.add(name, value);  // its state is below
  }
  lines.add("mpirun", or_unknown(facts.mpirun, [](const std::string& found) { return found; }));
  lines.add("CPUs", cpus_text(facts.cpus));
  if (!facts.cpus.pairs) {
    lines.add("flag", text("unknown: ", facts.cpus.pairs.unknown));
  } else {
    if (facts.cpus.pairs->empty()) lines.add("flag", "not measured: one CPU only");
    for (const CpuPair& pair : *facts.cpus.pairs) {
      lines.add("flag", text("CPUs ", pair.first, " and ", pair.second, " (share ", pair.shares,
                             "): ", or_unknown(pair.round_trip_ns, [](double ns) {
                               return format_number(ns) + " ns there and back";
                             })));
    }
  }
  lines.add("/dev/shm", shared_memory_text(facts.shared_memory));
  lines.add("memory", memory_text(facts.memory));
  lines.add("limits", limits_text(facts.limits));
  std::vector<std::string> interfaces;
  for (const Interface& interface : facts.interfaces) {
    interfaces.push_back(
        text(interface.name,
             interface.virtual_kind.empty() ? "" : text(" (", interface.virtual_kind, ")"), " ",
             join_text(interface.addresses, " ")));
  }
  lines.add("network",
            interfaces.empty() ? "no interface besides loopback" : join_text(interfaces, ", "));
  if (!facts.rdma_devices.empty()) lines.add("RDMA", join_text(facts.rdma_devices, ", "));
}

std::string measurement_text(const JobResult& job, const Measurement& measured) {
  std::set<std::string> hosts;
  for (const int rank : measured.ranks) hosts.insert(host_of(job, rank));
  const std::string where =
      text(rank_list(std::span<const int>(measured.ranks)),
           hosts.size() > 1 ? text(" on ", hosts.size(), " hosts") : text(" on ", *hosts.begin()));
  const std::string head = text(format_bytes(measured.bytes), ", ", where, ": ");
  if (!measured.median_us) return text(head, "unknown: ", measured.median_us.unknown);
  std::string line = text(head, format_seconds(*measured.median_us / 1e6));
  if (measured.bytes >= 1024 * 1024) {
    line +=
        text(" (", format_number(static_cast<double>(measured.bytes) / *measured.median_us / 1e3),
             " GB/s)");
  }
  return text(line, measured.backend.empty() ? "" : text(", ", measured.backend));
}

void add_job(const Diagnosis& diagnosis, Lines& lines) {
  const JobResult& job = diagnosis.job;
  lines.title(text("job of ", job.np, job.np == 1 ? " rank" : " ranks"));
  if (!job.controller.empty()) lines.add("started by", job.controller);
  if (!job.error.empty()) lines.add("failed", job.error);
  lines.add("UCX uses", or_unknown(job.transports, [](const std::vector<std::string>& used) {
              return used.empty() ? std::string("no transport") : join_text(used, ", ");
            }));
  for (const ChosenBackend& choice : chosen_backends(diagnosis)) {
    lines.add(choice.scope == "host" ? "on one host" : "between hosts",
              text(choice.backend, ": ", choice.why));
  }
  for (const RankReport& rank : job.ranks) {
    if (!rank.error.empty()) lines.add(text("rank ", rank.rank), rank.error);
    for (const Measurement& measured : rank.measurements)
      lines.add(measured.operation, measurement_text(job, measured));
    for (const ClockOffset& clock : rank.clocks) {
      lines.add("clock",
                text(host_of(job, clock.rank), " is ", format_seconds(std::abs(clock.offset_s)),
                     clock.offset_s < 0 ? " behind " : " ahead of ", rank.host, ", +- ",
                     format_seconds(clock.error_s)));
    }
    std::set<std::string> connections;
    for (const Connection& c : rank.connections)
      connections.insert(text(c.interface.empty() ? "unknown interface" : c.interface, " ",
                              c.address, " to ", c.peer));
    for (const std::string& connection : connections)
      lines.add("connected", text("rank ", rank.rank, ": ", connection));
    for (const Reach& reach : rank.reach) {
      lines.add("reach", text(rank.host, " to ", host_of(job, reach.rank), " at ", reach.address,
                              " (", reach.interface, "): ", reach.reached ? "yes" : reach.problem));
    }
  }
}

/// Why the ranks of a host exchange messages.
std::string why_no_shared_memory(const Diagnosis& diagnosis, const std::string& hostname) {
  for (const HostResult& host : diagnosis.hosts) {
    if (!host.facts || host.facts->hostname != hostname) continue;
    const SharedMemoryFacts& shm = host.facts->shared_memory;
    if (!shm.usable) return text("/dev/shm is not usable: ", shm.usable.unknown);
    if (shm.free_bytes) return text("/dev/shm has ", format_bytes(*shm.free_bytes), " free");
  }
  return "HVD_BACKEND may be set";
}

}  // namespace

std::vector<ChosenBackend> chosen_backends(const Diagnosis& diagnosis) {
  std::vector<ChosenBackend> chosen;
  for (const RankReport& rank : diagnosis.job.ranks) {
    for (const Measurement& measured : rank.measurements) {
      const bool known = std::any_of(chosen.begin(), chosen.end(), [&](const ChosenBackend& c) {
        return c.scope == measured.scope && c.backend == measured.backend;
      });
      if (known || measured.operation != "allreduce" || measured.backend.empty()) continue;
      ChosenBackend found{.scope = measured.scope, .backend = measured.backend, .why = ""};
      const bool one_host = measured.scope == "host";
      if (measured.backend == "shm") {
        found.why = "/dev/shm is usable";
      } else if (measured.backend == "hierarchical") {
        found.why = text("shared memory on each host, ", rank.controller, " between the hosts");
      } else if (one_host) {
        found.why = why_no_shared_memory(diagnosis, rank.host);
      } else {
        found.why = text("started by ", diagnosis.job.controller);
      }
      chosen.push_back(std::move(found));
    }
  }
  return chosen;
}

nlohmann::json to_json(const Diagnosis& diagnosis) {
  using nlohmann::json;
  json hosts = json::array();
  for (const HostResult& host : diagnosis.hosts)
    hosts.push_back(
        {{"name", host.name}, {"slots", host.slots}, {"local", host.local}, {"facts", host.facts}});
  json findings = json::array();
  for (const Finding& finding : diagnosis.findings) {
    findings.push_back({{"id", finding.id},
                        {"severity", to_string(finding.severity)},
                        {"host", finding.host},
                        {"what", finding.what},
                        {"advice", finding.advice}});
  }
  json chosen = json::array();
  for (const ChosenBackend& choice : chosen_backends(diagnosis))
    chosen.push_back({{"scope", choice.scope}, {"backend", choice.backend}, {"why", choice.why}});
  const JobResult& job = diagnosis.job;
  return {{"schema", kSchema},
          {"hvdrun", diagnosis.hvdrun_version},
          {"seconds", diagnosis.seconds},
          {"hosts", hosts},
          {"job",
           {{"succeeded", job.succeeded},
            {"np", job.np},
            {"command", job.command},
            {"error", job.error},
            {"controller", job.controller},
            {"carriages", chosen},
            {"transports", job.transports},
            {"warnings", job.warnings},
            {"ranks", job.ranks}}},
          {"findings", findings},
          {"exit_code", exit_code(diagnosis)}};
}

std::string to_text(const Diagnosis& diagnosis) {
  Lines lines;
  lines.title(text("hvdrun doctor, hvd ", diagnosis.hvdrun_version, ": ", diagnosis.hosts.size(),
                   diagnosis.hosts.size() == 1 ? " host, " : " hosts, ",
                   format_number(diagnosis.seconds), " s"));
  for (const HostResult& host : diagnosis.hosts) add_host(host, lines);
  add_job(diagnosis, lines);
  lines.title(diagnosis.findings.empty() ? "no findings" : "findings");
  std::string result = std::move(lines).take();
  for (const Finding& finding : diagnosis.findings) {
    result += text("  ", to_string(finding.severity),
                   finding.host.empty() ? "" : text(" on ", finding.host), ": ", finding.what, " [",
                   finding.id, "]\n");
    if (!finding.advice.empty()) result += text("    -> ", finding.advice, "\n");
  }
  return result;
}

}  // namespace hvd::launcher::doctor
