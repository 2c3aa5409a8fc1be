#pragma once

#include <string>

#include "doctor/diagnosis.h"

namespace hvd::launcher::doctor::test {

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

/// A host without any problem.
inline HostResult good_host(const std::string& name) {
  HostFacts facts;
  facts.hostname = name;
  facts.hvd = "0.1.0 (build 1)";
  facts.components = {{"UCX", "1.13.1 (libucp.so.0)"}, {"MPI", "not built: no mpi.h"}};
  facts.mpirun = Fact<std::string>("/usr/bin/mpirun, mpirun (Open MPI) 4.1.4");
  facts.cpus = {.allowed = {0, 1, 2, 3},
                .online = 4,
                .quota = std::nullopt,
                .load = 0.1,
                .caches = std::vector<SharedCache>{{.cache = "L3", .cpus = {0, 1, 2, 3}}},
                .pairs = std::vector<CpuPair>{
                    {.first = 0, .second = 1, .shares = "L3", .round_trip_ns = 80.0}}};
  facts.shared_memory = {.usable = true, .total_bytes = 8 * kGiB, .free_bytes = 8 * kGiB};
  facts.limits = {.open_files = Limit{.soft = 1024, .hard = 1 << 20},
                  .locked_memory_bytes = Limit{.soft = 8 << 20, .hard = 8 << 20},
                  .processes = Limit{.soft = 60000, .hard = 60000}};
  facts.memory = {.available_bytes = 8 * kGiB,
                  .overcommit = 0,
                  .huge_pages = Fact<std::string>("madvise"),
                  .huge_pages_shm = Fact<std::string>("never"),
                  .cross_memory_attach = true};
  facts.interfaces = {
      {.name = "eth0", .addresses = {"10.0.0." + name.substr(1)}, .virtual_kind = ""}};
  return {.name = name, .slots = 1, .local = name == "h1", .facts = facts};
}

/// Two hosts with a rank each, whose job has succeeded.
inline Diagnosis good_diagnosis() {
  Diagnosis diagnosis;
  diagnosis.hvdrun_version = "0.1.0";
  diagnosis.hosts = {good_host("h1"), good_host("h2")};
  JobResult& job = diagnosis.job;
  job.succeeded = true;
  job.np = 2;
  job.controller = "ucx: UCX is found";
  job.transports = std::vector<std::string>{"tcp/eth0"};
  for (const int rank : {0, 1}) {
    RankReport report;
    report.rank = rank;
    report.host = rank == 0 ? "h1" : "h2";
    report.controller = "ucx";
    job.ranks.push_back(report);
  }
  job.ranks[0].measurements.push_back({.operation = "allreduce",
                                       .scope = "hosts",
                                       .ranks = {0, 1},
                                       .bytes = 8 << 20,
                                       .median_us = 8388.608,
                                       .repetitions = 9,
                                       .backend = "ucx"});
  job.ranks[0].clocks.push_back({.rank = 1, .offset_s = 0.001, .error_s = 0.0001});
  job.ranks[0].connections.push_back(
      {.interface = "eth0", .address = "10.0.0.1", .peer = "10.0.0.2"});
  job.ranks[0].reach.push_back(
      {.rank = 1, .interface = "eth0", .address = "10.0.0.2", .reached = true, .problem = ""});
  return diagnosis;
}

/// The finding with this id; one without an id if there is none.
inline Finding finding_of(const Diagnosis& diagnosis, const std::string& id) {
  for (const Finding& finding : find_problems(diagnosis))
    if (finding.id == id) return finding;
  return {};
}

}  // namespace hvd::launcher::doctor::test
