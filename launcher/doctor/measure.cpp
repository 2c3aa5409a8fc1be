#include "doctor/measure.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <system_error>
#include <utility>

#include "base/text.h"
#include "doctor/collect.h"
#include "doctor/connections.h"
#include "hvd/collectives.h"
#include "hvd/hvd.h"
#include "system/process.h"

namespace hvd::launcher::doctor {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr std::uint64_t kSizes[] = {8, 64 << 10, 8 << 20};
constexpr std::uint64_t kLarge = 64 << 10;  // from here on the time grows with the size
constexpr double kSeriesSeconds = 0.2;
/// Operations that would take longer than kMaxSeconds are not measured, nor are any after
/// kMaxJobSeconds of the job.
constexpr double kMaxSeconds = 0.7, kMaxJobSeconds = 5;
constexpr int kMinRepetitions = 3, kMaxRepetitions = 500;
/// Hosts whose connection with rank 0's host is measured, and tried at all addresses.
constexpr std::size_t kMaxPairs = 6, kMaxTriedHosts = 16;

void run(Submission submission) {
  const Operation operation = submit(std::move(submission), Progress::kCaller);
  operation.wait();
  operation.status().raise_if_error();
}

template <class Container>
TensorView view(Container& buffer, DataType dtype) {
  const auto count = static_cast<std::int64_t>(buffer.size());
  return {.data = reinterpret_cast<std::byte*>(buffer.data()),
          .count = count,
          .dtype = dtype,
          .device = {},
          .shape = {count}};
}

void allreduce(const ProcessSet& set, const std::string& name, std::vector<float>& buffer,
               ReduceOp op = ReduceOp::kSum) {
  const TensorView tensor = view(buffer, DataType::kFloat32);
  run({.name = name,
       .parameters = Allreduce{.op = op},
       .input = tensor,
       .output = tensor,
       .process_set = set.id()});
}

void broadcast(const ProcessSet& set, const std::string& name, int root, const TensorView& tensor) {
  run({.name = name,
       .parameters = Broadcast{.root = root},
       .input = tensor,
       .output = tensor,
       .process_set = set.id()});
}

/// The texts of all ranks, in rank order. Collective.
std::vector<std::string> gather_texts(const std::string& name, std::string mine) {
  std::vector<std::size_t> lengths;
  std::string all;
  Submission submission;
  submission.name = name;
  submission.parameters = Allgather{};
  submission.input = view(mine, DataType::kUInt8);
  submission.allocate_output = [&](const OutputSizes& sizes) {
    lengths.assign(sizes.first_dims.begin(), sizes.first_dims.end());
    all.resize(std::accumulate(lengths.begin(), lengths.end(), std::size_t{0}));
    return view(all, DataType::kUInt8);
  };
  run(std::move(submission));
  std::vector<std::string> texts;
  std::size_t begin = 0;
  for (const std::size_t length : lengths) {
    texts.push_back(all.substr(begin, length));
    begin += length;
  }
  return texts;
}

/// The ranks of each host, in the order of their first ranks. Collective.
std::vector<std::vector<int>> ranks_by_host(const std::string& own) {
  std::map<std::string, std::size_t> indices;
  std::vector<std::vector<int>> hosts;
  int rank = 0;
  for (const std::string& name : gather_texts("hvd-doctor.hosts", own)) {
    const auto [entry, is_new] = indices.emplace(name, hosts.size());
    if (is_new) hosts.emplace_back();
    hosts[entry->second].push_back(rank++);
  }
  return hosts;
}

/// Tries all addresses of the other hosts from the first host, and those of the first host from the
/// others. Collective.
std::vector<Reach> try_hosts(const std::vector<std::vector<int>>& hosts) {
  const auto greeting_of = [](int rank) { return text("hvd-doctor rank ", rank, " of ", size()); };
  const Greeter greeter(greeting_of(rank()));
  const nlohmann::json own = {{"port", greeter.port()}, {"interfaces", network_interfaces()}};
  const std::vector<std::string> addresses = gather_texts("hvd-doctor.addresses", own.dump());
  std::vector<Reach> results;
  for (std::size_t host = 1; host < std::min(hosts.size(), kMaxTriedHosts); ++host) {
    const std::array ends = {hosts[0].front(), hosts[host].front()};
    if (rank() != ends[0] && rank() != ends[1]) continue;
    const int peer = rank() == ends[0] ? ends[1] : ends[0];
    const auto address = nlohmann::json::parse(addresses[static_cast<std::size_t>(peer)]);
    const auto tried =
        try_addresses({.rank = peer,
                       .port = address.at("port").get<std::uint16_t>(),
                       .greeting = greeting_of(peer),
                       .interfaces = address.at("interfaces").get<std::vector<Interface>>()});
    results.insert(results.end(), tried.begin(), tried.end());
  }
  barrier();  // the greeters stay until every rank has tried
  return results;
}

/// An exchange of times between the two ranks of a set: nanoseconds on the clock of each.
struct Exchange {
  std::int64_t sent = 0, returned = 0;    ///< the first rank's
  std::array<std::int64_t, 2> peer = {};  ///< received and replied, by the second rank
  std::int64_t round_trip() const { return (returned - sent) - (peer[1] - peer[0]); }
  /// How far the second rank's clock is ahead, with an error of at most half the round trip.
  double offset() const { return static_cast<double>((peer[0] - sent) + (peer[1] - returned)) / 2; }
};

Exchange exchange_times(const ProcessSet& pair, const std::string& name) {
  const std::vector<int> ranks = pair.ranks();
  const bool first = pair.rank() == 0;
  Exchange result;
  const TensorView there = view(result.peer, DataType::kInt64);
  if (first) result.sent = realtime_ns();
  broadcast(pair, name, ranks[0], there);
  if (!first) result.peer.fill(realtime_ns());
  broadcast(pair, name + ".back", ranks[1], there);
  if (first) result.returned = realtime_ns();
  return result;
}

/// An operation that is timed on all ranks of a set.
struct Probe {
  ProcessSet set;
  Measurement result;  ///< the same on all ranks except for the times
  std::function<void()> once;
  std::vector<double> times_s = {};

