#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <iterator>
#include <regex>
#include <string>

#include "made_up_hosts.h"

namespace hvd::launcher::doctor::test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<std::string> ids_of(const Diagnosis& diagnosis) {
  std::vector<std::string> ids;
  for (const Finding& finding : find_problems(diagnosis)) ids.push_back(finding.id);
  return ids;
}

TEST(Findings, GoodHostsHaveNone) { EXPECT_THAT(ids_of(good_diagnosis()), IsEmpty()); }

/// One change of the second host's facts, and the only finding that it causes.
struct Case {
  const char* name;
  std::function<void(HostFacts&)> change;
  std::string id;
  Severity severity;
  std::string what;
  std::string advice;
};

class OneProblem : public ::testing::TestWithParam<Case> {};

TEST_P(OneProblem, IsFoundOnItsHost) {
  Diagnosis diagnosis = good_diagnosis();
  GetParam().change(*diagnosis.hosts[1].facts.value);
  const std::vector<Finding> found = find_problems(diagnosis);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].id, GetParam().id);
  EXPECT_EQ(found[0].severity, GetParam().severity);
  EXPECT_THAT(found[0].what, HasSubstr(GetParam().what));
  EXPECT_THAT(found[0].advice, HasSubstr(GetParam().advice));
  const bool of_both =
      found[0].id.ends_with("_differs") || found[0].id == "address_of_several_hosts";
  EXPECT_EQ(found[0].host, of_both ? "" : "h2");
}

INSTANTIATE_TEST_SUITE_P(
    Hosts, OneProblem,
    ::testing::Values(
        Case{"NoSharedMemory",
             [](HostFacts& facts) {
               facts.shared_memory.usable = unknown<bool>("a file cannot be made there: Read-only");
             },
             "shm_unusable", Severity::kError, "Read-only", "--shm-size"},
        Case{"LittleSharedMemory",
             [](HostFacts& facts) { facts.shared_memory.free_bytes = 1 << 20; }, "shm_small",
             Severity::kWarning, "1 MiB free, less than 64 MiB", "remount"},
        Case{"FewFilesForGood",
             [](HostFacts& facts) { facts.limits.open_files = Limit{.soft = 64, .hard = 64}; },
             "few_open_files", Severity::kError, "may open 64 files (hard limit 64)",
             "limits.conf"},
        Case{"FewFilesAtFirst",
             [](HostFacts& facts) { facts.limits.open_files = Limit{.soft = 64, .hard = 4096}; },
             "few_open_files", Severity::kWarning, "64 files (hard limit 4096)", "ulimit -n"},
        Case{"FewProcesses",
             [](HostFacts& facts) { facts.limits.processes = Limit{.soft = 100, .hard = 100}; },
             "few_processes", Severity::kWarning, "100 processes", "ulimit -u"},
        Case{"HalfACpu", [](HostFacts& facts) { facts.cpus.quota = 0.5; }, "cpu_quota",
             Severity::kError, "grants 0.5 CPUs to 1 rank", "--cpus=1"},
        Case{"Busy", [](HostFacts& facts) { facts.cpus.load = 9.0; }, "host_busy", Severity::kInfo,
             "9 processes", "repeat"},
        Case{"NoCommonCache",
             [](HostFacts& facts) {
               facts.cpus.pairs = std::vector<CpuPair>{
                   {.first = 0, .second = 2, .shares = "machine", .round_trip_ns = 640.0}};
             },
             "no_shared_cache", Severity::kInfo,
             "CPUs 0 and 2 share no cache (only the machine): a flag takes 640 ns", "--bind"},
        Case{"SlowFlag",
             [](HostFacts& facts) {
               facts.cpus.pairs = std::vector<CpuPair>{
                   {.first = 0, .second = 1, .shares = "L3", .round_trip_ns = 640.0}};
             },
             "slow_flag", Severity::kInfo, "said to share L3, but a flag takes 640 ns", "pin"},
        Case{"NoOvercommit", [](HostFacts& facts) { facts.memory.overcommit = 2; }, "no_overcommit",
             Severity::kWarning, "vm.overcommit_memory is 2", "sysctl"},
        Case{"NoPtrace", [](HostFacts& facts) { facts.memory.cross_memory_attach = false; },
             "no_cross_memory_attach", Severity::kInfo, "may not read", "SYS_PTRACE"},
        Case{"AnotherBuild", [](HostFacts& facts) { facts.hvd = "0.1.0 (build 2)"; },
             "build_differs", Severity::kError, "0.1.0 (build 1) on h1; 0.1.0 (build 2) on h2",
             "one build"},
        Case{"AnotherUcx", [](HostFacts& facts) { facts.components["UCX"] = "1.17.0"; },
             "ucx_differs", Severity::kWarning, "1.17.0 on h2", "same UCX"},
        Case{"DockersAddress",
             [](HostFacts& facts) {
               facts.interfaces.push_back(
                   {.name = "docker0", .addresses = {"10.0.0.1"}, .virtual_kind = "bridge"});
             },
             "address_of_several_hosts", Severity::kWarning,
             "h1 and h2 all have the address 10.0.0.1 (docker0)", "UCX_NET_DEVICES=eth0"}),
    [](const auto& instance) { return std::string(instance.param.name); });