  std::string name() const {
    return text("hvd-doctor.", result.operation, ".", set.id(), ".", result.bytes);
  }
  double median_s() const {
    std::vector<double> sorted = times_s;
    std::sort(sorted.begin(), sorted.end());
    return sorted.empty() ? 0 : sorted[sorted.size() / 2];
  }
};

Probe probe_of(const ProcessSet& set, const char* operation, const char* scope,
               std::uint64_t bytes) {
  return {.set = set,
          .result = {.operation = operation,
                     .scope = scope,
                     .ranks = set.ranks(),
                     .bytes = bytes,
                     .median_us = {},
                     .repetitions = 0,
                     .backend = ""},
          .once = {}};
}

double seconds_since(Clock::time_point begin) { return Seconds(Clock::now() - begin).count(); }

/// The largest value of a set's ranks.
double largest_of(const Probe& probe, const char* what, double value) {
  std::vector<float> largest = {static_cast<float>(value)};
  allreduce(probe.set, text(probe.name(), ".", what), largest, ReduceOp::kMax);
  return static_cast<double>(largest[0]);
}

/// Runs the probe as often as the time allows, equally often on all ranks of the set. @param
/// expected_s the expected time of one operation; equal on all ranks
/// @return the median time on the slowest rank
double time_probe(Probe& probe, double expected_s, Clock::time_point job_began) {
  const auto leave_out = [&](const std::string& reason) {
    probe.result.median_us = unknown<double>("not measured, because " + reason);
    return expected_s;
  };
  if (expected_s > kMaxSeconds)
    return leave_out(text("one would take about ", static_cast<int>(expected_s + 1), " s"));
  if (largest_of(probe, "elapsed", seconds_since(job_began)) > kMaxJobSeconds)
    return leave_out(text("the job has taken ", kMaxJobSeconds, " s"));
  const auto seconds = [&] {
    const auto begin = Clock::now();
    probe.once();
    return seconds_since(begin);
  };
  seconds();  // opens channels and connections
  const double slowest = largest_of(probe, "slowest", seconds());
  const double fitting = kSeriesSeconds / std::max(slowest, 1e-7);
  const auto wanted = static_cast<std::size_t>(std::clamp(
      fitting, static_cast<double>(kMinRepetitions), static_cast<double>(kMaxRepetitions)));
  // On a busy host most repetitions may take far longer than the first.
  const std::size_t chunk = std::max<std::size_t>(kMinRepetitions, wanted / 8);
  const auto began = Clock::now();
  do {
    for (std::size_t i = 0; i < chunk; ++i) probe.times_s.push_back(seconds());
  } while (probe.times_s.size() < wanted &&
           largest_of(probe, "series", seconds_since(began)) < 2 * kSeriesSeconds);
  probe.result.repetitions = static_cast<int>(probe.times_s.size());
  probe.result.median_us = probe.median_s() * 1e6;
  return largest_of(probe, "median", probe.median_s());
}

/// Times the probes of a set, which are ordered by size.
void time_probes(std::span<Probe> probes, Clock::time_point job_began) {
  double smaller_s = 0;
  std::uint64_t smaller = 0;
  for (Probe& probe : probes) {
    const double factor =
        smaller >= kLarge ? static_cast<double>(probe.result.bytes) / static_cast<double>(smaller)
                          : 0;
    smaller_s = time_probe(probe, smaller_s * factor, job_began);
    smaller = probe.result.bytes;
  }
}

std::vector<Probe> measure_allreduces(const ProcessSet& set, const char* scope,
                                      Clock::time_point job_began) {
  std::vector<Probe> probes;
  for (const std::uint64_t bytes : kSizes) {
    Probe probe = probe_of(set, "allreduce", scope, bytes);
    probe.once = [set, name = probe.name(),
                  buffer = std::vector<float>(bytes / sizeof(float), 1.0F)]() mutable {
      allreduce(set, name, buffer);
    };
    probes.push_back(std::move(probe));
  }
  time_probes(probes, job_began);
  return probes;
}

/// Measures messages between the two ranks of a set: half of the round-trip time.
std::vector<Probe> measure_sends(const ProcessSet& pair, const char* scope,
                                 Clock::time_point job_began, RankReport& report) {
  std::vector<Exchange> exchanges;
  std::vector<Probe> probes = {probe_of(pair, "send", scope, 2 * sizeof(std::int64_t))};
  probes[0].once = [&exchanges, pair, name = probes[0].name()] {
    exchanges.push_back(exchange_times(pair, name));
  };
  for (const std::uint64_t bytes : kSizes) {
    if (bytes < kLarge) continue;
    Probe probe = probe_of(pair, "send", scope, bytes);
    probe.once = [pair, name = probe.name(),
                  buffer = std::vector<float>(bytes / sizeof(float))]() mutable {
      const TensorView message = view(buffer, DataType::kFloat32);
      broadcast(pair, name, pair.ranks()[0], message);
      broadcast(pair, name + ".back", pair.ranks()[1], message);
    };
    probes.push_back(std::move(probe));
  }
  time_probes(probes, job_began);
  for (Probe& probe : probes)
    if (!probe.times_s.empty()) probe.result.median_us = probe.median_s() / 2 * 1e6;
  if (exchanges.empty()) return probes;
  const Exchange best = *std::min_element(
      exchanges.begin(), exchanges.end(),
      [](const Exchange& a, const Exchange& b) { return a.round_trip() < b.round_trip(); });
  if (pair.rank() == 0 && scope == std::string_view("hosts")) {
    report.clocks.push_back(
        {.rank = pair.ranks()[1],
         .offset_s = best.offset() / 1e9,
         .error_s = static_cast<double>(std::max<std::int64_t>(best.round_trip(), 0)) / 2e9});
  }
  // For find_backends(), which may run when `exchanges` no longer exists.
  probes[0].once = [pair, name = probes[0].name()] { exchange_times(pair, name); };
  return probes;
}

/// The backend of each operation in a timeline, by name.
std::map<std::string, std::string> backends_in(const std::filesystem::path& file) {
  std::map<std::string, std::string> backends;
  std::ifstream stream(file);
  const auto events = nlohmann::json::parse(stream, nullptr, false);
  std::map<int, std::string> names;
  for (const auto& event : events) {
    if (!event.is_object() || !event.contains("args") || !event.contains("tid")) continue;
    const auto& arguments = event.at("args");
    std::string& name = names[event.at("tid").get<int>()];
    if (arguments.contains("name")) name = arguments.at("name").get<std::string>();
    if (!arguments.contains("detail")) continue;
    const std::string detail = arguments.at("detail").get<std::string>();
    backends[name] = detail.substr(0, detail.find(", "));
  }
  return backends;
}

/// Runs each probe once under a timeline, which names its backend.
void find_backends(std::vector<Probe>& probes) {
  const std::filesystem::path file =
      std::filesystem::temp_directory_path() / text("hvd-doctor.", ::getpid(), ".{rank}.json");
  std::string written = file;
  written.replace(written.find("{rank}"), std::string_view("{rank}").size(), text(rank()));
  start_timeline(file);
  for (const Probe& probe : probes)
    if (!probe.times_s.empty()) probe.once();
  stop_timeline();
  const auto backends = backends_in(written);
  std::error_code ignored;
  std::filesystem::remove(written, ignored);
  for (Probe& probe : probes) {
    const auto found = backends.find(probe.name());
    if (found != backends.end()) probe.result.backend = found->second;
  }
}

}  // namespace