TEST(Findings, AQuotaBelowTheRanksIsAWarningFromOneCpuOn) {
  Diagnosis diagnosis = good_diagnosis();
  diagnosis.hosts = {good_host("h1")};
  for (RankReport& rank : diagnosis.job.ranks) rank.host = "h1";
  diagnosis.hosts[0].facts.value->cpus.quota = 1.5;
  const Finding found = finding_of(diagnosis, "cpu_quota");
  EXPECT_EQ(found.severity, Severity::kWarning);
  EXPECT_THAT(found.what, HasSubstr("1.5 CPUs to 2 ranks"));
}

TEST(Findings, MoreRanksThanCpus) {
  Diagnosis diagnosis = good_diagnosis();
  diagnosis.hosts = {good_host("h1")};
  diagnosis.hosts[0].facts.value->cpus.allowed = {3};
  for (RankReport& rank : diagnosis.job.ranks) rank.host = "h1";
  EXPECT_THAT(finding_of(diagnosis, "few_cpus").what, HasSubstr("2 ranks share 1 of the host's 4"));
}

TEST(Findings, AClockThatIsOff) {
  Diagnosis diagnosis = good_diagnosis();
  diagnosis.job.ranks[0].clocks[0] = {.rank = 1, .offset_s = -3, .error_s = 0.001};
  const Finding found = finding_of(diagnosis, "clock_offset");
  EXPECT_EQ(found.host, "h2");
  EXPECT_THAT(found.what, HasSubstr("3 s behind that of h1"));
  EXPECT_THAT(found.advice, HasSubstr("chronyc"));
  diagnosis.job.ranks[0].clocks[0].error_s = 4;  // the offset may be the network's
  EXPECT_EQ(finding_of(diagnosis, "clock_offset").id, "");
}

TEST(Findings, ADeadHostAndOneWithoutHvd) {
  Diagnosis diagnosis = good_diagnosis();
  diagnosis.hosts[1].facts = unknown<HostFacts>("ssh: connect to host h2: No route to host");
  Finding found = finding_of(diagnosis, "host_unreachable");
  EXPECT_EQ(found.severity, Severity::kError);
  EXPECT_THAT(found.advice, HasSubstr("ssh -o BatchMode=yes h2 true"));
  diagnosis.hosts[1].facts = unknown<HostFacts>("sh: hvdrun: not found");
  EXPECT_THAT(finding_of(diagnosis, "hvd_missing").advice, HasSubstr("same path"));
}

TEST(Findings, AFailedJobAndItsWarnings) {
  Diagnosis diagnosis = good_diagnosis();
  diagnosis.job.succeeded = false;
  diagnosis.job.error = "rank 1 on h2: no UCX";
  diagnosis.job.command = "hvdrun -np 2 x";
  diagnosis.job.warnings = {"the sky falls"};
  diagnosis.findings = find_problems(diagnosis);
  ASSERT_EQ(diagnosis.findings.size(), 2U);
  EXPECT_EQ(diagnosis.findings[0].id, "job_failed");
  EXPECT_THAT(diagnosis.findings[0].what, HasSubstr("rank 1 on h2: no UCX"));
  EXPECT_THAT(diagnosis.findings[0].advice, HasSubstr("hvdrun -np 2 x"));
  EXPECT_EQ(diagnosis.findings[1].id, "hvd_warning");
  EXPECT_EQ(exit_code(diagnosis), 1);
}

TEST(Findings, AMissingUcxIsAnErrorIfNoJobRuns) {
  Diagnosis diagnosis = good_diagnosis();
  for (HostResult& host : diagnosis.hosts)
    host.facts.value->components["UCX"] = "libucp.so.0: cannot open shared object file";
  EXPECT_EQ(finding_of(diagnosis, "ucx_missing").severity, Severity::kWarning);
  EXPECT_EQ(finding_of(diagnosis, "no_launcher").id, "");
  diagnosis.job.succeeded = false;
  diagnosis.hosts[0].facts.value->mpirun = unknown<std::string>("'mpirun' is not in PATH");
  EXPECT_EQ(finding_of(diagnosis, "ucx_missing").severity, Severity::kError);
  EXPECT_THAT(finding_of(diagnosis, "no_launcher").advice, HasSubstr("libucx0"));
}