void measure_job(RankReport& report) {
  report.rank = rank();
  report.local_rank = local_rank();
  report.controller = controller();
  report.init_method = init_method();
  const auto began = Clock::now();
  const auto hosts = ranks_by_host(report.host);
  if (hosts.size() > 1) report.reach = try_hosts(hosts);

  std::vector<Probe> probes;
  const auto add = [&](std::vector<Probe> more) {
    std::move(more.begin(), more.end(), std::back_inserter(probes));
    barrier();  // the next set is measured alone
  };
  for (const auto& ranks : hosts) {
    if (ranks.size() < 2) continue;
    const ProcessSet set = add_process_set(ranks);
    add(set.included() ? measure_allreduces(set, "host", began) : std::vector<Probe>());
  }
  if (hosts.size() > 1) add(measure_allreduces(ProcessSet(), "hosts", began));
  std::vector<std::pair<std::vector<int>, const char*>> pairs;
  if (hosts[0].size() > 1) pairs.push_back({{hosts[0][0], hosts[0][1]}, "host"});
  for (std::size_t host = 1; host < std::min(hosts.size(), kMaxPairs + 1); ++host)
    pairs.push_back({{hosts[0].front(), hosts[host].front()}, "hosts"});
  for (const auto& [ranks, scope] : pairs) {
    const ProcessSet pair = add_process_set(ranks);
    add(pair.included() ? measure_sends(pair, scope, began, report) : std::vector<Probe>());
  }
  find_backends(probes);
  for (Probe& probe : probes)
    if (probe.set.rank() == 0) report.measurements.push_back(std::move(probe.result));
  report.connections = remote_connections();
}

}  // namespace hvd::launcher::doctor