TEST(Findings, RanksOfAHostThatExchangeMessages) {
  Diagnosis diagnosis = good_diagnosis();
  diagnosis.job.ranks[0].measurements[0].scope = "host";
  EXPECT_EQ(finding_of(diagnosis, "no_shared_memory").host, "h1");
  diagnosis.job.ranks[0].measurements[0].backend = "shm";
  EXPECT_EQ(finding_of(diagnosis, "no_shared_memory").id, "");
}

TEST(Findings, AnAddressOfBothHostsIsAnErrorIfTheJobFails) {
  Diagnosis diagnosis = good_diagnosis();
  for (HostResult& host : diagnosis.hosts)
    host.facts.value->interfaces.insert(
        host.facts.value->interfaces.begin(),
        {.name = "docker0", .addresses = {"172.17.0.1"}, .virtual_kind = "bridge"});
  diagnosis.job.succeeded = false;
  for (RankReport& rank : diagnosis.job.ranks) rank.connections.clear();
  const Finding found = finding_of(diagnosis, "address_of_several_hosts");
  EXPECT_EQ(found.severity, Severity::kError);
  EXPECT_THAT(found.advice, HasSubstr("UCX_NET_DEVICES=eth0"));
}

TEST(Findings, AddressesThatDoNotAnswer) {
  Diagnosis diagnosis = good_diagnosis();
  auto& reach = diagnosis.job.ranks[0].reach;
  reach.push_back({.rank = 1,
                   .interface = "docker0",
                   .address = "172.17.0.1",
                   .reached = false,
                   .problem = "another program or host has answered"});
  EXPECT_EQ(finding_of(diagnosis, "address_not_reached").severity, Severity::kInfo);
  EXPECT_THAT(finding_of(diagnosis, "address_not_reached").what,
              HasSubstr("172.17.0.1 (docker0) cannot be reached from h1: another program"));
  reach.erase(reach.begin());
  EXPECT_EQ(finding_of(diagnosis, "no_address_reached").severity, Severity::kError);
}

TEST(Findings, ALimitOfLockedMemoryMattersToRdma) {
  Diagnosis diagnosis = good_diagnosis();
  diagnosis.job.transports = std::vector<std::string>{"rc_mlx5/mlx5_0:1"};
  HostFacts& facts = *diagnosis.hosts[1].facts.value;
  facts.limits.locked_memory_bytes = Limit{.soft = 65536, .hard = 65536};
  EXPECT_THAT(ids_of(diagnosis), IsEmpty());
  facts.rdma_devices = {"mlx5_0"};
  const Finding found = finding_of(diagnosis, "locked_memory_limited");
  EXPECT_EQ(found.severity, Severity::kWarning);
  EXPECT_THAT(found.what, HasSubstr("64 KiB of memory, and mlx5_0"));
  EXPECT_THAT(found.advice, HasSubstr("ulimit -l"));
}

TEST(Findings, AnRdmaAdapterThatIsNotUsed) {
  Diagnosis diagnosis = good_diagnosis();
  diagnosis.hosts[0].facts.value->rdma_devices = {"mlx5_0"};
  diagnosis.hosts[0].facts.value->limits.locked_memory_bytes = Limit{};
  EXPECT_THAT(finding_of(diagnosis, "rdma_unused").what, HasSubstr("mlx5_0"));
  diagnosis.job.transports = std::vector<std::string>{"rc_mlx5/mlx5_0:1"};
  EXPECT_EQ(finding_of(diagnosis, "rdma_unused").id, "");
}

TEST(Findings, EachIsDescribedOnThePage) {
  const auto content = [](const std::string& path) {
    std::ifstream stream(std::string(HVD_TEST_SOURCES) + path);
    return std::string(std::istreambuf_iterator<char>(stream), {});
  };
  const std::string source = content("/launcher/doctor/findings.cpp");
  const std::string page = content("/docs/doctor.md");
  const std::regex name(R"re("([a-z]+(_[a-z]+)+)")re");
  int names = 0;
  for (std::sregex_iterator at(source.begin(), source.end(), name), end; at != end; ++at, ++names)
    EXPECT_THAT(page, HasSubstr("`" + (*at)[1].str() + "`"));
  EXPECT_GT(names, 20);
}

TEST(Findings, ErrorsComeFirst) {
  Diagnosis diagnosis = good_diagnosis();
  HostFacts& facts = *diagnosis.hosts[0].facts.value;
  facts.memory.cross_memory_attach = false;
  facts.memory.overcommit = 2;
  diagnosis.hosts[1].facts = unknown<HostFacts>("dead");
  const auto found = find_problems(diagnosis);
  ASSERT_EQ(found.size(), 3U);
  EXPECT_EQ(found[0].severity, Severity::kError);
  EXPECT_EQ(found[1].severity, Severity::kWarning);
  EXPECT_EQ(found[2].severity, Severity::kInfo);
  diagnosis.findings = {found[1], found[2]};
  EXPECT_EQ(exit_code(diagnosis), 0);
}

}  // namespace
}  // namespace hvd::launcher::doctor::test
